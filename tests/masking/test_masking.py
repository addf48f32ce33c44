"""What is taken for a secret, and what must not be."""

import pytest

from doctor.core.masking import LONGEST, REDACTED, is_secret_name, mask_command, mask_text, mask_value, readable
from tests.lab.cases import each_case


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "RAY_REDIS_PASSWORD",
        "SLURM_JWT",
        "RAY_AUTH",
        "OPENAI_APIKEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "my-secret",
        "NCCL_PLUGIN_PASSWORD",
        "--hf-token",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@each_case(
    "name",
    [
        "NCCL_IB_PKEY",
        "NCCL_PAT_ENABLE",
        "NCCL_SOCKET_MAGIC",
        "TOKENIZERS_PARALLELISM",
        "--tokenizer",
        "--max-tokens",
        "MASTER_ADDR",
        "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY",
        "KEYBOARD",
        "AUTHOR",
        "SLURM_JOB_PARTITION",
        "PATH",
        "COMPASS",
    ],
)
def test_names_that_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


@each_case(
    ("text", "shown"),
    [
        ("redis://user:hunter2@10.0.0.1:6379", "redis://<redacted>@10.0.0.1:6379"),
        ("http://proxy:3128", "http://proxy:3128"),
        ("tcp://10.0.0.1:29500", "tcp://10.0.0.1:29500"),
        ("a hf_" + "A1b2" * 8 + " b", "a <redacted> b"),
        ("ghp_" + "x" * 36, REDACTED),
        ("sk-" + "a1" * 20, REDACTED),
        ("sk-proj-" + "a1_-" * 8, REDACTED),
        ("AKIAIOSFODNN7EXAMPLE", REDACTED),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ.dozjgNryP4J3jVmNHl0w5N_XgL0", REDACTED),
        ("/data/sk-learn-runs-2026-with-a-long-name", "/data/sk-learn-runs-2026-with-a-long-name"),
        ("/disk-abcdefghijklmnopqrstuvwxyz", "/disk-abcdefghijklmnopqrstuvwxyz"),
        ("/cache/hf_home", "/cache/hf_home"),
        ("^docker,lo", "^docker,lo"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", REDACTED),
    ],
)
def test_values(text: str, shown: str) -> None:
    assert mask_text(text) == shown


def test_an_empty_secret_stays_empty() -> None:
    assert mask_value("HF_TOKEN", "") == ""
    assert mask_value("HF_TOKEN", "x") == REDACTED


def test_bytes_that_are_no_text_become_readable() -> None:
    value = b"eth\xff0".decode("utf-8", "surrogateescape")
    assert readable(value) == "eth\ufffd0"
    assert readable("größe") == "größe"


def test_huge_values_are_cut_and_say_so() -> None:
    shown = readable("x" * 1_000_000)
    assert shown.startswith("x" * LONGEST)
    assert shown.endswith("(1000000 characters)")
    assert len(shown) < LONGEST + 40


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["python", "train.py", "--hf-token", "abc", "--lr", "1"], "python train.py --hf-token <redacted> --lr 1"),
        (["python", "--api-key=abc", "x"], "python --api-key=<redacted> x"),
        (["env", "WANDB_API_KEY=abc", "python"], "env WANDB_API_KEY=<redacted> python"),
        (["vllm", "--tokenizer", "llama", "--max-tokens=5"], "vllm --tokenizer llama --max-tokens=5"),
        (["tool", "--password", "--verbose"], "tool --password --verbose"),
    ],
)
def test_commands(arguments: list[str], shown: str) -> None:
    assert mask_command(arguments) == shown


def test_a_long_command_is_cut() -> None:
    assert len(mask_command(["python", "x" * 1000])) == 200

"""Write the output of commands that README.md and pages of docs/ show.

    python benchmarks/samples.py [NAME]...

Each sample is the output of its command in an empty folder, in a terminal of 96 columns, or the part that a page shows.
tests/benchmarks/test_samples.py compares the pages with what they print.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence_pages import ROOT, write_between

BIN = Path(sys.executable).parent
WIDTH = "96"
FAILING = """import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(2)
dist.all_reduce(total)
if dist.get_rank() == 2:
    raise KeyError("label")
dist.all_reduce(total)
"""


CONFIGURATION = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
}
"""config.json of Meta-Llama-3-8B, as far as the estimate reads it."""


def run(command: str, folder: Path) -> str:
    """What a command line of bash prints, in a folder, with the commands of this environment."""
    settings = {"COLUMNS": WIDTH, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    environment = {**os.environ, **settings}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    return done.stdout.rstrip()


def console(command: str, output: str, note: str = "") -> str:
    """A block of code with a command and its output."""
    return f"```console\n$ {command}{note}\n{output}\n```"


def check_sample(folder: Path) -> str:
    """An interface that does not exist."""
    command = "NCCL_SOCKET_IFNAME=eth9 doctor check -q --select NET007"
    return console(command, run(command, folder))


def diagnose_sample(folder: Path) -> str:
    """Four ranks, one of which raises."""
    (folder / "train.py").write_text(FAILING, encoding="utf-8")
    run("torchrun --nproc-per-node=4 train.py >job.log 2>&1", folder)
    command = "doctor diagnose job.log --quiet | head -5"
    return console(command, run(command, folder).replace(f"{folder}/", ""), "        # four ranks under torchrun")


def lint_sample(folder: Path) -> str:
    """The example with three faults."""
    (folder / "train.py").write_bytes((ROOT / "examples" / "faulty_training.py").read_bytes())
    command = "doctor lint -q train.py"
    return console(command, run(command, folder))


def profile_sample(folder: Path) -> str:
    """One of the findings about a site's recommendation."""
    lines = run("doctor check --profile cscs-alps --select NCCL016", folder).splitlines()
    first = next(number for number, line in enumerate(lines) if "NCCL016" in line)
    chosen = next(number for number, line in enumerate(lines) if "NCCL_CROSS_NIC" in line)
    shown = "\n".join([lines[first], *lines[chosen : chosen + 3]])
    return f"```text\n{shown}\n```"


def estimate_sample(folder: Path) -> str:
    """What an estimate with a factory prints first."""
    (folder / "examples").symlink_to(ROOT / "examples")
    command = (
        "doctor estimate examples/gpt.py:factory --devices 8 --strategy ddp --batch-size 32 "
        '--device "H100 80GB" --host-memory 512GiB'
    )
    return f"```text\n{_answer(run(command, folder))}\n```"


def configuration_sample(folder: Path) -> str:
    """What an estimate from a configuration prints first; here it is a file, because the hub is not read."""
    (folder / "config.json").write_text(json.dumps(CONFIGURATION), encoding="utf-8")
    options = (
        "--lora 16 --quantize 4bit --seq-len 2048 --batch-size 2 \\\n"
        '      --checkpointing --optimizer paged_adamw_8bit --device "RTX 4090" --peak-only'
    )
    output = run(f"doctor estimate config.json {options}", folder)
    return console(f"doctor estimate hf:meta-llama/Meta-Llama-3-8B {options}", _answer(output))


def _answer(output: str) -> str:
    """The paragraph that begins with the verdict."""
    return next((part for part in output.split("\n\n") if part.startswith("It ")), "")


SAMPLES = {
    "check sample": check_sample,
    "diagnose sample": diagnose_sample,
    "lint sample": lint_sample,
    "profile sample": profile_sample,
    "estimate sample": estimate_sample,
    "configuration sample": configuration_sample,
}
VOLATILE = (
    (re.compile(r"\d+(\.\d+)? s$", re.MULTILINE), "N s"),
    (re.compile(r"(?<=job\.log:)\d+"), "N"),
    (re.compile(r"(where +|interfaces: |NCCL_SOCKET_IFNAME='=).*"), r"\1…"),
)
"""What depends on the machine: seconds, lines of launchers above a message, host and interfaces."""


def comparable(block: str) -> str:
    """A block without what depends on the machine."""
    for pattern, text in VOLATILE:
        block = pattern.sub(text, block)
    return block.strip()


if __name__ == "__main__":
    for name in sys.argv[1:] or SAMPLES:
        with tempfile.TemporaryDirectory() as made:
            write_between(name, SAMPLES[name](Path(made)))

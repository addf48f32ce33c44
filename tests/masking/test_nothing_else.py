"""What is no secret stays: in real logs nothing is masked, and masking changes no verdict."""

import json
import re
import time
from pathlib import Path

from doctor.core.masking import REDACTED, is_secret_name, mask_text
from doctor.core.masking import text_masking as masking_text
from doctor.core.masking.program_options import PROGRAMS
from doctor.core.masking.token_formats import TOKEN_FORMATS
from doctor.knowledge.environment_variables import table
from doctor.postmortem import job_assembly
from doctor.postmortem.run_reader import read_runs
from doctor.session import examine
from tests.lab.cases import each_case

DATA = Path(__file__).parents[1] / "data"
REPORTED = [json.loads(line) for line in (DATA / "reported_failures.jsonl").read_text().splitlines()]
KNOWN_LINES = Path(job_assembly.__file__).parents[1] / "knowledge" / "log_lines"


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def test_real_logs_hold_no_secret():
    lines = [line for report in REPORTED for line in report["text"].splitlines()]
    lines += [line for path in sorted(DATA.rglob("*.t*")) for line in path.read_text(errors="replace").splitlines()]
    assert len(lines) > 2000
    assert [line for line in lines if mask_text(line) != line] == []


def test_messages_of_libraries_hold_no_secret():
    texts = [text for path in sorted(KNOWN_LINES.glob("*.json")) for text in _strings(json.loads(path.read_text()))]
    assert len(texts) > 1000
    assert [text for text in texts if mask_text(text) != text] == []


def test_known_variables_are_no_secrets():
    assert [name for name in table() if is_secret_name(name)] == []


@each_case(
    "text",
    [
        "rank 3 of 8 on node12.cluster.example:29500, pid 4711, step 1200/4000 [00:12<05:31, 3.21it/s]",
        "tcp://10.0.0.1:29500 tcp://[fd00::1]:29500 http://node1:8080/a@b https://example.com/x?page=2",
        "commit 7b3f6c1d0e9a8f7b6c5d4e3f2a1b0c9d8e7f6a5b, digest sha256:" + "0f" * 32,
        "ghcr.io/acme/train:2.4.1@sha256:" + "0f" * 32,
        "timed out waiting for key: default_pg/0//cuda//0/0 keys=['store_based_barrier_key:1'] key=worker_count",
        "KeyError: 'token' ValueError: pad_token_id 50256 max_new_tokens=2048 num_tokens: 131072 eos_token: </s>",
        "AuthenticationError: authentication failed for user alice; author: Bob; authority=none",
        "token=50256 tokens: 1.5 pwd=/home/x/run key: torchelastic/agent/run_1a2b3c4d5e6f/0 keys=[a/1a2b3c4d5e6f]",
        "password: None token=None secret=*** api_key=${WANDB_API_KEY} token: <token>",
        "exit code 1, sig=SIGKILL, signal 9, sig: 9, pass: 3 failed: 1, bypass=1, compass: north",
        "0x7f3a12bc4d50 PCI 0000:3b:00.0 GPU-8f2a0c11-1111-2222-3333-444455556666 3c:ec:ef:01:02:03",
        "git@github.com:acme/train.git ssh://git@github.com/acme/train abfss://data@acct.dfs.core.windows.net/x",
        "torchrun --nnodes 2 --rdzv-endpoint node1:29400 --master-port 29500 train.py --tokenizer llama -p 3 -pix",
        "NCCL_IB_PKEY=0x7fff NCCL_PAT_ENABLE=1 PWD=/home/x TOKENIZERS_PARALLELISM=false KMP_AFFINITY=granularity=fine",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
        "access: denied, private: 3 pages, license: Apache-2.0, cookie: 12 chips, basic auth is off, bearer of news",
        "DistStoreError: wait timeout after 60000ms, keys: /torch.rendezvous.d41d8cd98f/rdzv.active_round",
    ],
)  # fmt: skip
def test_what_stays(text):
    assert mask_text(text) == text


@each_case("report", REPORTED[::4], ids=lambda report: report["id"])
def test_the_verdict_is_the_same_without_masking(tmp_path, monkeypatch, report):
    log = tmp_path / "job.log"
    log.write_text(report["text"])
    masked = examine(read_runs([log])[0].job)
    with monkeypatch.context() as patch:
        patch.setattr(job_assembly, "mask_record", lambda record: record)
        plain = examine(read_runs([log])[0].job)
    assert _judged(masked) == _judged(plain)
    assert REDACTED not in json.dumps(_judged(masked))


def _judged(report):
    return report.primary, [
        (result.id, result.status.value, [(one.summary, one.ranks) for one in result.findings])
        for result in report.results
    ]


def _patterns():
    yield from ((f"shape {shape.cue}", shape.pattern) for shape in TOKEN_FORMATS)
    yield from ((f"program {cue}", pattern) for cue, pattern in PROGRAMS)
    yield from ((name, one) for name, one in vars(masking_text).items() if isinstance(one, re.Pattern))


PIECES = """\
a=
a:
: \x20
://
a:a
://a:a@
://a@
token
token is\x20
password=
key
pwpw:
 -p\x20
 -u a
--a\x20
curl\x20
curl -u\x20
mysql\x20
mysql x -
redis-cli -
eyJ
eyJa.
-eyJaaaaaaaaa.
SG.
hf_
xoxb-
 a.a
-----BEGIN\x20
-----BEGIN PRIVATE KEY-----
cookie: a
authorization:\x20
basic a
bearer a
\\"
=>
%3D
wandb login\x20
login a\x20
sshpass -a\x20
configure set aaaaaaaaaaaaaaaaaaaaaaaaaasecret
machine login a password
0123456789:AA
discord.com/api/webhooks/1"""


def _hostile(pattern):
    """Lines of which long parts nearly match."""
    words = [part for part in pattern.pattern.replace("\\b", " ").split() if part.isalpha()][:1]
    pieces = (*"aA0=:@\"'/-_.+ ~%{<\\", *PIECES.splitlines())
    return [(piece * (8192 // len(piece) + 1))[:8192] for piece in [*pieces, *words]]


@each_case(("name", "pattern"), [*_patterns()], ids=lambda value: value if isinstance(value, str) else "")
def test_patterns_take_linear_time(name, pattern):
    """Twice the text may take twice the time, and not four times: measured in the same run, where it is long at all."""
    for line in _hostile(pattern):
        if (whole := _seconds(pattern, line)) > 0.02:
            assert whole < 3.4 * _seconds(pattern, line[: len(line) // 2]), (name, line[:40])


def _seconds(pattern, line):
    tries = []
    for _ in range(3):
        began = time.process_time()
        for _ in pattern.finditer(line):
            pass
        tries.append(time.process_time() - began)
    return min(tries)

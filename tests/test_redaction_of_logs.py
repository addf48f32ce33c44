"""``diagnose --redact``: every log that is read without it is read with it, and the verdict is the same."""

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.core.redact.node_lists import NODE_LIMIT, TOTAL_LIMIT, NodeLists, expand, folded
from doctor.core.redact.placeholders import redact
from tests.lab.cases import assert_each, each_case

REFUSED = "node1:123:456 [0] NCCL WARN Call to connect to 10.1.2.3<45678> failed : Connection refused\n"
KILLED = "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.\n"
NO_HOST = "[rank1]: RuntimeError: boom\n[rank0]: ValueError: no\n"


def diagnosed(path, *options):
    """The exit code and the report of one file."""
    done = CliRunner().invoke(app, ["diagnose", "--format", "json", *options, str(path)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def judged(report):
    """What was found, without the words."""
    found = [
        (one["id"], one["status"], [(f["severity"], f["ranks"], f["explained_by"]) for f in one["findings"]])
        for one in report["results"]
    ]
    return report["verdict"], report["primary"], found


@pytest.mark.parametrize("text", [REFUSED, KILLED, NO_HOST, "hello\n"], ids=["nccl", "slurm", "ranks", "prose"])
def test_the_verdict_is_the_same(tmp_path, text):
    log = tmp_path / "job.log"
    log.write_text(text)
    plain, redacted = diagnosed(log), diagnosed(log, "--redact")
    assert redacted[0] == plain[0]
    assert judged(redacted[1]) == judged(plain[1])


def test_a_host_that_the_log_does_not_name_is_not_invented(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(NO_HOST)
    _, report = diagnosed(log, "--redact")
    assert not re.search(r"host-\d", json.dumps(report))
    assert [host["name"] for host in report["job"]["hosts"]] == [
        host["name"] for host in diagnosed(log)[1]["job"]["hosts"]
    ]


def test_node_lists_of_millions_of_hosts_are_not_expanded(tmp_path):
    lists = NodeLists()
    names = [lists.names(f"h{number}x0[0-65000]") for number in range(320)]
    assert sum(map(len, names)) <= TOTAL_LIMIT
    assert lists.is_too_long("h319x0[0-65000]")
    log = tmp_path / "job.log"
    log.write_text("".join(f"srun: error: h{number}x0[0-65000]: task 0: Killed\n" for number in range(320)))
    _, report = diagnosed(log, "--redact")
    assert not re.search(r"\bh\d+x0", json.dumps(report))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,7]", ("node01", "node02", "node03", "node7")),
        ("a[1-2]b", ("a1b", "a2b")),
        ("node1", ()),
        ("node[]", ()),
        ("node[3-1]", ()),
        ("node[1-2-3]", ()),
        (f"n[0-{NODE_LIMIT}]", None),
        ("n[0-99999999999999999999]", ()),
    ],
)
def test_names_of_a_list(text, names):
    assert expand(text) == names


def test_numbers_as_a_list():
    assert folded([1, 2, 3, 7]) == "host-[1-3,7]"
    assert folded([4]) == "host-4"


IDENTITIES = {
    "host of the log": "connect to corp-gpu-17.internal.acme.com:29500 failed",
    "another host": "no answer from db3.dc1.acme.local",
    "internal zone": "lookup of vm-4.c.acme-proj.internal failed",
    "mail": "ask bob.smith@research.acme.com",
    "login": "ssh frank@acmebox refused",
    "bucket": "can't write s3://acme-bucket/teams/acme-llm/run7/x.pt",
    "bucket of Google": "can't write gs://acme-bucket/x.pt",
    "container of Azure": "can't write abfss://acme@acmeacct.dfs.core.windows.net/a/acme-llm/c.pt",
    "virtual host of a bucket": "GET https://acme-bucket.s3.eu-west-1.amazonaws.com/x",
    "UNC share, as Python shows it": r"OSError: [Errno 2] no such file: '\\\\acmefiler\\acmeshare$\\x.bin'",
    "UNC share": r"can't open \\acmefiler\acmeshare$\x.bin",
    "CIFS": "mount //acmefiler/acmevol failed",
    "host of a URL": "http://acmebuild:8080/x is down",
    "numbers of users": "quota exceeded: uid=70123(frank) gid=70124",
    "SLURM": "UserId=frank(70123) MCS_label=N/A",
    "user": "permission denied for user 'frank'",
    "home": "no such file: /home/frank/acme/x.py",
}
SECRET_WORDS = ("acme", "frank", "bob", "smith", "research", "70123", "70124", "corp-gpu", "dc1")


def test_identities_in_free_text(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        "".join(
            f"[rank{rank}]: corp-gpu-17:12:13 [{rank}] NCCL WARN {text}\n[rank{rank}]: RuntimeError: {text}\n"
            for rank, text in enumerate(IDENTITIES.values())
        )
    )
    for form in ("json", "text", "html", "markdown", "junit", "github"):
        done = CliRunner().invoke(app, ["diagnose", "--redact", "--format", form, str(log)])
        text = done.output.lower().replace(str(tmp_path).lower(), "")
        text = text.partition("<script")[0] if form == "html" else text
        assert not [word for word in SECRET_WORDS if word in text], form


@each_case("text", IDENTITIES.values(), ids=IDENTITIES)
def test_each_identity_becomes_the_same_placeholder_everywhere(text):
    document = {"events": [{"text": text, "host": "corp-gpu-17"}, {"text": f"again: {text}"}]}
    first, second = (event["text"] for event in redact(document, paths=True)["events"])
    assert second == f"again: {first}"
    assert not [word for word in SECRET_WORDS if word in first.lower()]


@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.run torch.nn.functional logging.info self.net.io threading.local model.net.weight np.int",
        "train.py libnccl.so.2 2.3.1+cu121 v1.2.3 config.yaml events.out.tfevents.17 x.tar.gz a.b.c.d",
        "see https://github.com/pytorch/pytorch/issues/1 and https://pytorch.org/docs/stable/elastic/errors.html",
        "git@github.com:x/y.git key: default_pg/0//cuda//0 // a comment, file:///x C:\\temp a\\\\d+",
        "rank 3 user process failed; uid 0; gid=100; localhost:29500; http://proxy:3128",
        "ghcr.io/x/y:2@sha256:0f0f module 'a' has no attribute 'b'; a ValueError",
    ],
)
def test_what_names_nobody_stays(text):
    assert redact({"events": [{"text": text}]})["events"][0]["text"] == text


def test_forms_take_linear_time():
    for piece in ("a.", "a@", "a@a.", "s3://a/", "\\\\a\\", "//a/", "uid=1", "user=a", "a-", "x.y/", "://", "1.1.1.1 "):
        line = (piece * 8192)[:8192]
        whole, half = _seconds(line), _seconds(line[:4096])
        assert whole < max(0.03, 3.4 * half), piece


def _seconds(line):
    tries = []
    for _ in range(3):
        began = time.process_time()
        redact({"events": [{"text": line}]})
        tries.append(time.process_time() - began)
    return min(tries)


REPORTED = [
    json.loads(line) for line in (Path(__file__).parent / "data/reported_failures.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("first", range(4))
def test_verdicts_of_reported_failures_stay(tmp_path, first):
    reports = REPORTED[first * 3 :: 12]
    assert_each(_keeps_its_verdict, [(report["id"], (tmp_path, report)) for report in reports])


def _keeps_its_verdict(tmp_path, report):
    log = tmp_path / "job.log"
    log.write_text(report["text"])
    plain, redacted = diagnosed(log), diagnosed(log, "--redact")
    assert redacted[0] == plain[0]
    assert judged(redacted[1]) == judged(plain[1])

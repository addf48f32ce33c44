"""Every shape of a secret, by every way in, to every way out.

A way out is what the commands print and write: each format of the report, a capture, a record of the callback.
"""

import datetime
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.collectors.base import Machine
from doctor.collectors.launch.launcher import collect_launch
from doctor.collectors.nccl.configuration import collect_nccl
from doctor.collectors.network.listeners import listener_on
from doctor.collectors.network.master_address import collect_master
from doctor.collectors.software.environment import collect_environment
from doctor.core.capture import encode_document, from_document, parse_capture, to_document, to_record
from doctor.core.facts import ProgressFacts
from doctor.core.job import Member, build_job
from doctor.core.masking import REDACTED, is_secret_name, mask_command, mask_text
from doctor.core.redact.placeholders import redact
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.postmortem.run_reader import read_runs
from doctor.report.html.document import render_html
from doctor.report.machine_formats import render_github, render_json, render_junit
from doctor.report.markdown import render_markdown
from doctor.report.terminal import draw_report, make_console
from doctor.session import examine
from doctor.testing import healthy
from tests.lab.cases import each_case
from tests.masking.shapes import NAMES, OPAQUE, SECRETS

EXCEPTIONS: frozenset[str] = frozenset()
"""Shapes that may get out. SECURITY.md gives the reason of each; at most six."""
LISTENS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
LINES = {
    "nccl": "node1:4711:4712 [0] NCCL WARN Call to connect failed : {}",
    "memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. {}",
    "error": "RuntimeError: {}",
}
KEPT = [secret for secret in SECRETS if secret.name not in EXCEPTIONS]
SOME = [KEPT[start::4] for start in range(4)]


def shown(secrets, text):
    """The names of those that ``text`` gives away, whole or by half."""
    text = text.replace("\\n", "\n").replace('\\"', '"')
    return [one.name for one in secrets if any(part in text for part in _parts(one.secret))]


def _parts(secret):
    half = len(secret) // 2
    return [secret, secret[:half], secret[half:]] if len(secret) >= 24 else [secret]


def reported(job):
    """The report of a job in all formats, one behind the other."""
    report = examine(job)
    console = make_console(io.StringIO(), width=2000)
    texts = [draw_report(report, console, verbose=verbose) for verbose in (False, True)]
    texts += [render(report) for render in (render_json, render_junit, render_github)]
    return "\n".join([*texts, render_markdown(report, job), render_html(report, job)])


MOMENT = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)


def written(job):
    """The documents that hold a job."""
    captured = to_document(job, MOMENT)
    documents = (captured, to_record(job, "run-1") | {"created": captured["created"]}, redact(captured))
    return "\n".join(encode_document(document).decode() for document in documents)


def test_there_are_enough_shapes():
    assert len(SECRETS) >= 72
    assert len(NAMES) >= 42
    assert len({secret.name for secret in SECRETS}) == len(SECRETS)
    assert all(secret.secret in secret.text for secret in SECRETS)
    assert len(EXCEPTIONS) <= 6


@each_case("secret", KEPT, ids=lambda secret: secret.name)
def test_text(secret):
    for line in ("{}", "[rank3]: {}", *LINES.values()):
        assert not shown([secret], mask_text(line.replace("{}", secret.text)))
    masked = mask_text(secret.text)
    assert mask_text(masked) == masked


@pytest.mark.parametrize("secrets", SOME)
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_logs(tmp_path, secrets, line):
    for rank, secret in enumerate(secrets):
        text = line.replace("{}", secret.text)
        (tmp_path / f"rank-{rank}.log").write_text("\n".join(f"[rank{rank}]: {part}" for part in text.split("\n")))
    _, job, _ = read_runs([tmp_path])[0]
    assert job.evidence.events
    assert not shown(secrets, written(job))
    assert not shown(secrets, reported(job))


@pytest.mark.parametrize("secrets", SOME)
def test_exceptions_in_a_run(secrets):
    """What the callback says of them: its record, its report, and ``diagnose`` of both."""
    members = []
    for rank, secret in enumerate(secrets):
        monitor = RankTelemetry()
        try:
            raise RuntimeError(f"upload failed: {secret.text} after 3 tries")
        except RuntimeError as error:
            monitor.failed(error)
        members.append(Member(rank, {"progress": monitor.progress.facts()}))
    job = build_job(members, world_size=len(members))
    said = re.sub(r"\d+\.\d+", "", repr([member.sections for member in members]))  # times have any digits
    assert not shown(secrets, said)
    assert not shown(secrets, written(job))
    assert not shown(secrets, reported(job))


@pytest.mark.parametrize("secrets", SOME)
def test_records_of_earlier_releases(secrets):
    """They were written with the secrets in them."""
    job = healthy(hosts=1, per_host=len(secrets)).job()
    document = to_document(job)
    for rank, secret in zip(document["ranks"], secrets, strict=True):
        rank["facts"]["progress"] = {"state": "failed", "failure": {"kind": "ValueError", "message": secret.text}}
    read = parse_capture(msgspec.json.encode(document), "record").job()
    assert all(rank.find(ProgressFacts).failure.message for rank in read.ranks)
    assert not shown(secrets, written(read) + reported(read))


@pytest.mark.parametrize("secrets", SOME)
def test_values_of_variables(secrets):
    environ = {f"NCCL_ZZ{number}": secret.text for number, secret in enumerate(secrets)}
    environ |= {f"SLURM_ZZ{number}": secret.text for number, secret in enumerate(secrets)}
    job = _captured(environ)
    assert not shown(secrets, written(job))
    assert not shown(secrets, reported(job))


def test_names_of_variables():
    assert not [name for name in NAMES if not is_secret_name(name)]
    job = _captured(dict.fromkeys(NAMES, OPAQUE))
    assert OPAQUE not in written(job) + reported(job)


def test_addresses_with_credentials():
    password = "hunt" + "er2x"
    environ = {
        "MASTER_ADDR": f"http://alice:{password}@192.0.2.1",
        "MASTER_PORT": "29500",
        "PET_RDZV_ENDPOINT": f"alice:{password}@host1",
        "TORCH_HOME": f"/mnt/user:{password}@nas/x",
        "SLURM_JOB_COMMENT": f"remember {password}",
    }
    job = _captured(environ, collect_master)
    assert "192.0.2.1" in written(job)
    assert password not in written(job) + reported(job)


def _captured(environ, *collectors):
    around = Machine(environ=environ, proc=Path("/nonexistent"))
    collected = [collect(around) for collect in (collect_environment, collect_launch, collect_nccl, *collectors)]
    return build_job([Member(0, {section.key: section for section in collected})])


@each_case("secret", KEPT, ids=lambda secret: secret.name)
def test_command_lines(secret):
    assert not shown([secret], mask_command(secret.text.split(), 4000))


@pytest.mark.parametrize(
    "arguments",
    [("-p{}",), ("-u", "alice:{}"), ("-H", "Authorization: Bearer {}"), ("--pw", "{}"), ("--password", "{}")],
)
def test_whoever_holds_the_port(tmp_path, arguments):
    """A real process that listens, with a secret among its arguments."""
    secret = "hunt" + "er2x"
    command = [sys.executable, "-c", LISTENS, *(one.replace("{}", secret) for one in arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        listener = listener_on(Path("/proc"), port)
        process.stdin.close()
    assert listener.pid == process.pid
    assert secret not in listener.command
    assert REDACTED in listener.command or len(listener.command) == 200


def test_arguments_of_other_users_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, "opinion"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(process.stdout.readline())
        quiet, asked = listener_on(Path("/proc"), port), listener_on(Path("/proc"), port, commands=True)
        process.stdin.close()
    assert (quiet.pid, quiet.command) == (process.pid, None)
    assert "opinion" in asked.command


def test_what_goes_to_stderr(tmp_path):
    secret = "hunt" + "er2x"
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path / f"password={secret}")])
    assert secret not in done.output + str(done.exception and mask_text(str(done.exception)))
    document = to_document(healthy().job())
    document["hosts"][0]["missing"]["gpus"] = {"lack": "failed", "reason": f"OSError: https://alice:{secret}@host1/"}
    path = tmp_path / "capture.json"
    path.write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["diagnose", str(path)])
    assert secret not in done.output


def test_the_way_there_and_back_keeps_what_is_no_secret():
    job = healthy(hosts=2, per_host=2).job()
    assert written(from_document(to_document(job))) == written(job)
    assert REDACTED not in written(job)


BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8
export NCCL_SOCKET_IFNMAE=eth0 {}
srun torchrun --nproc-per-node 8 train.py --hf-token {}
"""


@pytest.mark.parametrize("form", ["text", "json", "html", "junit", "github", "sarif"])
def test_lint_shows_lines_of_files_without_secrets(tmp_path, form):
    (tmp_path / "job.sbatch").write_text(BATCH.replace("{}", f"WANDB_API_KEY={OPAQUE}"))
    done = CliRunner().invoke(app, ["lint", "--format", form, str(tmp_path / "job.sbatch")])
    assert "NCCL001" in done.output
    assert OPAQUE not in done.output

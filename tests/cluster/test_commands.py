"""The command on all ranks of a job: what is printed and written, by whom, and with which exit code all leave."""

import json
import os
import re
import socket
import subprocess

import pytest

from tests.cluster.processes import ABOUT_THE_JOB, DOCTOR, Commands, lacks_of_hosts, rank_environ, wait
from tests.lab.needs import ROOT, clean_environ
from tests.lab.ports import free_ports
from tests.lab.speed import patience
from tests.recorded_launches import recorded

PORTS = free_ports()


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path) as opened:
        yield opened


@pytest.fixture
def ranks(commands, tmp_path):
    """Start a command on all ranks of a job that meets in a folder."""

    def start(command, *arguments, world=2, **environ):
        together = ["--share", tmp_path / "share", "--timeout", "30"]
        return commands.ranks(world, next(PORTS), command, *together, *arguments, **environ)

    return start


SLOW = re.compile(r"doctor: (still reading |\d+ of \d+ ranks joined; ).*\n")
"""What a rank says after some seconds, so on a busy machine."""


def shown(started):
    """What each of them has printed and told."""
    return [(rank.stdout, SLOW.sub("", rank.stderr)) for rank in started]


def test_one_document_for_all(ranks):
    started = ranks("check", "--format", "json", *ABOUT_THE_JOB, world=3)
    assert wait(*started) == [0, 0, 0]
    report = started[0].report
    assert (report["exit_code"], report["verdict"], report["coverage"]["ranks_seen"]) == (0, "pass", 3)
    assert [host["ranks"] for host in report["job"]["hosts"]] == [[0, 1, 2]]
    assert [rank.stdout for rank in started[1:]] == ["", ""]


def test_the_store_of_the_whole_torch(commands):
    """Elsewhere in the tests ranks load the store alone; see tests/lab/store_of_torch."""
    options = ["--gather", "store", "--timeout", "60", "--format", "json", *ABOUT_THE_JOB]
    started = commands.ranks(2, next(PORTS), "check", *options, PYTHONPATH=f"{ROOT}:{ROOT / 'checks'}")
    assert wait(*started) == [0, 0]
    assert started[0].report["coverage"]["ranks_seen"] == 2


def test_the_verdict_is_that_of_rank_0(ranks):
    """Whatever this machine is: all leave with the exit code that the report names."""
    started = ranks("check", "--format", "json", "--strict", "--fail-on", "warning")
    codes = wait(*started)
    assert codes == [started[0].report["exit_code"]] * 2


def test_ranks_with_different_world_sizes_are_in_one_report(commands, tmp_path):
    port, options = next(PORTS), ["--share", tmp_path / "share", "--timeout", "30", "--format", "json"]
    started = [
        commands.rank(number, world, port, "check", *options, "--select", "ENV003")
        for number, world in ((0, 2), (1, 3), (2, 3))
    ]
    assert wait(*started) == [1, 1, 1]
    assert (started[0].report["primary"], started[0].report["coverage"]["ranks_seen"]) == ("ENV003", 3)


def test_a_captured_job_is_one_document_and_can_be_judged(ranks, tmp_path):
    assert wait(*ranks("capture", "-o", tmp_path / "job.json")) == [0, 0]
    document = json.loads((tmp_path / "job.json").read_text())
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert [("host" in host["facts"]) for host in document["hosts"]] == [True]
    done = subprocess.run(
        [*DOCTOR, "diagnose", tmp_path / "job.json", "--format", "json"],
        env=clean_environ(tmp_path),
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    report = json.loads(done.stdout)
    assert (report["coverage"]["ranks_seen"], report["coverage"]["ranks_expected"]) == (2, 2)


def test_captures_in_a_folder_are_one_per_rank_and_need_no_gather(commands, tmp_path):
    (tmp_path / "captures").mkdir()
    lone = commands.rank(1, 2, next(PORTS), "capture", "-o", tmp_path / "captures")
    assert lone.wait() == 0
    assert os.listdir(tmp_path / "captures") == ["rank-1.json"]


@pytest.mark.parametrize("command", ["check", "capture"])
def test_a_file_that_can_not_be_written_ends_all(ranks, tmp_path, command):
    output = tmp_path / "nowhere" / "report"
    started = ranks(command, "-o", output)
    assert wait(*started) == [2, 2]
    assert shown(started) == [("", f"doctor: cannot write {output}: No such file or directory\n"), ("", "")]


def test_a_reader_that_leaves_changes_nothing(commands, tmp_path):
    together = ["check", "--share", tmp_path / "share", "--timeout", "30", "--format", "json", *ABOUT_THE_JOB]
    port = next(PORTS)
    script = '("$@"; echo $? > code) | true'
    first = commands.start(["bash", "-c", script, "bash", *DOCTOR, *together], **rank_environ(0, 2, port))
    second = commands.rank(1, 2, port, *together)
    assert wait(first, second) == [0, 0]
    assert (tmp_path / "process-0" / "code").read_text() == "0\n"
    assert shown([first, second]) == [("", ""), ("", "")]


def test_a_plugin_that_breaks_ends_all(ranks, tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('no')\n")
    started = ranks("check", "--plugin", tmp_path / "broken.py", "--format", "json", world=3)
    assert wait(*started) == [2, 2, 2]
    sentence = f"doctor: cannot load plugin {tmp_path}/broken.py: ValueError: no\n"
    assert shown(started) == [("", sentence), ("", ""), ("", "")]


def test_usage_is_looked_at_before_anybody_is_waited_for(commands, tmp_path):
    lone = commands.rank(0, 2, next(PORTS), "check", "--gather", "share")
    wrong = commands.rank(1, 2, next(PORTS), "check", "--master", "node0")
    assert wait(lone, wrong) == [2, 2]
    assert shown([lone, wrong]) == [
        ("", "doctor: --gather share needs --share DIR\n"),
        ("", "doctor: --master 'node0' is not a valid HOST:PORT\n"),
    ]


def test_redaction_reaches_what_all_ranks_tell(ranks, commands, tmp_path):
    started = ranks("check", "--format", "json", "--redact", *ABOUT_THE_JOB)
    lost = commands.rank(1, 2, next(PORTS), "check", "--redact", "--timeout", "0.5", "--share", tmp_path / "file" / "a")
    (tmp_path / "file").write_bytes(b"")
    assert wait(*started) == [0, 0]
    lost.wait()
    for rank in (*started, lost):
        assert f"on {socket.gethostname()}" not in rank.stderr
    assert socket.gethostname() not in [host["name"] for host in started[0].report["job"]["hosts"]]


def test_status_is_one_line_without_control_characters(commands):
    lost = commands.rank(1, 2, next(PORTS), "check", "--timeout", "0.5", MASTER_ADDR="node0\n\x1b[31m")
    assert lost.wait() == 3
    [line] = lost.stderr.splitlines()
    assert "node0 \\x1b[31m does not resolve on this host" in line


def test_no_rendezvous_in_the_environment(commands):
    lone = commands.start([*DOCTOR, "check"], **recorded("openmpi.env"))
    assert lone.wait() == 3
    assert lone.stdout == ""
    [line] = lone.stderr.splitlines()
    assert "--master HOST:PORT" in line


@pytest.fixture
def with_torch(tmp_path):
    """A torch of one's own, found before any other."""

    def make(text):
        (tmp_path / "site" / "torch").mkdir(parents=True)
        (tmp_path / "site" / "torch" / "__init__.py").write_text(text)
        return {"PYTHONPATH": f"{tmp_path / 'site'}:{clean_environ(tmp_path)['PYTHONPATH']}"}

    return make


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open\\nshared object')",
            "cannot import torch (libcudart.so.12",
        ),
        ("raise RuntimeError('built for another Python')", "importing torch failed (RuntimeError: built for"),
    ],
)
def test_without_torch_there_is_no_store(commands, with_torch, text, words):
    lone = commands.rank(0, 2, next(PORTS), "check", "--timeout", "20", **with_torch(text))
    assert lone.wait() == 3
    assert lone.stdout == ""
    [line] = lone.stderr.splitlines()
    assert f"{words}" in line
    assert "use --share DIR" in line


def test_the_folder_needs_no_torch(ranks, with_torch, tmp_path):
    trap = with_torch(f"open({str(tmp_path / 'imported')!r}, 'w').close(); raise ImportError")
    assert wait(*ranks("check", *ABOUT_THE_JOB, **trap)) == [0, 0]
    assert not (tmp_path / "imported").exists()


def test_jobs_side_by_side_on_one_host_keep_apart(commands):
    """Started by hand they have no name, and nothing in common but the host, whose facts each of them needs."""
    jobs = [
        commands.ranks(
            2,
            next(PORTS),
            "check",
            "--share",
            commands.folder / name,
            "--format",
            "json",
            "--timeout",
            "30",
            *ABOUT_THE_JOB,
        )
        for name in ("one", "other")
    ]
    for job in jobs:
        assert wait(*job) == [0, 0]
        assert job[0].report["coverage"]["ranks_seen"] == 2
        assert lacks_of_hosts(job[0].report) == []


def test_an_isolated_rank_reports_its_connection_attempts(commands, tmp_path):
    """On one line; with a folder it leaves its facts there, where they can be judged."""
    lone = commands.rank(1, 2, next(PORTS), "check", "--timeout", "1")
    unusable = tmp_path / "file"
    unusable.write_bytes(b"")
    shared = commands.rank(1, 2, next(PORTS), "check", "--timeout", "1", "--share", unusable / "below")
    assert wait(lone, shared) == [3, 3]
    host = socket.gethostname()
    [line] = lone.stderr.splitlines()
    assert line.startswith(f"doctor: rank 1 on {host}: 127.0.0.1 by lo from 127.0.0.1; port ")
    assert line.endswith("nothing listens there: rank 0 is not running, or runs elsewhere (doctor explain NET006)")
    assert f"the folder {unusable}/below is no longer reachable: " in shared.stderr
    assert f"cannot write its facts to {unusable}/below: Not a directory" in shared.stderr
    assert shown([lone, shared])[0][0] == shown([lone, shared])[1][0] == ""

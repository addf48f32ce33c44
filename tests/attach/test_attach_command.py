"""``doctor attach``: exit codes, what is written and where, and repeated attaching."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.attach.jobs import doctor_attach, running
from tests.attach.readable import SLEEPER, started
from tests.lab.needs import clean_environ
from tests.lab.speed import patience

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240)]
NO_PROCESS = (1 << 22) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pid", NO_PROCESS], f"doctor: there is no process {NO_PROCESS}"),
        (["--job", "nobody-started-this"], "doctor: there is no process of job nobody-started-this on this host"),
        (["--pid", 1, "--job", "1"], "--pid and --job exclude each other (see"),
        (["--pid", 0], "0 is not in the range x>=1"),
        (["--watch", 0], "0.0 is not in the range x>=1"),
        (["--gather", "share"], "--gather share needs --share DIR"),
        (["--nope"], "no such option '--nope'"),
    ],
)
def test_a_wrong_option_and_a_process_that_does_not_exist_are_2(arguments, message):
    done = doctor_attach("--isolated", *arguments)
    assert message in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


def test_no_training_process_is_3():
    with subprocess.Popen(["sleep", "300"]) as process:
        done = doctor_attach("--isolated", "--pid", process.pid)
        process.kill()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "doctor: no training process of this user was found\n"


def test_a_host_without_ranks_is_not_numbered_among_the_others(tmp_path):
    with subprocess.Popen(["sleep", "300"]) as process:
        done = doctor_attach("--isolated", "--pid", process.pid, "--share", tmp_path)
        process.kill()
    assert (done.returncode, done.stdout) == (3, "")
    assert "no training process was found on this host" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_that_may_not_be_read_is_3_and_the_way_out_is_told():
    with started(SLEEPER) as target:
        own = [sys.executable, "-m", "doctor", "attach", "--isolated", "--pid", str(target.pid)]
        done = subprocess.run(
            ["setpriv", "--reuid", "65534", "--clear-groups", *own],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 3, done
    assert "the stack of rank 0 could not be read" in done.stdout
    assert "sudo" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/usr/bin/setpriv"), reason="needs another user")
def test_all_users_is_for_root():
    before = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*before, sys.executable, "-m", "doctor", "attach", "--all-users"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--all-users needs root" in done.stderr


def test_a_folder_keeps_the_stacks_of_each_rank_and_the_report(tmp_path):
    folder = tmp_path / "ticket"
    (tmp_path / "job").mkdir()
    with running("sleeps", tmp_path / "job", world=2) as job:
        attached = job.attach("-o", folder)
        assert {path.name for path in folder.iterdir()} == {"rank-0.json", "rank-1.json", "report.json"}
        assert json.loads((folder / "report.json").read_text()) == attached.report
        asleep = json.loads((folder / "rank-1.json").read_text())
        assert (asleep["rank"], len(asleep["process"]["samples"])) == (1, 3)
        places = [frame["function"] for frame in asleep["process"]["samples"][-1]["threads"][0]["frames"]]
        assert places[:3] == ["sleeps", "act", "train"]
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())

        redacted = doctor_attach("--redact", "--format", "html", "-o", tmp_path / "redacted", *_pids(job))
        assert redacted.returncode == 1
        texts = [path.read_text() for path in (tmp_path / "redacted").iterdir()]
        assert len(texts) == 4
        assert not any(str(tmp_path) in text or str(job.folder) in text for text in texts)

        shown = job.attach("-o", job.folder / "log")
        assert (shown.code, shown.report) == (2, {})


def test_the_text_shows_the_job_the_groups_and_the_finding(tmp_path):
    with running("sleeps", tmp_path) as job:
        done = doctor_attach("--isolated", *(word for one in job.processes for word in ("--pid", one.pid)))
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"scenes.py · 3 ranks · 1 host attached · job {job.name}")
    assert "2 groups of ranks" in lines
    assert any(line.startswith("  ranks 0-1  in all_reduce at scenes.py:") for line in lines)
    assert any(line.startswith("  rank 2     without progress at scenes.py:") for line in lines)
    assert any("RUN001" in line for line in lines)
    assert done.returncode == 1


def test_watching_ends_when_the_job_moves_and_when_it_ends(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with running("is-stopped", tmp_path / "first", world=2) as job:
        done = _watch(job, "is stopped", lambda: os.kill(job.processes[1].pid, signal.SIGCONT))
    assert done.returncode == 0, done
    assert "ranks 0 and 1 make progress" in done.stdout

    with running("sleeps", tmp_path / "second", world=2) as job:
        done = _watch(job, "RUN001", lambda: [one.kill() for one in job.processes])
    assert done.returncode == 1, done
    assert "has ended" in done.stderr


def _watch(job, words, then):
    """What ``doctor attach --watch`` returned; ``then`` was called once its report held the words."""
    command = [sys.executable, "-m", "doctor", "attach", "--isolated", "--watch", "1", *map(str, _pids(job))]
    environ = clean_environ(job.folder)
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        read = ""
        for line in process.stdout:
            read += line
            if words in line:
                then()
                break
        stdout, stderr = process.communicate(timeout=patience(60))
    return subprocess.CompletedProcess(command, process.returncode, read + stdout, stderr)


def _pids(job):
    return [word for one in job.processes for word in ("--pid", one.pid)]

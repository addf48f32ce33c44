"""A process whose training has ended, and which does not end itself: it prints where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from doctor.monitor.autostart import late_exit
from tests.lab.needs import ROOT
from tests.lab.speed import patience

PROGRAM = """
import atexit, threading, time
from doctor.monitor.autostart import late_exit
from doctor.monitor.sinks.console import print_status
late_exit.AFTER, late_exit.POLL = 0.3, 0.05
late_exit.watch_late_exit(3, print_status)
late_exit.watch_late_exit(3, print_status)
"""
CLEANS_UP = """
def cleanup():
    time.sleep(5)

atexit.register(cleanup)
"""
UPLOADS = """
threading.Thread(target=time.sleep, args=(5,), name="uploader").start()
"""
EVALUATES = """
time.sleep(1)
"""


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (CLEANS_UP, "and its process is still in cleanup() at "),
        (UPLOADS, "and its process is still waiting for threads that are not daemons: uploader; "),
        (EVALUATES, ""),
        ("", ""),
    ],
    ids=["a function at exit", "a thread", "work after the training", "nothing"],
)
def test_a_process_that_does_not_end_prints_where_it_is(ending: str, expected: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM + ending)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"},
        timeout=patience(60),
        capture_output=True,
        text=True,
        check=True,
    )
    if not expected:
        assert done.stderr == ""
        return
    (line,) = done.stderr.splitlines()
    assert line.startswith("rankdoctor: rank 3 ended its training ")
    assert expected in line
    if "cleanup" in expected:
        assert f"{program}:10; " in line


def test_a_process_without_memory_for_a_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(late_exit, "_watching", [])
    monkeypatch.setattr(late_exit, "start_daemon", refused)
    late_exit.watch_late_exit(0, print)

"""Ranks that torchrun started beside this one: real processes with the variables of torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from doctor.collectors.host.launched_ranks import LaunchedRanks
from tests.lab.needs import ROOT

AGENT = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "RANK": str(4 + local), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "3",
             "TORCHELASTIC_RUN_ID": "none"},
    )
    for local, program in enumerate(sys.argv[1:])
]
if os.environ.get("WAITS_FOR"):
    ranks[int(os.environ["WAITS_FOR"])].wait()
ranks[0].wait()
"""
LOOKS = """
import json, time
from doctor.collectors.host.launched_ranks import LaunchedRanks
launched = LaunchedRanks()
if {early}: launched.look()
time.sleep(1.5)
print(json.dumps([{{rank: one.pid for rank, one in launched.look().items()}}, launched.failed()]))
"""
SLEEPS = "import time; time.sleep(2.5)"
KILLED = "import os, signal, time; time.sleep({after}); os.kill(os.getpid(), signal.SIGKILL)"


def looked(*programs: str, early: bool = False, environ: Mapping[str, str] = os.environ) -> tuple[dict[str, int], bool]:
    """What the first rank of an agent found."""
    done = subprocess.run(
        [sys.executable, "-c", AGENT, LOOKS.format(early=early), *programs],
        env={**environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    pids, failed = json.loads(done.stdout)
    return pids, failed


def test_ranks_that_run() -> None:
    pids, failed = looked(SLEEPS, SLEEPS)
    assert pids.keys() == {"5", "6"}
    assert all(pids.values())
    assert not failed


@pytest.mark.parametrize("early", [True, False])
def test_one_that_was_killed(early: bool) -> None:
    """Its environment can be read only before; afterwards it is the one that is missing."""
    pids, failed = looked(SLEEPS, KILLED.format(after=0.7), early=early)
    assert pids.keys() == {"5", "6"}
    assert all(pids.values())
    assert failed


def test_one_that_was_waited_for() -> None:
    pids, failed = looked("pass", SLEEPS, environ={**os.environ, "WAITS_FOR": "1"})
    assert pids["5"] == 0
    assert pids["6"]
    assert not failed


def test_a_process_that_a_rank_started_has_no_ranks_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    child = f"import sys; sys.path[:0] = ['{ROOT}']; {LOOKS.format(early=False)}"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run(
        [sys.executable, "-c", AGENT, program, SLEEPS, SLEEPS],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [{}, False]


def test_ranks_that_this_process_started() -> None:
    """As Lightning's first rank does."""
    environ = {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    with subprocess.Popen([sys.executable, "-c", SLEEPS], env={**os.environ, "LOCAL_RANK": "1"}) as child:
        launched = LaunchedRanks(environ)
        while 1 not in launched.look():
            pass
        assert launched.look()[1].pid == child.pid
        assert not launched.failed()
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert launched.failed()
    assert LaunchedRanks({}).expected == frozenset()
    assert Path("/proc").exists()

"""Processes whose reader was killed: they run on. Processes that were stopped before: they stay stopped."""

import os
import signal
import sys
import threading

import pytest

from doctor.attach.py_spy import DumpRequest, find_py_spy, run_dump
from doctor.attach.stop_guard import StopState, continue_if_left_stopped, stop_state
from tests.attach.readable import SLEEPER, functions_of, read_one, started, status_of, wait_until
from tests.lab.cases import each_case
from tests.lab.speed import patience
from tests.lab.users import require_root

KILLS = 20
BEATS = """
import sys, threading, time
for _ in range(60):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.001)
"""
"""Switches voluntarily a thousand times a second while it runs."""
LEAVES_STOPPED = f"""#!{sys.executable} -S
import ctypes, os, sys, time
pid = int(sys.argv[sys.argv.index("--pid") + 1])
{{}}
time.sleep(300)
"""
BY_ATTACHING = "assert ctypes.CDLL(None).ptrace(16, pid, None, None) == 0"
"""PTRACE_ATTACH, as older releases of py-spy; the SIGSTOP that it sends outlives the tracer."""
BY_SIGNAL = "os.kill(pid, 19)"


def is_running(pid):
    before = int(status_of(pid)["voluntary_ctxt_switches"])
    wait_until(lambda: int(status_of(pid)["voluntary_ctxt_switches"]) > before + 5)
    return status_of(pid)["State"][0] in "RS" and status_of(pid)["TracerPid"] == "0"


@pytest.mark.real_time
def test_target_runs_on_after_py_spy_was_killed_in_the_middle_of_a_read():
    program = find_py_spy()
    killed = 0
    with started(BEATS) as target:
        for number in range(10 * KILLS):
            request = DumpRequest(target.pid, target.started, native=bool(number % 2), seconds=patience(5))
            killer = threading.Thread(target=kill_tracer, args=[target.pid])
            killer.start()
            output = run_dump(program, request)
            killer.join()
            killed += output.status == -signal.SIGKILL
            assert is_running(target.pid)
            if killed == KILLS:
                break
        assert killed == KILLS
        assert read_one(target).samples[0].threads


def kill_tracer(pid):
    """End whoever traces the process, as soon as it does; nothing if nobody does."""
    for _ in range(2000):
        if tracer := stop_state(pid).tracer:
            os.kill(tracer, signal.SIGKILL)
            return


@each_case("how", [BY_ATTACHING, BY_SIGNAL], ids=["attached", "signal"])
def test_target_that_a_killed_reader_left_stopped_is_continued(how, tmp_path_factory):
    require_root()
    reader = tmp_path_factory.mktemp("reader") / "py-spy"
    reader.write_text(LEAVES_STOPPED.format(how))
    reader.chmod(0o755)
    with started(BEATS) as target:
        output = run_dump(reader, DumpRequest(target.pid, target.started, seconds=patience(0.5)))
        assert output.stopped_by in ("deadline", "pause")
        assert output.continued
        assert is_running(target.pid)


def test_target_that_was_stopped_before_stays_stopped(tmp_path):
    reader = tmp_path / "py-spy"
    reader.write_text("#!/bin/sh\nexit 1\n")
    reader.chmod(0o755)
    with started(SLEEPER) as target:
        os.kill(target.pid, signal.SIGSTOP)
        wait_until(lambda: stop_state(target.pid).letter == "T")
        assert not run_dump(reader, DumpRequest(target.pid, target.started)).continued
        assert stop_state(target.pid) == StopState("T", 0)


def test_only_the_process_that_was_read_is_continued():
    """A process with another start time has reused the PID."""
    runs = StopState("S", 0)
    with started(SLEEPER) as target:
        os.kill(target.pid, signal.SIGSTOP)
        wait_until(lambda: stop_state(target.pid).letter == "T")
        assert not continue_if_left_stopped(target.pid, target.started - 100, runs)
        assert stop_state(target.pid).letter == "T"
        assert continue_if_left_stopped(target.pid, target.started, runs)
        assert functions_of(read_one(target)) == ["inner", "outer", "<module>"]
    assert not continue_if_left_stopped(target.pid, target.started, runs)

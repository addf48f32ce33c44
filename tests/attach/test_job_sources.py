"""Stacks by the doctor's callback in the process, where py-spy cannot read it."""

import os
import signal
import subprocess
import sys

import pytest

from doctor.attach import sampler
from doctor.attach.job_sources import callback_threads, recorded_step_rate, stands
from doctor.attach.sampler import SamplingOptions
from doctor.collectors.host.local_processes import process_start_time, zombie_exit_code
from doctor.core.capture import encode_document, to_record
from doctor.core.facts import KernelView, PointInTime, ProcessSample, ProgressFacts
from doctor.core.job import Member, build_job
from tests.attach.readable import functions_of, read_one, started, status_of
from tests.lab.cases import each_case
from tests.lab.speed import patience
from tests.lab.users import ALICE, as_user, require_root

RANK = """
import ctypes, sys, threading, time
from pathlib import Path
from doctor.monitor.watchdog.local_peers.stack_dump import StackDumper, stack_file

def watch(trainer, ready):
    dumper = StackDumper()
    dumper.install()
    dumper.write_to(stack_file(Path(sys.argv[1]), 0), trainer, dumper.signal)
    ready.set()
    time.sleep(300)

def train():
    ready = threading.Event()
    threading.Thread(target=watch, args=[threading.get_ident(), ready], daemon=True).start()
    ready.wait()
    time.sleep(0.2)
    print("ready", flush=True)
    {}

train()
"""
SLEEPS, HOLDS_THE_LOCK, MOVES = "time.sleep(300)", "ctypes.PyDLL(None).sleep(300)", "while True: len(range(9))"
THRICE = SamplingOptions(rounds=3, interval=0.1, seconds=patience(20))


@pytest.fixture
def without_py_spy(monkeypatch):
    monkeypatch.setattr(sampler, "find_py_spy", lambda: None)


def rank(folder, does=SLEEPS):
    return started(RANK.format(does), arguments=[str(folder)], imports=True)


@each_case("does", [SLEEPS, HOLDS_THE_LOCK])
def test_standing_rank_is_asked(does, tmp_path_factory, without_py_spy):
    with rank(tmp_path_factory.mktemp("run"), does) as target:
        found = read_one(target, THRICE)
        assert status_of(target.pid)["State"][0] in "RS"
    assert (found.stack_source, found.refused) == ("callback", "")
    assert functions_of(found, -1) == ["train", "<module>"]
    assert [len(one.threads) for one in found.samples] == [0, 0, 1]


def test_moving_rank_is_not_asked(tmp_path, without_py_spy):
    with rank(tmp_path, MOVES) as target:
        found = read_one(target, THRICE)
        (file,) = (tmp_path / ".stacks").iterdir()
        assert "Thread" not in file.read_text()
    assert found.stack_source == ""
    assert "not installed" in found.refused


def test_rank_that_py_spy_reads_is_not_asked(tmp_path):
    with rank(tmp_path) as target:
        assert read_one(target, THRICE).stack_source == "py-spy"
        (file,) = (tmp_path / ".stacks").iterdir()
        assert "Thread" not in file.read_text()


def test_other_process_that_has_the_file_open_gets_no_signal(tmp_path):
    """It does not catch the signal, which would end it."""
    program = """
import sys, time
file = open(sys.argv[1])
print("ready", flush=True)
time.sleep(300)
"""
    with rank(tmp_path) as target:
        (file,) = (tmp_path / ".stacks").iterdir()
        with started(program, arguments=[str(file)]) as other:
            assert callback_threads(other.pid, other.started) == ()
            assert status_of(other.pid)["State"][0] in "RS"
        assert callback_threads(target.pid, target.started - 100) == ()
        assert callback_threads(target.pid, target.started)


def test_file_that_names_another_signal(tmp_path):
    """A program may write anything into a file of that name."""
    program = """
import os, signal, sys, threading, time
os.makedirs(sys.argv[1] + "/.stacks")
file = open(sys.argv[1] + "/.stacks/rank-0.txt", "w")
signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))
thread = threading.Thread(target=time.sleep, args=[300])
thread.start()
file.write(f"training thread 0x1\\nstack signal {int(sys.argv[2])} to thread {thread.native_id}\\n")
file.flush()
print("ready", flush=True)
time.sleep(300)
"""
    for number in (signal.SIGUSR1, signal.SIGKILL, signal.SIGRTMAX, 0, 999):
        folder = tmp_path / str(int(number))
        with started(program, arguments=[str(folder), str(int(number))]) as target:
            assert callback_threads(target.pid, target.started) == ()
            assert status_of(target.pid)["State"][0] in "RS"


def test_rank_of_another_user_gets_no_signal(tmp_path):
    require_root()
    with rank(tmp_path) as target, as_user(ALICE):
        assert callback_threads(target.pid, target.started) == ()


def test_process_that_is_gone():
    with started() as target:
        pass
    assert callback_threads(target.pid, target.started) == ()


@each_case(
    "times, state, expected",
    [
        ([1.0, 1.0], "S", True),
        ([1.0, 1.0], "D", True),
        ([1.0, 1.01], "S", False),
        ([1.0, 1.0], "R", False),
        ([1.0], "S", False),
        ([None, None], "S", False),
        ([], "S", False),
    ],
)
def test_stands(times, state, expected):
    samples = [ProcessSample(float(at), KernelView(state=state, main_cpu=cpu)) for at, cpu in enumerate(times)]
    assert stands(samples) is expected


def test_the_record_of_the_callback_shows_the_pace(tmp_path):
    points = [("data", 10, 1.0), ("step", 10, 1.1), ("data", 11, 1.5), ("step", 11, 1.6), ("step", 14, 3.1)]
    recent = tuple(PointInTime("train", point, batch, at) for point, batch, at in points)
    job = build_job([Member(0, {ProgressFacts.key: ProgressFacts(recent=recent)})])
    with rank(tmp_path) as target:
        assert recorded_step_rate(target.pid) is None
        (tmp_path / "rank-0.json").write_bytes(encode_document(to_record(job, "run")))
        assert recorded_step_rate(target.pid) == pytest.approx(2.0)
        (tmp_path / "rank-0.json").write_bytes(b"{")
        assert recorded_step_rate(target.pid) is None


def test_how_a_process_ended_that_nobody_waited_for():
    for program, code in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("pass", 0)):
        child = subprocess.Popen([sys.executable, "-c", program])
        began = process_start_time(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert zombie_exit_code(child.pid, began) == code
        assert zombie_exit_code(child.pid, began + 1) is None
        child.wait()
    assert zombie_exit_code(os.getpid(), process_start_time()) is None

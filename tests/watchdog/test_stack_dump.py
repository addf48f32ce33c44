"""Stacks of a process whose interpreter is blocked, for a neighbour that asks."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from doctor.collectors.host.local_processes import process_start_time
from doctor.monitor.telemetry.stacks.stack_files import read_stack_file
from doctor.monitor.watchdog.local_peers.stack_dump import StackDumper, StackSignal, stack_file
from doctor.monitor.watchdog.local_peers.stack_request import LocalPeer, accepts_stack_signal, request_stacks
from tests.cluster.boards import without_rights
from tests.lab.speed import patience
from tests.watchdog.ranks import fork, wait_for


def child(work):
    """A child that says how it is asked; its pid, that, and what ends it."""
    reads, writes = os.pipe()

    def run():
        stacks, ready = StackDumper(), threading.Event()

        def answers():
            stacks.install()
            os.write(writes, b"%d %d" % stacks.signal)
            ready.set()
            time.sleep(60)

        threading.Thread(target=answers, daemon=True).start()
        ready.wait()
        work(stacks)

    pid = fork(run)
    thread, number = os.read(reads, 64).split()
    return pid, StackSignal(int(thread), int(number))


def neighbour(pid, how, path):
    return LocalPeer(pid, process_start_time(pid), how, path)


def until(holds):
    end = time.monotonic() + patience(30)
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def holds_the_lock(path):
    def work(stacks):
        stacks.write_to(path, threading.get_ident())
        ctypes.PyDLL(None).sleep(30)

    return work


def test_a_process_whose_interpreter_is_blocked_answers(tmp_path):
    path = tmp_path / "deep" / "stacks.txt"
    pid, how = child(holds_the_lock(path))
    until(path.exists)
    time.sleep(0.2)
    assert read_stack_file(path) == ()
    asked = neighbour(pid, how, path)
    assert request_stacks(asked)
    stack = until(lambda: read_stack_file(path))
    assert stack[0].function == "work"
    assert "holds_the_lock" not in [frame.function for frame in stack]
    os.kill(pid, signal.SIGKILL)
    wait_for(pid, time.monotonic() + patience(5))
    assert not request_stacks(asked)


def test_a_late_signal_ends_nobody(tmp_path):
    """It comes when the run is over, and the process goes on; or when its file never could be written."""
    path = stack_file(tmp_path / "deep", 0)

    def work(stacks):
        stacks.write_to(path, threading.get_ident())
        stacks.discard(path)
        stacks.install()
        (tmp_path / "over").touch()
        until((tmp_path / "asked").exists)

    pid, how = child(work)
    until((tmp_path / "over").exists)
    assert not request_stacks(neighbour(pid, how, path.path)), "it has no file to answer in"
    os.kill(pid, how.number)
    (tmp_path / "asked").touch()
    assert wait_for(pid, time.monotonic() + patience(30)) == 0
    assert list((tmp_path / "deep").iterdir()) == []


def test_only_the_rank_that_waits_for_this_signal_is_asked(tmp_path):
    """Every field of the message, wrong by itself."""
    path = tmp_path / "deep" / "stacks.txt"
    pid, how = child(holds_the_lock(path))
    until(lambda: path.exists() and path.stat().st_size)
    whole = neighbour(pid, how, path)
    copy = tmp_path / "copy" / "deep" / "stacks.txt"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(path.read_bytes())
    link = tmp_path / "link" / "deep" / "stacks.txt"
    link.parent.mkdir(parents=True)
    link.symlink_to(path)
    assert until(lambda: accepts_stack_signal(whole))
    wrong = [
        msgspec.structs.replace(whole, pid=os.getpid(), started=process_start_time()),
        msgspec.structs.replace(whole, pid=1, started=process_start_time(1)),
        msgspec.structs.replace(whole, started=None),
        msgspec.structs.replace(whole, started=whole.started + 1.0),
        *(
            msgspec.structs.replace(whole, stack_signal=how._replace(number=number))
            for number in (0, *range(1, 34), 65, how.number - 1)
        ),
        msgspec.structs.replace(whole, stack_signal=how._replace(thread=0)),
        msgspec.structs.replace(whole, stack_signal=how._replace(thread=pid)),
        msgspec.structs.replace(whole, stack_signal=how._replace(thread=threading.get_native_id())),
        msgspec.structs.replace(whole, file=copy),
        msgspec.structs.replace(whole, file=link),
        msgspec.structs.replace(whole, file=tmp_path / "nothing"),
    ]
    for one in wrong:
        assert not request_stacks(one), one
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it lives"
    assert request_stacks(whole)
    os.kill(pid, signal.SIGKILL)
    wait_for(pid, time.monotonic() + patience(5))


def test_another_users_process_is_not_asked(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path = tmp_path / "deep" / "stacks.txt"
    pid, how = child(holds_the_lock(path))
    until(lambda: path.exists() and path.stat().st_size)
    one = neighbour(pid, how, path)
    assert until(lambda: accepts_stack_signal(one))
    with without_rights():
        assert not accepts_stack_signal(one)
    os.kill(pid, signal.SIGKILL)
    wait_for(pid, time.monotonic() + patience(5))


EXIT = """
import atexit, sys, threading
from pathlib import Path
from torch.distributed import TCPStore
from doctor.monitor.watchdog import store_discovery, watchdog
from tests.cluster.boards import without_rights
from tests.watchdog.ranks import ScriptedSource

def threads():
    names = [thread.name for thread in threading.enumerate()]
    assert "doctor-watchdog" not in names, names
    print("alone")

atexit.register(threads)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watchdog.find_store = lambda: store_discovery.StoreAddress("127.0.0.1", store.port)
one = watchdog.Watchdog(0, 2, ScriptedSource(0), Path(sys.argv[1]), print)
one.start()
one.check_start(0.5)
"""


def test_a_process_that_ends_without_a_word_is_not_in_the_store_then(tmp_path):
    """A thread that comes back from torch's C++ into an interpreter that has ended takes the process with it."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT, tmp_path], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert done.stdout.endswith("alone\n")
    assert "terminate called" not in done.stderr

"""Locks of ``multiprocessing`` whose holder lives, or was killed: real processes."""

import platform
import subprocess
import sys

import pytest

from doctor.core.facts.telemetry import LOST, OWN_LOCK, SHARED_LOCK
from tests.lab.speed import patience

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="other system calls")

WAITS = """
import multiprocessing, os, threading, time
from doctor.monitor.telemetry.stacks.blocking_call import blocking_call
context = multiprocessing.get_context("fork")
taken = context.Event()
def takes(lock):
    lock.acquire()
    taken.set()
    time.sleep(99)
def holder(lock, killed):
    process = context.Process(target=takes, args=(lock,), daemon=True)
    process.start()
    taken.wait()
    if killed:
        process.kill()
        process.join()
    return process.pid
def words(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    found, until = "", time.monotonic() + 10
    while not found and time.monotonic() < until:
        time.sleep(0.1)
        found = blocking_call(thread.native_id, ())
    return found
"""
LOCKS = "context.Lock()", "context.RLock()"


def words_of(program):
    """What a program prints that has the functions of ``WAITS``."""
    done = subprocess.run([sys.executable, "-c", WAITS + program], capture_output=True, text=True, timeout=patience(60))
    assert done.stdout.strip(), done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("lock", LOCKS)
def test_the_holder_was_killed(lock):
    found = words_of(f"lock = {lock}\nholder(lock, True)\nprint(words(lock.acquire))")
    assert found == f"{SHARED_LOCK} (multiprocessing){LOST}"


@pytest.mark.parametrize("lock", LOCKS)
def test_the_holder_lives(lock):
    found = words_of(f"lock = {lock}\nprint(holder(lock, False), words(lock.acquire))")
    pid, _, words = found.partition(" ")
    assert words.startswith(f"{SHARED_LOCK} (multiprocessing), which PID {pid} (")
    assert words.endswith(") has open too")


@pytest.mark.parametrize(
    "program",
    [
        "lock = context.Lock()\nlock.acquire()\nprint(words(lock.acquire))",
        "lock = context.Lock()\nholder(lock, True)\nprint(words(lambda: lock.acquire(timeout=60)))",
        "one = context.Semaphore(1)\nholder(one, True)\nprint(words(one.acquire))",
        "lock = threading.Lock()\nlock.acquire()\nprint(words(lock.acquire))",
    ],
    ids=["its own thread has it", "until a timeout", "a semaphore, which others may release", "a lock of threads"],
)
def test_a_lock_that_may_be_released(program):
    found = words_of(program)
    assert found.startswith((OWN_LOCK, SHARED_LOCK))
    assert LOST not in found

"""What the kernel says of real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from doctor.collectors.host.local_processes import process_start_time, process_state
from tests.lab.speed import patience

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def neighbour():
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def _soon(pid, started, wanted):
    """Stopping and dying take the kernel a moment."""
    deadline = time.monotonic() + patience(10)
    while (seen := process_state(pid, started))[0] != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return seen


def test_one_that_lives_is_silent(neighbour):
    state, letter = process_state(neighbour.pid, process_start_time(neighbour.pid))
    assert state == "silent"
    assert letter in "RSD"
    assert process_state(neighbour.pid, None)[0] == "silent"


def test_a_stopped_process_and_its_resumption(neighbour):
    started = process_start_time(neighbour.pid)
    os.kill(neighbour.pid, signal.SIGSTOP)
    assert _soon(neighbour.pid, started, "stopped") == ("stopped", "T")
    os.kill(neighbour.pid, signal.SIGCONT)
    assert _soon(neighbour.pid, started, "silent")[0] == "silent"


def test_a_dead_process_is_gone_before_and_after_its_parent_waited(neighbour):
    started = process_start_time(neighbour.pid)
    neighbour.kill()
    assert _soon(neighbour.pid, started, "gone") == ("gone", "Z")
    neighbour.wait()
    assert process_state(neighbour.pid, started) == ("gone", None)
    assert process_start_time(neighbour.pid) is None


def test_another_process_of_the_same_number_is_not_it(neighbour):
    started = process_start_time(neighbour.pid)
    assert process_state(neighbour.pid, started - 5) == ("gone", None)


def test_a_name_with_brackets_and_blanks(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to(sys.executable)
    with subprocess.Popen([str(program), *SLEEP[1:]]) as process:
        state, letter = process_state(process.pid, process_start_time(process.pid))
        process.kill()
    assert state == "silent"
    assert letter in "RSD"


def test_own_start_is_before_now():
    assert 0 < process_start_time() <= time.clock_gettime(time.CLOCK_BOOTTIME)

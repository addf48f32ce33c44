"""For how long threads compute in a few lines: real threads that loop, call others, sleep, or are in one long call."""

import json
import threading
import time

import pytest

from doctor.monitor.telemetry.stacks.tight_loops import TightLoop


class Endless:
    """Work that goes on until it is told to stop."""

    def __init__(self):
        self.stop = False

    def asks(self):
        """Ask again and again without a pause."""
        while not self.stop:
            sum(range(100))

    def naps(self):
        """Ask after a pause."""
        while not self.stop:
            time.sleep(0.01)

    def parses(self):
        """Call Python's own library."""
        text = json.dumps(list(range(100)))
        while not self.stop:
            json.loads(text)

    def calls(self):
        """Call two functions in turn."""
        while not self.stop:
            self.first()
            self.second()

    def first(self):
        """Work."""
        for _ in range(20_000):
            pass

    def second(self):
        """Other work."""
        for _ in range(20_000):
            pass


def longest(work, seconds=4.0):
    endless = Endless()
    thread = threading.Thread(target=getattr(endless, work))
    thread.start()
    loop, found, until = TightLoop(thread.ident, thread.native_id), 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
        found = max(found, loop.look())
    endless.stop = True
    thread.join()
    return found


@pytest.mark.parametrize("work", ["asks", "parses"])
def test_a_loop_of_a_few_lines(work):
    assert longest(work) > 1.0


def test_a_loop_that_calls_functions_of_the_user():
    assert longest("calls") < 2.0


def test_a_loop_that_sleeps():
    assert longest("naps") < 2.0

"""For how long threads are in loops without an end in sight: real threads that loop, call others, sleep, or save."""

import functools
import io
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from doctor.core.facts.telemetry import REPEATS
from doctor.monitor.telemetry.stacks import searches
from doctor.monitor.telemetry.stacks.endless_loops import endless_loop
from doctor.monitor.telemetry.stacks.tight_loops import TightLoop

pytestmark = pytest.mark.real_time


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

    def evaluates(self):
        """Call a model and a function in turn."""
        model = torch.nn.Linear(2, 2)
        while not self.stop:
            model(torch.ones(1, 2))
            self.first()
            self.second()

    def counts_up(self):
        """Count to a number, with some work in each turn."""
        number = 0
        while number < 10**6:
            self.first()
            self.second()
            number += 1 + self.stop * 10**6

    def checkpoints(self):
        """Call what is only named like a question."""
        checkpoint = functools.partial(time.sleep, 0.01)
        while not self.stop:
            checkpoint()

    def yields(self):
        """Ask after other threads and processes could run."""
        while not self.stop:
            os.sched_yield()

    def asks_system(self):
        """Ask the system for the same again and again."""
        while not self.stop:
            os.path.exists("/never/there")

    def counts_files(self):
        """Ask the system for one file after the other."""
        number = 0
        while not self.stop and number < 10**9:
            os.path.exists(f"/never/{number}")
            number += 1

    def reads_lines(self):
        """Read to the end of a file."""
        with open("/dev/zero", "rb") as lines:
            while not self.stop and lines.read(100):
                pass

    def waits_until(self):
        """Wait for a moment."""
        until = time.monotonic() + 1000
        while not self.stop and time.monotonic() < until:
            time.sleep(0.01)

    def attempts(self):
        """Try something many times."""
        for _ in range(10_000):
            try:
                return Path("/never/there").read_text()
            except OSError:
                time.sleep(0.02)
            if self.stop:
                break
        return None

    def all_rows(self):
        """Do something for each of many rows."""
        for _ in range(10_000):
            time.sleep(0.01)
            if self.stop:
                return

    def polls_for_save(self):
        """Wait for a thread that saves."""
        thread = threading.Thread(target=torch.save, args=({"epoch": 1}, SlowFile(self)))
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)

    def searches(self):
        """Extend paths until none can be extended, in more lines and functions than few."""
        paths = [[0]]
        while paths and not self.stop:
            path = paths.pop()
            for node in range(20):
                if node not in path and self.is_allowed(path, node):
                    paths.append([*path, node])

    def tries_orders(self):
        """Rate all orders of some things."""
        best = 0
        for order in itertools.permutations(range(12)):
            best = max(best, sum(map(self.distance, order, order[1:])))
            if self.stop:
                return

    def rates_orders(self):
        """Look for an order in an expression, in what has a name."""
        orders = itertools.permutations(range(12))
        return any(self.stop or sum(one * at for at, one in enumerate(order)) < 0 for order in orders)

    def numbers_orders(self):
        """Count the orders while they are rated."""
        for number, order in enumerate(itertools.permutations(range(12))):
            self.best = min(number, sum(map(self.distance, order, order[1:])))
            if self.stop:
                return

    def recurs(self, depth=40):
        """Call itself twice."""
        return 1 if depth < 2 or self.stop else self.recurs(depth - 1) + self.recurs(depth - 2)

    def rates_all(self):
        """Rate each of many rows, in several functions."""
        for row in range(10_000_000):
            for node in range(20):
                self.is_allowed([row], node)
            if self.stop:
                return

    def counts_paths(self):
        """Count what a generator that searches yields."""
        return sum(1 for _ in self.paths() if not self.stop)

    def paths(self):
        """Yield all paths through twenty nodes."""
        paths = [[0]]
        while paths and not self.stop:
            path = paths.pop()
            if len(path) == 12:
                yield path
            else:
                paths.extend([*path, node] for node in range(20) if node not in path)

    def searches_each(self):
        """Search in one small graph after the other."""
        for row in range(10_000_000):
            self.search([row], 8)
            if self.stop:
                return

    def search(self, paths, nodes):
        """Extend paths until none can be extended."""
        while paths and not self.stop:
            path = paths.pop()
            if path < 10**8:
                paths.extend([path * nodes + 1, path * nodes + 2])

    def works_off(self):
        """Work off a list, to which little is added."""
        rows = [0] * 3_000_000
        while rows and not self.stop:
            row = rows.pop()
            if self.is_allowed([row], 0) and row == 0 and len(rows) % 10 == 9:
                rows.append(1)

    def is_allowed(self, path, node):
        """Answer yes."""
        return self.distance(len(path), node) >= 0

    def distance(self, one, other):
        """Return how far two things are from one another."""
        return abs(one - other)

    def lists_pages(self):
        """Ask for the page that the answer before named, which is the same one each time."""
        token = "start"
        while token:
            page = self.asks_for(f"/files?after={token}")
            token = page["next"]

    def polls_state(self):
        """Ask for a state until it is another."""
        state = "queued"
        while state != "done" and not self.stop:
            state = self.asks_for("/jobs/7")["next"]

    def asks_for(self, path):
        """Answer after a pause."""
        time.sleep(0.01)
        return json.loads('{"next": "%s"}' % ("" if self.stop else "c2hhcmQtNw")) if path else {}

    def first(self):
        """Work."""
        for _ in range(20_000):
            pass

    def second(self):
        """Other work."""
        for _ in range(20_000):
            pass


class SlowFile(io.BytesIO):
    """A file on a disk that does not respond."""

    def __init__(self, endless):
        super().__init__()
        self.endless = endless

    def write(self, content):
        """Wait for the end of the test."""
        while not self.endless.stop:
            time.sleep(0.01)
        return super().write(content)


def longest(work, seconds=4.0, kind=TightLoop):
    endless = Endless()
    thread = threading.Thread(target=getattr(endless, work), daemon=True)
    thread.start()
    loop, found, until = kind(thread.ident, thread.native_id), 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
        found = max(found, loop.look())
    endless.stop = True
    thread.join()
    return found


@pytest.mark.parametrize("work", ["asks", "parses"])
def test_a_loop_of_a_few_lines(work):
    assert longest(work) > 1.0


@pytest.mark.parametrize("work", ["calls", "naps", "attempts"])
def test_a_loop_whose_calls_are_all_known(work):
    assert longest(work) > 2.0


@pytest.mark.parametrize(
    "work", ["searches", "tries_orders", "rates_orders", "numbers_orders", "recurs", "counts_paths"]
)
def test_a_search_in_several_functions(work, monkeypatch):
    monkeypatch.setattr(searches, "LONG_SEARCH", 2.0)
    assert longest(work, kind=searches.SearchClock) > 2.0


@pytest.mark.parametrize(("work", "repeats"), [("lists_pages", True), ("polls_state", False)])
def test_a_loop_that_is_named_the_same_page_again(work, repeats):
    endless = Endless()
    thread = threading.Thread(target=getattr(endless, work), daemon=True)
    thread.start()
    loop, until = TightLoop(thread.ident, thread.native_id), time.monotonic() + 4.0
    while time.monotonic() < until and not loop.words():
        time.sleep(0.05)
        loop.look()
    words = loop.words()
    endless.stop = True
    thread.join()
    assert words.startswith(REPEATS) == repeats
    assert repeats == ("names the same `token`, in the loop at" in words)


@pytest.mark.parametrize("work", ["rates_all", "works_off", "searches_each"])
def test_work_whose_end_its_data_shows_is_no_search(work, monkeypatch):
    monkeypatch.setattr(searches, "LONG_SEARCH", 2.0)
    assert longest(work, kind=searches.SearchClock) < 2.0


@pytest.mark.parametrize("work", ["evaluates", "counts_up", "checkpoints", "waits_until", "all_rows", "polls_for_save"])
def test_a_loop_that_may_end_by_itself(work):
    assert longest(work) < 2.0


@pytest.mark.parametrize(
    ("work", "is_endless"),
    [("naps", True), ("yields", True), ("asks_system", True), ("counts_files", False), ("reads_lines", False)],
)
def test_by_its_source_a_loop_that_gets_the_same_answer_has_no_end(work, is_endless):
    endless = Endless()
    thread = threading.Thread(target=getattr(endless, work))
    thread.start()
    time.sleep(0.2)
    found = endless_loop(sys._current_frames()[thread.ident])
    endless.stop = True
    thread.join()
    assert (found is not None) == is_endless

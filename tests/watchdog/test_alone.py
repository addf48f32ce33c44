"""One watchdog in the process of the test: what is evaluated when, and what it must never do."""

import threading
import time

import msgspec
import pytest

from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.watchdog import incidents, run_records, watchdog, watchdog_loop
from doctor.monitor.watchdog.stall_tracker import StallTracker
from doctor.monitor.watchdog.watchdog import Decision, Watchdog
from tests.lab.speed import NEVER, patience, slowness
from tests.watchdog.ranks import ScriptedSource

HANG_AFTER = 0.4 * slowness()
"""Seconds without progress that the sources call a stall."""


class Run:
    """A run of one rank. ``faulty``: what is found wherever it stands still."""

    def __init__(self, directory, source=None, faulty=True, judge=None, blames=(), **options):
        self.blames = blames
        self.source = source or ScriptedSource(0, hang_after=HANG_AFTER)
        self.judged, self.told = [], []
        self._faulty = faulty
        self.watchdog = Watchdog(
            0, 1, self.source, directory, judge or self._evaluate, write_line=self.told.append, **options
        )

    def _evaluate(self, job, occasion):
        self.judged.append((occasion, time.monotonic()))
        return Decision(occasion == "stall" and self._faulty, "why", ranks=self.blames)

    def __enter__(self):
        self.watchdog.start()
        return self

    def __exit__(self, *_):
        self.source.state = "ended"
        self.watchdog.stop(2)

    def times(self, occasion):
        return [at for what, at in self.judged if what == occasion]

    def until(self, holds):
        end = time.monotonic() + patience(20)
        while not holds():
            assert time.monotonic() < end, (self.judged, self.told)
            time.sleep(0.02)


class SlowFacts(ScriptedSource):
    """A rank whose facts take a moment."""

    def startup_facts(self):
        time.sleep(0.2 * slowness())
        return super().startup_facts()


def test_the_start_is_evaluated_once_the_facts_are_there(tmp_path, monkeypatch):
    """Not at the next tick: the training thread waits for it."""
    monkeypatch.setattr(watchdog_loop, "FAST_TICK", NEVER)
    with Run(tmp_path, SlowFacts(0)) as run:
        assert run.watchdog.check_start(patience(10)) is not None
        assert run.times("before")


def test_a_confirmed_stall_is_not_evaluated_again(tmp_path):
    with Run(tmp_path) as run:
        run.until(lambda: run.times("stall"))
        time.sleep(3 * HANG_AFTER)
        assert len(run.times("stall")) == 1
        assert run.told == []
        run.source.step()
        run.until(lambda: run.told)
        assert run.told == ["training resumed"]
        run.until(lambda: len(run.times("stall")) == 2)  # another one, which is news
        assert run.told == ["training resumed"]


@pytest.mark.parametrize(("blamed", "over"), [((), True), ((0,), True), ((0, 1), False)])
def test_a_stall_is_over_when_those_who_were_blamed_go_on(tmp_path, blamed, over):
    """Which tells nothing of a rank that is dead, or of others that wait for one another."""
    heard = []
    with Run(tmp_path, blames=blamed, on_recovery=lambda decision, seconds: heard.append((decision, seconds))) as run:
        began = run.source.since
        run.until(lambda: run.times("stall"))
        time.sleep(0.75 * HANG_AFTER)
        run.source.step()
        lasted = run.source.since - began
        run.source.hang_after = NEVER
        if over:
            run.until(lambda: heard)
        else:
            time.sleep(1.5 * HANG_AFTER)
    assert [decision.words for decision, _ in heard] == ["why"] * over
    assert all(seconds >= lasted for _, seconds in heard)
    assert run.told == []


def test_a_stall_that_ends_in_an_exception_does_not_go_on(tmp_path):
    with Run(tmp_path) as run:
        run.until(lambda: run.times("stall"))
        run.source.fails("no")
        run.source.step()
        time.sleep(1.5 * HANG_AFTER)
        assert run.told == []


def test_an_exception_of_a_single_process_is_evaluated_at_once(tmp_path, monkeypatch):
    """Nobody else may raise in turn."""
    monkeypatch.setattr(incidents, "TIMES", msgspec.structs.replace(incidents.TIMES, broken=NEVER, longest=NEVER))
    with Run(tmp_path) as run:
        run.source.fails("no")
        assert run.watchdog.fail(NEVER) is not None
    assert run.times("failure")


def test_a_healthy_stall_is_evaluated_again_after_twice_the_time(tmp_path):
    with Run(tmp_path, faulty=False) as run:
        began = run.source.since
        run.until(lambda: len(run.times("stall")) == 3)
        waited = [at - began for at in run.times("stall")]
        assert [seconds >= HANG_AFTER * 2**turn for turn, seconds in enumerate(waited)] == [True] * 3
        run.source.step()
        run.until(lambda: len(run.times("stall")) == 4)
        assert run.told == []


def test_the_time_doubles_and_begins_anew():
    stalls, limit = StallTracker(), 10.0

    def news_at(now, began, early=False):
        """Whether a stall since ``began`` is news; it is judged healthy then."""
        stall = Stall(now - began, limit, early)
        stalls.note(stall, now)
        if stalls.is_news(stall, now):
            stalls.evaluated("incident", now, confirmed=False, passed=0)
            return True
        return False

    assert [now for now in range(11, 100) if news_at(now, 0)] == [11, 21, 41, 81]
    assert [now for now in range(111, 150) if news_at(now, 100)] == [111, 121, 141]
    assert [now for now in range(211, 250) if news_at(now, 200, early=True)] == [211, 216, 223, 234]


def test_waiting_for_a_decision_is_not_a_stall(tmp_path):
    class Slow(ScriptedSource):
        def startup_facts(self):
            time.sleep(2.0 * slowness())
            self.hang_after = NEVER  # what comes after the meeting is no matter of this test
            return super().startup_facts()

    with Run(tmp_path, Slow(0, hang_after=slowness())) as run:
        run.source.step()
        assert run.watchdog.check_start(patience(20)) is not None
        time.sleep(0.3)
        assert not run.times("stall")


@pytest.mark.parametrize("broken", ["stall", "startup_facts", "current_facts", "position"])
def test_a_source_that_raises(tmp_path, broken, monkeypatch):
    """Said once; nobody waits for what will not come; after repeated failures it is silent."""

    def breaks():
        raise RuntimeError(f"no {broken}")

    monkeypatch.setattr(watchdog, "MOST_FAULTS", 2)
    source = ScriptedSource(0, hang_after=0.2)
    setattr(source, broken, breaks)
    with Run(tmp_path, source, round_seconds=0.2) as run:
        if broken == "startup_facts":
            assert run.watchdog.check_start(NEVER) is None
            assert run.watchdog.check_start(NEVER) is None
        elif broken == "position":
            assert run.watchdog.fail(NEVER) is None
        run.until(lambda: len(run.told) == 2)
        assert run.told[0] == f"watchdog on rank 0 failed: RuntimeError: no {broken}"
        assert run.told[1] == "watchdog on rank 0 failed 2 times and is now disabled"
        assert run.watchdog.check_start(NEVER) is None


def test_a_slow_evaluation_is_not_awaited(tmp_path):
    go, ends = threading.Event(), []

    def judge(job, occasion):
        go.wait(NEVER)
        ends.append(occasion)

    with Run(tmp_path, judge=judge) as run:
        assert run.watchdog.check_start(0.5) is None
    assert ends == [], "the run has gone on and ended, and it still judges"
    go.set()


def test_a_file_system_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(run_records, "PATIENCE", 0.2)
    monkeypatch.setattr(OwnFolder, "write", lambda folder, name, data: time.sleep(NEVER))
    with Run(tmp_path) as run:
        assert run.watchdog.check_start(patience(5)) == Decision(words="why")
    assert run.told == [f"rank 0 cannot write its record to {tmp_path}: the file system does not respond"]
    assert [occasion for occasion, _ in run.judged] == ["before", "end"]


def test_calls_out_of_order_do_nothing(tmp_path):
    run = Run(tmp_path)
    assert run.watchdog.run == ""
    assert (run.watchdog.check_start(5), run.watchdog.fail(5), run.watchdog.stop(5)) == (None, None, None)
    with run:
        run.watchdog.start()
    run.watchdog.stop(5)
    assert (run.watchdog.check_start(5), run.watchdog.fail(5)) == (None, None)
    assert len(run.judged) == 1


def test_no_thread_is_left(tmp_path):
    before = {*threading.enumerate()}
    with Run(tmp_path) as run:
        run.watchdog.check_start(5)
    deadline = time.monotonic() + patience(20)
    while more := {*threading.enumerate()} - before:
        assert time.monotonic() < deadline, more
        time.sleep(0.02)

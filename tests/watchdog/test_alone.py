"""One sentinel in the process of the test: what is judged when, and what it must never do."""

import threading
import time

import pytest

from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.telemetry.progress import Stall
from doctor.monitor.watchdog import incidents, run_records, watchdog
from doctor.monitor.watchdog.stall_tracker import StallTracker
from doctor.monitor.watchdog.watchdog import Decision, Watchdog
from tests.lab.speed import NEVER, patience, slowness
from tests.watchdog.ranks import Patient

HANG_AFTER = 0.4 * slowness()
"""Seconds without progress that the patients call a stall."""


class Run:
    """A run of one rank. ``sick``: what is found wherever it stands still."""

    def __init__(self, directory, patient=None, sick=True, judge=None, blames=(), **options):
        self.blames = blames
        self.patient = patient or Patient(0, hang_after=HANG_AFTER)
        self.judged, self.told = [], []
        self._sick = sick
        self.sentinel = Watchdog(0, 1, self.patient, directory, judge or self._judge, tell=self.told.append, **options)

    def _judge(self, job, occasion):
        self.judged.append((occasion, time.monotonic()))
        return Decision(occasion == "stall" and self._sick, "why", ranks=self.blames)

    def __enter__(self):
        self.sentinel.start()
        return self

    def __exit__(self, *_):
        self.patient.state = "ended"
        self.sentinel.stop(2)

    def times(self, occasion):
        return [at for what, at in self.judged if what == occasion]

    def until(self, holds):
        end = time.monotonic() + patience(20)
        while not holds():
            assert time.monotonic() < end, (self.judged, self.told)
            time.sleep(0.02)


def test_a_stall_that_was_judged_sick_is_not_judged_again(tmp_path):
    with Run(tmp_path) as run:
        run.until(lambda: run.times("stall"))
        time.sleep(3 * HANG_AFTER)
        assert len(run.times("stall")) == 1
        assert run.told == []
        run.patient.step()
        run.until(lambda: run.told)
        assert run.told == ["progress goes on after all"]
        run.until(lambda: len(run.times("stall")) == 2)  # another one, which is news
        assert run.told == ["progress goes on after all"]


@pytest.mark.parametrize(("blamed", "over"), [((), True), ((0,), True), ((0, 1), False)])
def test_a_stall_is_over_when_those_who_were_blamed_go_on(tmp_path, blamed, over):
    """Which tells nothing of a rank that is dead, or of others that wait for one another."""
    heard = []
    with Run(tmp_path, blames=blamed, goes_on=lambda ruling, seconds: heard.append((ruling, seconds))) as run:
        began = run.patient.since
        run.until(lambda: run.times("stall"))
        time.sleep(0.75 * HANG_AFTER)
        run.patient.step()
        lasted = run.patient.since - began
        run.patient.hang_after = NEVER
        if over:
            run.until(lambda: heard)
        else:
            time.sleep(1.5 * HANG_AFTER)
    assert [ruling.words for ruling, _ in heard] == ["why"] * over
    assert all(seconds >= lasted for _, seconds in heard)
    assert run.told == []


def test_a_stall_that_ends_in_an_exception_does_not_go_on(tmp_path):
    with Run(tmp_path) as run:
        run.until(lambda: run.times("stall"))
        run.patient.fails("no")
        run.patient.step()
        time.sleep(1.5 * HANG_AFTER)
        assert run.told == []


def test_an_exception_of_a_lone_process_is_judged_at_once(tmp_path, monkeypatch):
    """Nobody else may raise in turn."""
    monkeypatch.setattr(incidents, "TIMES", incidents.TIMES._replace(broken=NEVER, longest=NEVER))
    with Run(tmp_path) as run:
        run.patient.fails("no")
        assert run.sentinel.fail(NEVER) is not None
    assert run.times("failure")


def test_a_stall_that_was_judged_healthy_is_judged_again_after_twice_the_time(tmp_path):
    with Run(tmp_path, sick=False) as run:
        began = run.patient.since
        run.until(lambda: len(run.times("stall")) == 3)
        waited = [at - began for at in run.times("stall")]
        assert [seconds >= HANG_AFTER * 2**turn for turn, seconds in enumerate(waited)] == [True] * 3
        run.patient.step()
        run.until(lambda: len(run.times("stall")) == 4)
        assert run.told == []


def test_the_time_doubles_and_begins_anew():
    stalls, limit = StallTracker(), 10.0

    def news_at(now, began):
        """Whether a stall since ``began`` is news; it is judged healthy then."""
        stall = Stall(now - began, limit)
        stalls.note(stall, now)
        if stalls.is_news(stall, now):
            stalls.judged("alarm", now, sick=False, passed=0)
            return True
        return False

    assert [now for now in range(11, 100) if news_at(now, 0)] == [11, 21, 41, 81]
    assert [now for now in range(111, 150) if news_at(now, 100)] == [111, 121, 141]


def test_waiting_for_a_ruling_is_no_stall(tmp_path):
    class Slow(Patient):
        def opening(self):
            time.sleep(2.0 * slowness())
            self.hang_after = NEVER  # what comes after the meeting is no matter of this test
            return super().opening()

    with Run(tmp_path, Slow(0, hang_after=slowness())) as run:
        run.patient.step()
        assert run.sentinel.meet(patience(20)) is not None
        time.sleep(0.3)
        assert not run.times("stall")


@pytest.mark.parametrize("broken", ["stall", "opening", "card", "position"])
def test_a_patient_that_raises(tmp_path, broken, monkeypatch):
    """Said once; nobody waits for what will not come; after repeated failures it is silent."""

    def breaks():
        raise RuntimeError(f"no {broken}")

    monkeypatch.setattr(watchdog, "FAULTS", 2)
    patient = Patient(0, hang_after=0.2)
    setattr(patient, broken, breaks)
    with Run(tmp_path, patient, round_seconds=0.2) as run:
        if broken == "opening":
            assert run.sentinel.meet(NEVER) is None
            assert run.sentinel.meet(NEVER) is None
        elif broken == "position":
            assert run.sentinel.fail(NEVER) is None
        run.until(lambda: len(run.told) == 2)
        assert run.told[0] == f"the sentinel of rank 0 broke: RuntimeError: no {broken}"
        assert run.told[1] == "the sentinel of rank 0 broke 2 times and watches no more"
        assert run.sentinel.meet(NEVER) is None


def test_a_judge_that_takes_too_long_is_not_waited_for(tmp_path):
    go, ends = threading.Event(), []

    def judge(job, occasion):
        go.wait(NEVER)
        ends.append(occasion)

    with Run(tmp_path, judge=judge) as run:
        assert run.sentinel.meet(0.5) is None
    assert ends == [], "the run has gone on and ended, and it still judges"
    go.set()


def test_a_file_system_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(run_records, "PATIENCE", 0.2)
    monkeypatch.setattr(OwnFolder, "write", lambda folder, name, data: time.sleep(NEVER))
    with Run(tmp_path) as run:
        assert run.sentinel.meet(patience(5)) == Decision(words="why")
    assert run.told == [f"rank 0 can't keep its record in {tmp_path}: the file system does not answer"]
    assert [occasion for occasion, _ in run.judged] == ["before", "end"]


def test_calls_out_of_order_do_nothing(tmp_path):
    run = Run(tmp_path)
    assert run.sentinel.run == ""
    assert (run.sentinel.meet(5), run.sentinel.fail(5), run.sentinel.stop(5)) == (None, None, None)
    with run:
        run.sentinel.start()
    run.sentinel.stop(5)
    assert (run.sentinel.meet(5), run.sentinel.fail(5)) == (None, None)
    assert len(run.judged) == 1


def test_no_thread_is_left(tmp_path):
    before = {*threading.enumerate()}
    with Run(tmp_path) as run:
        run.sentinel.meet(5)
    deadline = time.monotonic() + patience(20)
    while more := {*threading.enumerate()} - before:
        assert time.monotonic() < deadline, more
        time.sleep(0.02)

"""Moments: read once and in order, lost without harm where nobody reads, and never more than are kept."""

import threading
import tracemalloc

import pytest

from doctor.monitor.telemetry.event_log import ENDED, KEPT, EventLog, StageEntered
from doctor.monitor.telemetry.progress import FLOOR
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.telemetry.step_clock import WINDOW

BATCHES = 8 * WINDOW + 1
assert 3 * BATCHES < KEPT


def events(batches, start=0, seconds=0.1):
    """So many batches of training, ``seconds`` each, half of them in backward."""
    for batch in range(start, start + batches):
        at = batch * seconds
        yield at, "step", (batch, 0, batch)
        yield at + seconds / 4, "backward", None
        yield at + 3 * seconds / 4, "data", ENDED


def test_what_is_noted_is_read_once_and_in_order():
    log = EventLog()
    noted = [(float(number), "step", None) for number in range(5)]
    for event in noted[:3]:
        log.note(event)
    assert log.read() == (noted[:3], True)
    for event in noted[3:]:
        log.note(event)
    assert log.read() == (noted[3:], True)
    assert log.read() == ([], True)


def test_the_oldest_unread_events_are_lost_and_the_reader_knows():
    log = EventLog(kept=4)
    for number in range(10):
        log.note((float(number), "step", None))
    read, contiguous = log.read()
    assert [at for at, _, _ in read] == [6.0, 7.0, 8.0, 9.0]
    assert not contiguous


@pytest.fixture
def telemetry():
    telemetry = RankTelemetry()
    telemetry.note((-1.0, "epoch-start", StageEntered("train", 0)))
    return telemetry


def test_a_gap_makes_no_step_and_no_point_long():
    """Two windows that are read, three of which nobody reads the first two, and two that are read batch by batch."""
    telemetry = RankTelemetry()
    telemetry._event_log = EventLog(kept=4 * WINDOW)
    telemetry.note = telemetry._event_log.note
    telemetry.note((-1.0, "epoch-start", StageEntered("train", 0)))
    for begin, batches in ((0, 1), (1, 1), (2, 3), (5, 1), (6, 1)):
        for event in events(batches * WINDOW, start=begin * WINDOW):
            telemetry.note(event)
        assert telemetry.progress.batch == (begin + batches) * WINDOW - 1
    facts = telemetry.steps.facts()
    assert [window.first_step // WINDOW for window in facts.windows] == [0, 4, 5], "those that are whole"
    assert {window.slowest for window in facts.windows} == {0.1}
    assert facts.seen == 7 * WINDOW
    assert telemetry.progress.limit() == FLOOR, "no point took as long as the gap"


def test_readers_beside_the_training_lose_nothing(telemetry):
    done = threading.Event()

    def read():
        while not done.is_set():
            telemetry.progress.facts()
            telemetry.steps.facts()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for event in events(BATCHES):
            telemetry.note(event)
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert telemetry.progress.passed == 1 + 3 * BATCHES
    assert len(telemetry.steps.facts().windows) == 8


def test_it_does_not_grow():
    log = EventLog(kept=100)
    tracemalloc.start()
    for number in range(1000):
        log.note((float(number), "step", None))
    before = tracemalloc.get_traced_memory()[0]
    for number in range(20_000):
        log.note((float(number), "step", None))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 4096

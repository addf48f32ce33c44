"""The share of the time in which a thread waits in a collective, from samples of its stack."""

import math

import pytest

from doctor.core.facts import TrainingFacts
from doctor.monitor.telemetry import rank_pauses, wait_shares
from doctor.monitor.telemetry.rank_pauses import HINT, HINT_LASTS, LEAST_DELAY
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry
from doctor.monitor.telemetry.wait_shares import EVERY, KEPT, SLOT, WaitShares


@pytest.fixture
def clock(monkeypatch):
    """The time of the samples, and whether the thread waits at it."""
    now = [0.0]
    monkeypatch.setattr(wait_shares, "monotonic", lambda: now[0])
    monkeypatch.setattr(wait_shares, "is_waiting_in_collective", lambda thread: now[0] % 1.0 < 0.25)
    return now


def test_shares_of_slots(clock):
    shares = WaitShares()
    for number in range(int((KEPT + 3) * SLOT / EVERY)):
        clock[0] = number * EVERY
        shares.sample(1, trains=True)
    assert len(shares.facts()) == KEPT
    assert all(0.2 < one < 0.4 for one in shares.facts())


def test_a_slot_of_which_most_is_not_training_does_not_count(clock):
    shares = WaitShares()
    for number in range(int(3 * SLOT / EVERY)):
        clock[0] = number * EVERY
        shares.sample(1, trains=number % 4 == 0)
    assert shares.facts() == ()


@pytest.mark.parametrize("strategy", ["FSDPStrategy", "fully_shard", "DeepSpeedStrategy"])
def test_a_sharded_rank_is_sampled_between_ticks(strategy):
    telemetry = RankTelemetry()
    telemetry.training = TrainingFacts(strategy=strategy)
    assert telemetry.sample() < 2 * EVERY


@pytest.mark.parametrize(("share", "moves", "delays"), [(1.0, False, 1), (1.0, True, 4), (0.2, False, 4)])
def test_delays_by_the_work_of_the_training_thread_count_once_at_a_point(share, moves, delays):
    """Native code that it calls keeps the interpreter's lock: in each step, or in one piece of work between two."""
    ran, passed = [0.0], [7]
    pauses = rank_pauses.RankPauses(busy=lambda: int(ran[0]), passed=lambda: passed[0])
    pauses.note_delay(0.0)
    for _ in range(4):
        ran[0] += share * 2 * LEAST_DELAY * 1e9
        passed[0] += moves
        pauses.note_delay(2 * LEAST_DELAY)
    assert pauses.facts().delays == delays


@pytest.mark.parametrize("strategy", [None, "ddp", "DistributedDataParallel"])
def test_another_rank_is_looked_at_in_ticks_unless_its_waits_end_late(strategy, monkeypatch):
    """What begins in the middle of a long wait seems shorter, so that delays are timed by short waits."""
    now = [1000.0]
    monkeypatch.setattr(rank_pauses, "monotonic", lambda: now[0])
    telemetry = RankTelemetry()
    telemetry.training = TrainingFacts(strategy=strategy)
    assert telemetry.sample() == math.inf
    telemetry.pauses.note_delay(HINT / 2)
    assert telemetry.sample() == math.inf
    telemetry.pauses.note_delay(HINT)
    assert telemetry.sample() < 2 * EVERY
    assert telemetry.pauses.facts().delays == 0
    now[0] += HINT_LASTS
    assert telemetry.sample() == math.inf
    telemetry.pauses.note_delay(LEAST_DELAY)
    assert telemetry.pauses.facts().delays == 1
    assert telemetry.waits.facts() == ()

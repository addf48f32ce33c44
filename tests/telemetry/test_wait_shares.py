"""The share of the time in which a thread waits in a collective, from samples of its stack."""

import pytest

from doctor.monitor.telemetry import wait_shares
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

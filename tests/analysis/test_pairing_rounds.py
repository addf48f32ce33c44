"""Every host is in one pair a round, and no border is crossed by all pairs of a round alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.analysis.fabric.localization.localizer import rounds
from doctor.analysis.fabric.localization.pairing_rounds import ALL_PAIRS_UP_TO, FEWEST_ROUNDS, rounds_to_confirm


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 300))
def test_each_host_is_in_one_pair_a_round_at_most(count):
    for pairs in rounds(count):
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
        assert all(0 <= first < second < count for first, second in pairs)


@settings(deadline=None, max_examples=30)
@given(st.integers(ALL_PAIRS_UP_TO + 1, 300) | st.sampled_from([512, 1000, 1024, 2000]))
def test_hosts_rest_seldom_and_meet_others(count):
    planned = rounds(count)
    assert len(planned) >= FEWEST_ROUNDS
    assert count < 512 or len(planned) + rounds_to_confirm(count) <= math.ceil(math.log2(count)) + 2
    met = [set() for _ in range(count)]
    for pairs in planned:
        for first, second in pairs:
            met[first].add(second)
            met[second].add(first)
    assert all(len(pairs) == count // 2 for pairs in planned)
    assert min(len(others) for others in met) >= (len(planned) + 1) // 2
    assert sum(len(others) for others in met) >= 0.75 * 2 * sum(map(len, planned))


@pytest.mark.parametrize("count", range(2, ALL_PAIRS_UP_TO + 1))
def test_few_hosts_all_meet_once(count):
    pairs = [pair for pairs in rounds(count) for pair in pairs]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert len(rounds(count)) == count - 1 + count % 2


@pytest.mark.parametrize("count", [16, 64, 256, 1024, 50, 1000])
@pytest.mark.parametrize("share", [1 / 4, 1 / 2])
def test_a_boundary_is_no_round(count, share):
    """Where all pairs across lay in rounds that hold nothing else, a boundary would look like a busy moment."""
    cut = int(count * share)
    across = [[(first < cut) != (second < cut) for first, second in pairs] for pairs in rounds(count)]
    assert sum(0.1 < sum(crossing) / len(crossing) < 0.9 for crossing in across) >= 2


def test_no_host_nobody_to_measure():
    assert rounds(0) == rounds(1) == ()
    assert rounds(2) == (((0, 1),),)


def test_rounds_can_be_cut_short():
    assert rounds(64, 3) == rounds(64)[:3]

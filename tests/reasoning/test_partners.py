"""Who exchanges messages with whom."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.reasoning.partners import NOBODY, TURNS, partners_of


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60))
def test_two_of_a_round_meet_each_other_alone(hosts: list[int]) -> None:
    partners = partners_of(hosts)
    assert len({len(own) for own in partners.values()}) <= 1
    for place, own in partners.items():
        for turn, partner in enumerate(own):
            assert partner == NOBODY or (partner != place and partners[partner][turn] == place)


@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_few_hosts_meet_on_each_rail_and_within(per_host: int) -> None:
    hosts = [host for host in range(6) for _ in range(per_host)]
    met = {(place, one) for place, own in partners_of(hosts).items() for one in own if one != NOBODY}
    for one, other in combinations(range(len(hosts)), 2):
        same_rail, same_host = one % per_host == other % per_host, hosts[one] == hosts[other]
        assert ((one, other) in met) == (same_rail or same_host)


def test_each_pair_meets_again() -> None:
    own = partners_of([0, 0, 1, 1])[0]
    assert sorted(one for one in own if one != NOBODY) == sorted([1, 2] * TURNS)


def test_hosts_of_unequal_size() -> None:
    partners = partners_of([0, 0, 0, 1])
    assert {one for one in partners[0] if one != NOBODY} == {1, 2, 3}
    assert {one for one in partners[3] if one != NOBODY} == {0}


@pytest.mark.parametrize("hosts", [[], [7]])
def test_nobody_to_meet(hosts: list[int]) -> None:
    assert partners_of(hosts) == {}

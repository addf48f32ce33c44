"""Who exchanges messages with whom."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.analysis.fabric.pairing import NO_PARTNER, TURNS, RankSlot, partners_of


def seats_of(*counts: int) -> list[RankSlot]:
    """Hosts with so many ranks each."""
    return [RankSlot(host, place) for host, count in enumerate(counts) for place in range(count)]


def met(partners: tuple[int, ...]) -> set[int]:
    return {one for one in partners if one != NO_PARTNER}


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=60))
def test_two_of_a_round_meet_each_other_alone(sitting: set[tuple[int, int]]) -> None:
    partners = partners_of([RankSlot(*one) for one in sorted(sitting)])
    assert len({len(own) for own in partners}) <= 1
    for number, own in enumerate(partners):
        for turn, partner in enumerate(own):
            assert partner == NO_PARTNER or (partner != number and partners[partner][turn] == number)


@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_few_hosts_meet_on_each_rail_and_within(per_host: int) -> None:
    seats = seats_of(*[per_host] * 6)
    partners = partners_of(seats)
    for one, other in combinations(range(len(seats)), 2):
        identical = seats[one].place == seats[other].place or seats[one].host == seats[other].host
        assert (other in met(partners[one])) == identical


def test_each_pair_meets_again() -> None:
    own = partners_of(seats_of(2, 2))[0]
    assert sorted(one for one in own if one != NO_PARTNER) == sorted([1, 2] * TURNS)


def test_a_host_with_another_number_of_ranks_keeps_to_itself() -> None:
    """On a card that two of its ranks share, each would have the half of what another host's only rank has."""
    partners = partners_of(seats_of(2, 2, 1, 2))
    assert [met(own) for own in partners] == [{1, 2, 5}, {0, 3, 6}, {0, 3, 5}, {1, 2, 6}, set(), {0, 2, 6}, {1, 3, 5}]


def test_a_rank_that_does_not_take_part_leaves_its_place_free() -> None:
    seats = [one for one in seats_of(3, 3, 3) if one != RankSlot(1, 0)]
    partners = {seats[number]: {seats[one] for one in met(own)} for number, own in enumerate(partners_of(seats))}
    assert partners[RankSlot(0, 2)] == {RankSlot(0, 0), RankSlot(0, 1), RankSlot(2, 2)}
    assert partners[RankSlot(1, 2)] == {RankSlot(1, 1)}


@pytest.mark.parametrize("seats", [[], [RankSlot(7, 0)]])
def test_nobody_to_meet(seats: list[RankSlot]) -> None:
    assert [met(own) for own in partners_of(seats)] == [set()] * len(seats)

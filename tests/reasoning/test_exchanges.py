"""Which rank's way to others is slow, by the messages of pairs."""

from __future__ import annotations

import pytest

from doctor.api import exchanged, slow_neighbours, slow_rails

LIMITS = {"least_share": 0.6, "least_confidence": 0.5}


def rails(sketch):
    return {(one.part.kind, one.part.hosts, one.ranks) for one in slow_rails(sketch.job(), **LIMITS)}


def neighbours(sketch):
    return {(one.host, one.ranks) for one in slow_neighbours(sketch.job(), **LIMITS)}


def across(*slow):
    """Messages to other hosts."""
    return lambda source, target: source // 4 != target // 4 and bool({source, target}.intersection(slow))


def test_all_are_well():
    assert rails(exchanged()) == neighbours(exchanged()) == set()


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_one_card_is_one_rail(rank):
    sketch = exchanged(across(rank))
    assert rails(sketch) == {("host", (f"node{rank // 4}",), (rank,))}
    assert neighbours(sketch) == set()


def test_a_card_that_sends_slowly():
    sketch = exchanged(lambda source, target: source == 6 and target // 4 != 1)
    assert rails(sketch) == {("sending", ("node1",), (6,))}


def test_all_rails_of_a_host():
    assert {ranks for _, _, ranks in rails(exchanged(across(8, 9, 10, 11), hosts=6))} == {(8,), (9,), (10,), (11,)}


def test_within_a_host_pairs_are_compared_with_the_same_pairs_of_others():
    inside = exchanged(lambda source, target: source // 4 == target // 4 == 2 and 9 in (source, target))
    assert neighbours(inside) == {("node2", (9,))}
    assert rails(inside) == set()
    alike = exchanged(lambda source, target: source // 4 == target // 4 and 1 in (source % 4, target % 4))
    assert neighbours(alike) == set(), "so they are built"


def test_one_pair_within_a_host():
    bridge = exchanged(lambda source, target: {source, target} == {4, 5})
    assert neighbours(bridge) == {("node1", (4, 5))}


def test_two_hosts_are_not_compared_within():
    assert neighbours(exchanged(lambda source, target: {source, target} == {4, 5}, hosts=2)) == set()

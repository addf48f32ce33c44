"""Which rank's way to others is slow, by the messages of pairs."""

from __future__ import annotations

import msgspec
import pytest

from doctor.analysis.fabric.p2p_bandwidth import slow_neighbours, slow_rails
from doctor.facts import CollectiveFacts, GpuFacts
from doctor.testing.collective_timings import exchanged

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
    identical = exchanged(lambda source, target: source // 4 == target // 4 and 1 in (source % 4, target % 4))
    assert neighbours(identical) == set(), "so they are built"


def test_one_pair_within_a_host():
    bridge = exchanged(lambda source, target: {source, target} == {4, 5})
    assert neighbours(bridge) == {("node1", (4, 5))}


def test_a_host_all_of_whose_pairs_are_slow():
    fabric = exchanged(lambda source, target: source // 4 == target // 4 == 1)
    assert neighbours(fabric) == {("node1", (4, 5, 6, 7))}
    two = exchanged(lambda source, target: source // 2 == target // 2 == 1, per_host=2)
    assert neighbours(two) == {("node1", (2, 3))}


def test_one_direction_within_a_host():
    (found,) = slow_neighbours(exchanged(lambda source, target: source == 9 and target // 4 == 2).job(), **LIMITS)
    assert (found.ranks, found.way) == ((9,), "sending")
    assert all(message.source == 9 for message, _ in found.messages)


def test_other_slots_are_no_siblings():
    """A host whose ranks were given other GPUs: its bridge joins others."""
    sketch = exchanged(lambda source, target: {source, target} == {4, 5})
    gpus = sketch.job().hosts[1].find(GpuFacts)
    moved = tuple(msgspec.structs.replace(gpu, bus_id=f"0000:{gpu.index + 65:02x}:00.0") for gpu in gpus.gpus)
    other = msgspec.structs.replace(gpus, gpus=moved)
    assert neighbours(sketch) == {("node1", (4, 5))}
    assert neighbours(sketch.put(other, hosts=("node1",))) == set()


@pytest.mark.parametrize(("waited", "found"), [(0.0, {("host", ("node1",), (6,))}), (0.9, set())])
def test_what_waited_for_processors_is_no_slow_card(waited, found):
    sketch = exchanged(across(6))
    for rank in sketch.job().ranks:
        facts = rank.find(CollectiveFacts)
        slow = across(6)
        known = tuple(
            msgspec.structs.replace(one, waited=waited if slow(one.source, rank.number) else 0.0)
            for one in facts.exchanges
        )
        sketch = sketch.put(msgspec.structs.replace(facts, exchanges=known), ranks=(rank.number,))
    assert rails(sketch) == found


def test_two_halves_are_told_by_others():
    """Racks, NVLink domains, two containers of each machine: what joins some hosts makes no other one slow."""
    slow = exchanged(lambda source, target: source // 8 != target // 8 and source // 4 != target // 4, share=0.1)
    assert rails(slow) == set()


def test_two_hosts_are_not_compared_within():
    assert neighbours(exchanged(lambda source, target: {source, target} == {4, 5}, hosts=2)) == set()

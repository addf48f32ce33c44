"""What is measured again, and with whom."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.analysis.fabric.localization.localizer import (
    BandwidthReading,
    Localization,
    Suspect,
    confirming,
    localize,
    rounds,
)
from doctor.analysis.fabric.localization.pairing_rounds import most_rounds_to_confirm, rounds_to_confirm


def readings(count, slow=lambda source, target, turn: False):
    found = []
    for turn, pairs in enumerate(rounds(count)):
        for pair in pairs:
            for source, target in (pair, pair[::-1]):
                found.append(BandwidthReading(source, target, 0.3 if slow(source, target, turn) else 1.0, turn))
    return found


def planned(measured, count):
    return confirming(localize(measured, count), measured, count)


def test_nothing_slow_nothing_to_confirm():
    assert planned(readings(16), 16) == ()
    assert planned((), 16) == ()


@pytest.mark.parametrize("count", [8, 16, 50])
def test_a_suspect_meets_good_hosts_that_it_has_not_met(count):
    measured = readings(count, lambda source, target, _: 5 in (source, target))
    met = {host for one in measured if 5 in one[:2] for host in one[:2]}
    plan = planned(measured, count)
    assert [len(pairs) for pairs in plan] == [1] * rounds_to_confirm(count)
    partners = [host for pairs in plan for pair in pairs for host in pair if host != 5]
    assert len({*partners}) == len(partners)
    assert count == 8 or not met & {*partners}


def test_a_slow_pair_is_measured_again_and_no_more_once_it_was_usual():
    pair = rounds(16)[2][3]
    measured = readings(16, lambda source, target, turn: {source, target} == {*pair})
    assert planned(measured, 16) == ((pair,),) * rounds_to_confirm(16)
    again = [BandwidthReading(source, target, 1.0, 7, confirms=True) for source, target in (pair, pair[::-1])]
    assert planned([*measured, *again], 16) == ()
    assert localize([*measured, *again], 16).suspects == ()


def test_a_host_that_is_slow_with_all_it_meets_needs_two_rounds():
    measured = readings(8, lambda source, target, _: 5 in (source, target))
    for turn, (other, left) in enumerate(((0, rounds_to_confirm(8) - 1), (1, 0)), 8):
        measured += [
            BandwidthReading(source, target, 0.3, turn, confirms=True) for source, target in ((5, other), (other, 5))
        ]
        assert len(planned(measured, 8)) == left


def test_a_host_that_is_slow_at_times_needs_all_of_them():
    measured = readings(8, lambda source, target, turn: 5 in (source, target) and turn % 2)
    for turn, value in ((8, 0.3), (9, 1.0)):
        measured += [
            BandwidthReading(source, target, value, turn, confirms=True)
            for source, target in ((5, turn - 8), (turn - 8, 5))
        ]
    assert len(planned(measured, 8)) == rounds_to_confirm(8) - 2


def test_a_host_with_two_slow_pairs_meets_others_beside_them():
    """Before one of them is blamed for what may be the host's."""
    measured = readings(8, lambda source, target, _: {source, target} in ({2, 5}, {3, 5}))
    plan = confirming(Localization(1.0, 0.05, ()), measured, 8)
    own = [next(pair for pair in pairs if 5 in pair) for pairs in plan]
    assert {*own[::2]} <= {(2, 5), (3, 5)}
    assert {*own[1::2]}.isdisjoint({(2, 5), (3, 5)})


def test_more_rounds_as_long_as_a_host_may_be_slow_at_times():
    measured = readings(8, lambda source, target, turn: 5 in (source, target) and turn in (1, 4))
    for turn in range(7, 7 + rounds_to_confirm(8)):
        measured += [BandwidthReading(source, target, 1.0, turn, confirms=True) for source, target in ((0, 5), (5, 0))]
    likely, sure = (
        Localization(1.0, 0.05, (Suspect("host", (5,), 0.3, value, 4, 26, True),)) for value in (0.6, 0.9999)
    )
    more = most_rounds_to_confirm(8) - rounds_to_confirm(8)
    assert len(confirming(likely, measured, 8)) == more > 0
    assert confirming(likely, measured, 8, patient=False) == confirming(sure, measured, 8) == ()


def test_more_rounds_before_a_pair_is_blamed_of_a_host_that_has_another_slow_one():
    measured = readings(8, lambda source, target, turn: {source, target} in ({2, 5}, {3, 5}))
    for turn in range(7, 7 + rounds_to_confirm(8)):
        measured += [BandwidthReading(source, target, 0.3, turn, confirms=True) for source, target in ((2, 5), (5, 2))]
    blamed = Localization(1.0, 0.05, (Suspect("link", (2, 5), 0.3, 0.9999, 14, 14),))
    plan = confirming(blamed, measured, 8)
    assert len(plan) == most_rounds_to_confirm(8) - rounds_to_confirm(8)
    assert all({2, 3}.isdisjoint(pair) for pairs in plan for pair in pairs if 5 in pair)
    alone = [one for one in measured if {*one[:2]} != {3, 5}]
    assert confirming(blamed, alone, 8) == ()


def test_a_pair_that_was_slow_and_is_well_is_no_link_and_its_hosts_meet_others():
    first = readings(8, lambda source, target, turn: {source, target} in ({2, 5}, {3, 5}))
    again = [
        BandwidthReading(source, target, 1.0, 8, confirms=True) for source, target in ((2, 5), (5, 2), (3, 5), (5, 3))
    ]
    plan = planned([*first, *again], 8)
    assert plan
    assert all((2, 5) not in pairs and (3, 5) not in pairs for pairs in plan)
    assert any(5 in pair for pairs in plan for pair in pairs)


def test_so_many_rounds_are_the_end():
    pair = rounds(16)[2][3]
    measured = readings(16, lambda source, target, turn: {source, target} == {*pair})
    end = 7 + rounds_to_confirm(16)
    for turn in range(7, end):
        assert len(planned(measured, 16)) == end - turn
        measured += [
            BandwidthReading(source, target, 0.3, turn, confirms=True) for source, target in (pair, pair[::-1])
        ]
    assert planned(measured, 16) == ()
    (suspect,) = localize(measured, 16).suspects
    assert (suspect.kind, suspect.members) == ("link", pair)
    assert suspect.confidence > 0.9


def test_both_sides_of_a_boundary_are_looked_at():
    inside = {*range(4, 9)}
    within, across = planned(readings(32, lambda source, target, _: (source in inside) != (target in inside)), 32)
    assert within
    assert all({*pair} <= inside for pair in within)
    assert across
    assert all(len({*pair} & inside) == 1 for pair in across)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 40), st.data())
def test_no_host_is_asked_twice_in_a_round(count, data):
    hosts = st.integers(0, count - 1)
    slow = data.draw(st.sets(st.tuples(hosts, hosts)))
    measured = readings(count, lambda source, target, _: (source, target) in slow)
    kinds = st.sampled_from(["host", "sending", "receiving"])
    named = data.draw(st.lists(st.tuples(kinds, hosts, st.floats(0, 1)), max_size=6))
    suspects = tuple(Suspect(kind, (host,), 0.3, sure, 1, 2) for kind, host, sure in named)
    plan = confirming(Localization(1.0, 0.05, suspects), measured, count)
    assert len(plan) <= rounds_to_confirm(count)
    for pairs in plan:
        asked = [host for pair in pairs for host in pair]
        assert len(asked) == len(set(asked))
        assert all(0 <= first < second < count for first, second in pairs)

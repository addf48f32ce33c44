"""Groups against their siblings, and who is to blame where a collective broke."""

import pytest

from doctor.analysis.fabric.group_timings import (
    BrokenCollective,
    culprits_of,
    in_several_groups,
    slow_groups,
    timed_groups,
)
from doctor.facts import CollectiveFacts, CollectiveTiming
from doctor.testing import healthy
from doctor.testing.collective_timings import slow_with, timed_on_mesh, usual_seconds

LIMITS = {"times": 2.0, "least": 0.005, "sigmas": 4.0}


def waits(rank, *awaited):
    return BrokenCollective(rank, "Timed out", awaited)


def breaks(rank, error="Connection refused"):
    return BrokenCollective(rank, error, ())


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ([breaks(0), breaks(1)], (0, 1)),
        ([breaks(2), waits(0, 2), waits(1, 2)], (2,)),
        ([breaks(2), waits(0, 1, 2), waits(1, 0, 2)], (2,)),
        ([breaks(2), breaks(0, "no answer within 46 s"), breaks(1, "no answer within 46 s")], (2,)),
        ([breaks(2, "no answer within 46 s"), waits(0, 2), waits(1, 2)], (2,)),
        ([waits(0, 3), waits(1, 3), waits(2, 3)], (3,)),
        ([waits(2, 3), waits(3, 2), waits(0, 2, 3), waits(1, 2, 3)], (2, 3)),
        ([waits(0, 1), waits(1, 0)], (0, 1)),
        ([], ()),
    ],
)
def test_who_broke_it(broken, expected):
    assert culprits_of(broken) == expected


def test_the_best_of_all_turns_counts_and_the_worst_of_siblings():
    job = timed_on_mesh(slow_with(6, times=9.0, turns=(1,))).job()
    [group] = [one for one in timed_groups(job) if 6 in one.members and one.axis == "tp" and one.bytes > 8]
    assert group.worst > 8 * group.seconds
    assert group.turns == 2
    assert slow_groups(timed_groups(job), **LIMITS) == ()
    restless = timed_on_mesh(lambda axis, group, size, turn: 0.03 if 6 in group else (0.01, 0.02)[turn]).job()
    assert slow_groups(timed_groups(restless), **LIMITS) == (), "its siblings are as slow at times"


def test_a_slow_rank_is_in_a_slow_group_of_each_axis():
    job = timed_on_mesh(slow_with(6)).job()
    slow = slow_groups(timed_groups(job), **LIMITS)
    assert {(one.timed.axis, one.timed.members) for one in slow} == {("dp", (2, 6, 10, 14)), ("tp", (4, 5, 6, 7))}
    assert all(one.siblings == 3 and one.timed.seconds > 3 * one.usual for one in slow)
    assert in_several_groups(slow, job) == (6,)


def test_a_slow_host_is_one_whose_ranks_are():
    def seconds(axis, group, size, turn):
        slow = group in ((1, 5, 9, 13), (0, 1, 2, 3)) if axis == "tp" else group == (2, 6, 10, 14)
        return usual_seconds(axis, group, size, turn) * (5 if slow and size > 8 else 1)

    job = timed_on_mesh(seconds).job()
    slow = slow_groups(timed_groups(job), **LIMITS)
    assert in_several_groups(slow, job) == (2,)
    assert in_several_groups([one for one in slow if one.timed.axis == "dp"], job) == ()


def test_two_groups_have_one_sibling_each():
    job = timed_on_mesh(slow_with(1), hosts=2, per_host=2).job()
    slow = slow_groups(timed_groups(job), **LIMITS)
    assert in_several_groups(slow, job) == (1,)
    assert {one.siblings for one in slow} == {1}


def test_a_rank_alone_and_what_did_not_end_are_no_groups():
    timings = (
        CollectiveTiming("all_reduce", "gloo", 8, 1.0, "local", (0,)),
        CollectiveTiming("all_reduce", "gloo", 8, None, "world", (0, 1), error="Timed out"),
    )
    assert timed_groups(healthy(1, 2).put(CollectiveFacts(timings=timings)).job()) == ()

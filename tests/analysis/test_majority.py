"""Splits, their words, and what goes along with them."""

import sys

import pytest

from doctor.analysis.stats import majority
from doctor.api import correlates, describe, split
from doctor.facts import GpuFacts, HostFacts, MissingReason, SlurmFacts, SoftwareFacts
from doctor.testing import healthy


def _torch(software):
    return software.version("torch")


def _older(old):
    return tuple(type(one)(one.name, "2.7.1") if one.name == "torch" else one for one in old)


def test_one_rank_against_many():
    job = healthy(hosts=2, per_host=4).alter(SoftwareFacts, ranks=(5,), packages=_older).job()
    result = split(job, SoftwareFacts, _torch)
    assert result.common.value == "2.8.0"
    assert [(group.value, group.ranks) for group in result.minorities] == [("2.7.1", (5,))]
    assert not result.even
    assert describe(result) == "ranks 0-4, 6 and 7: 2.8.0; rank 5: 2.7.1"


def test_everybody_alike():
    result = split(healthy(hosts=2).job(), SoftwareFacts, _torch)
    assert result.minorities == ()
    assert describe(result) == "ranks 0-3: 2.8.0"


def test_an_even_split_blames_nobody_alone():
    job = healthy(hosts=2, per_host=2).alter(SoftwareFacts, ranks=(2, 3), packages=_older).job()
    result = split(job, SoftwareFacts, _torch)
    assert result.common is None
    assert result.even
    assert [group.ranks for group in result.minorities] == [(0, 1), (2, 3)]
    assert describe(result) == "ranks 0 and 1: 2.8.0; ranks 2 and 3: 2.7.1", "names tell as much"


def test_of_many_ranks_it_is_said_how_many():
    job = healthy(hosts=5, per_host=2).alter(SoftwareFacts, ranks=(0, 1, 2, 3, 4), packages=_older).job()
    assert describe(split(job, SoftwareFacts, _torch)) == "no majority (5 ranks: 2.7.1; 5 ranks: 2.8.0)"


def test_ranks_behind_what_was_split_and_values_of_several_parts():
    """Seats of the data, say, that two ranks share; a part that is not known is no word."""
    found = majority.split_groups({(1000, None): [0], (1001, 7): [1]})
    assert describe(found, lambda seats: tuple(2 * seat for seat in seats)) == "rank 0: 1000; rank 2: 1001 7"


def test_what_is_absent_is_a_value():
    job = healthy(hosts=3, per_host=1).drop(GpuFacts, hosts=("node1",)).job()
    result = split(job, GpuFacts, lambda gpus: len(gpus.gpus))
    assert [(group.value, group.ranks) for group in result.minorities] == [(None, (1,))]
    assert describe(result) == "ranks 0 and 2: 1; rank 1: none"


@pytest.mark.parametrize("lack", [MissingReason.HIDDEN, MissingReason.FAILED, MissingReason.TIMEOUT])
def test_what_could_not_be_seen_is_no_value(lack):
    job = healthy(hosts=3, per_host=1).drop(GpuFacts, lack, hosts=("node1",)).job()
    result = split(job, GpuFacts, lambda gpus: len(gpus.gpus))
    assert result.common.ranks == (0, 2)
    assert result.minorities == ()


def test_many_values_are_summed_up():
    sketch = healthy(hosts=1, per_host=8)
    for rank in range(1, 8):
        sketch = sketch.alter(SoftwareFacts, ranks=(rank,), python=f"3.11.{rank}")
    result = split(sketch.job(), SoftwareFacts, lambda software: software.python)
    assert describe(result).endswith("; 3 ranks: 3 other values")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((2, 3), ("all on node1",)),
        ((2, 3, 4, 5), ("hosts node1-node2",)),
        ((0, 1, 4, 5), ("hosts node0, node2",)),
        ((1, 3, 5, 7), ("local rank 1 of every host",)),
        ((2,), ()),
        (range(8), ()),
        ((), ()),
        ((99,), ()),
    ],
)
def test_where_the_odd_ranks_sit(ranks, words):
    assert correlates(healthy(hosts=4, per_host=2).job(), ranks) == words


def test_what_the_odd_hosts_share():
    job = (
        healthy(hosts=4, per_host=2)
        .alter(GpuFacts, hosts=("node1", "node3"), driver_version="550.54.15")
        .alter(HostFacts, hosts=("node1", "node3"), image="train:41")
        .put(SlurmFacts(job_id="7", partition="old"), hosts=("node1", "node3"))
        .job()
    )
    assert correlates(job, (2, 3, 6, 7)) == (
        "hosts node1, node3",
        "image train:41",
        "partition old",
        "driver 550.54.15",
    )
    assert correlates(job, (2, 3)) == ("all on node1",)


def test_a_local_rank_on_one_host_tells_nothing():
    assert correlates(healthy(hosts=1, per_host=4).job(), (3,)) == ()


def test_many_scattered_hosts_are_cut_short():
    job = healthy(hosts=20, per_host=1).job()
    assert correlates(job, range(0, 20, 2)) == ("hosts node0, node2, node4, node6 and 6 more",)


def test_work_does_not_grow_with_the_number_of_groups():
    """Every rank its own group: the calls of Python functions stay proportional to the ranks."""

    def calls(hosts):
        job = healthy(hosts=hosts, per_host=8).job()
        count = 0

        def trace(frame, event, _):
            nonlocal count
            count += event == "call" and frame.f_code.co_filename == majority.__file__

        sys.setprofile(trace)
        try:
            for group in split(job, HostFacts, lambda host: host.boot_id).minorities:
                correlates(job, group.ranks)
        finally:
            sys.setprofile(None)
        return count

    assert calls(64) < 5 * calls(16)

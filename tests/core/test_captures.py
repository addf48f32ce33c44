"""What differs between two captures: nothing between two healthy moments, and everything that was changed."""

import msgspec
import pytest

from doctor.core.diff.captures import compare
from doctor.facts import (
    EnvironmentFacts,
    GpuFacts,
    HostFacts,
    InterfaceFacts,
    LaunchFacts,
    Package,
    ProcessFacts,
    RdmaFacts,
    Route,
    SoftwareFacts,
    Variable,
)
from doctor.report.diff import render_difference
from doctor.testing import healthy

BEFORE = healthy(hosts=2, per_host=2, rdma=1)


def each_gpu(**changes):
    return lambda gpus: tuple(msgspec.structs.replace(gpu, **changes) for gpu in gpus)


def one_gpu(index, **changes):
    return lambda gpus: tuple(msgspec.structs.replace(gpu, **changes) if gpu.index == index else gpu for gpu in gpus)


def paths(before, after):
    return {f"{one.section} {one.path}": one.ranks for one in compare(before.job(), after.job())}


def test_the_same_twice_is_no_difference():
    assert compare(BEFORE.job(), BEFORE.job()) == []


def test_what_moves_by_itself_is_no_difference():
    later = (
        BEFORE.alter(HostFacts, ram_available=1 << 30, pids_used=999, clock_error=0.001)
        .alter(ProcessFacts, pid=77)
        .alter(GpuFacts, gpus=each_gpu(memory_used=1 << 30, utilization=99, temperature=80, power=650_000, clock=1200))
        .alter(InterfaceFacts, segments_sent=10**9, segments_retransmitted=17)
    )
    assert compare(BEFORE.job(), later.job()) == []


def test_ranks_with_the_same_difference_are_folded():
    after = BEFORE.alter(SoftwareFacts, python="3.12.1")
    (one,) = compare(BEFORE.job(), after.job())
    assert (one.section, one.path, one.before, one.after, one.ranks) == (
        *("software", "python", "3.11.7", "3.12.1"),
        (0, 1, 2, 3),
    )


@pytest.mark.parametrize("index", [0, 3, 7])
def test_one_gpu_of_many_like_ones(index):
    before = healthy(hosts=1, per_host=8)
    after = before.alter(GpuFacts, gpus=one_gpu(index, remapped_uncorrectable=4))
    assert paths(before, after) == {f"gpus gpus[{index}].remapped_uncorrectable": tuple(range(8))}


def test_items_with_one_name_stay_apart():
    routes = (Route("0.0.0.0/0", "eth0", "10.0.0.1"), Route("0.0.0.0/0", "eth1", "10.1.0.1"))
    before = BEFORE.alter(InterfaceFacts, routes=routes)
    after = BEFORE.alter(InterfaceFacts, routes=(routes[0], Route("0.0.0.0/0", "eth1", "10.1.0.254")))
    assert list(paths(before, after)) == ["interfaces routes[0.0.0.0/0#2].gateway"]
    first = before.alter(InterfaceFacts, routes=(Route("0.0.0.0/0", "eth0", "10.0.0.254"), routes[1]))
    assert list(paths(before, first)) == ["interfaces routes[0.0.0.0/0].gateway"]


def test_an_item_in_front_does_not_shift_the_others():
    added = lambda packages: (Package("aaa", "1.0"), *packages)  # noqa: E731
    after = BEFORE.alter(SoftwareFacts, packages=added)
    assert set(paths(BEFORE, after)) == {"software packages[aaa].name", "software packages[aaa].version"}


def test_what_is_gone_has_nothing_after_it():
    before = BEFORE.alter(EnvironmentFacts, variables=(Variable("NCCL_DEBUG", "INFO"),))
    after = BEFORE.alter(EnvironmentFacts, variables=())
    differences = compare(before.job(), after.job())
    assert {one.path for one in differences} >= {"variables[NCCL_DEBUG].value"}
    assert all(one.after is None for one in differences)


def test_a_section_that_is_gone_is_a_difference():
    assert all(path.startswith("rdma ") for path in paths(BEFORE, BEFORE.drop(RdmaFacts)))


def test_likely_causes_come_first():
    after = BEFORE.alter(SoftwareFacts, python="3.12.1").alter(HostFacts, cpu_governor="powersave", kernel="6.99")
    ranked = [(one.weight, one.path) for one in compare(BEFORE.job(), after.job())]
    assert ranked == [("high", "kernel"), ("high", "python"), ("medium", "cpu_governor")]


def test_ranks_that_only_one_has():
    fewer = BEFORE.only((0, 1, 2))
    (gone,) = [one for one in compare(BEFORE.job(), fewer.job()) if one.section == "job"]
    assert (gone.before, gone.after, gone.ranks, gone.weight) == ("there", None, (3,), "high")
    (new,) = [one for one in compare(fewer.job(), BEFORE.job()) if one.section == "job"]
    assert (new.before, new.after, new.ranks) == (None, "there", (3,))


def test_which_rank_a_process_is_does_not_count():
    assert compare(BEFORE.job(), BEFORE.alter(LaunchFacts, ranks=(1,), local_rank=5).job()) == []


def test_in_words():
    after = BEFORE.alter(SoftwareFacts, ranks=(2,), python="3.12.1 \x1b[31m|")
    differences = compare(BEFORE.job(), after.job())
    text = render_difference(differences, "good.json", "bad.json", "text")
    assert text.startswith("1 difference, from good.json to bad.json\n")
    assert "  software python  (rank 2)\n    - 3.11.7\n    + 3.12.1 \\x1b[31m|\n" in text
    page = render_difference(differences, "a|b", "bad.json", "markdown")
    assert "| likelihood | fact | a\\|b | bad.json | ranks |" in page
    assert "| high | software python | 3.11.7 | 3.12.1 \\x1b[31m\\| | 2 |" in page

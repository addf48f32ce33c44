"""What a job that worked had, and who differs from it."""

import sys

import pytest

from doctor.analysis.stats import baseline
from doctor.analysis.stats.baseline import BaselineDifference, expected_value
from doctor.api import (
    BaselineDeviation,
    BaselineValue,
    baseline_value,
    baseline_values,
    describe,
    split,
    split_groups,
    stands_alone,
)
from doctor.core.job import build_job
from doctor.facts import GpuFacts, HostFacts, MissingReason, SoftwareFacts
from doctor.testing import healthy


def _python(software):
    return software.python


def _on(ranks, python="3.12.1", **shape):
    return healthy(**shape).alter(SoftwareFacts, ranks=ranks, python=python)


def _split(sketch):
    job = sketch.job()
    return split(job, SoftwareFacts, _python, expected=expected_value(job, SoftwareFacts, _python))


def test_the_majority_is_to_blame_where_it_is_not_as_expected():
    found = _split(_on((0, 1, 2), hosts=2).expecting(healthy(1, 1)))
    assert (found.common.value, found.common.ranks) == ("3.11.7", (3,))
    assert [(group.value, group.ranks) for group in found.minorities] == [("3.12.1", (0, 1, 2))]
    assert not found.drifted
    assert describe(found) == "expected 3.11.7 (capture of node0), found ranks 0-2: 3.12.1; rank 3: 3.11.7"


def test_an_even_split_is_decided_and_still_said_to_be_even():
    found = _split(_on((2, 3), hosts=2).expecting(_on((0,), hosts=1, per_host=1)))
    assert not found.even
    assert found.odd == (0, 1)
    assert describe(found) == "expected 3.12.1 (capture of node0), found ranks 0 and 1: 3.11.7; ranks 2 and 3: 3.12.1"


def test_all_are_odd_where_nobody_has_what_is_expected():
    found = _split(healthy(2, 2).expecting(_on((0,), hosts=1, per_host=1)))
    assert (found.common, found.odd, found.drifted) == (None, (0, 1, 2, 3), True)
    mixed = _split(_on((1,), "3.10.1", hosts=2).expecting(_on((0,), hosts=1, per_host=1)))
    assert (mixed.common, mixed.odd, mixed.drifted) == (None, (0, 1, 2, 3), False)
    assert [group.ranks for group in mixed.minorities] == [(0, 2, 3), (1,)]


def test_what_is_not_there_is_a_value_on_both_sides():
    lost = healthy(hosts=2, per_host=1).drop(GpuFacts, hosts=("node1",)).expecting(healthy(1, 1)).job()

    def count(gpus):
        return len(gpus.gpus)

    found = split(lost, GpuFacts, count, expected=expected_value(lost, GpuFacts, count))
    assert [(group.value, group.ranks) for group in found.minorities] == [(None, (1,))]

    def version(software):
        return software.version("deepspeed")

    job = healthy().expecting(healthy()).job()
    assert expected_value(job, SoftwareFacts, version) == BaselineValue(None, "capture of node0")


@pytest.mark.parametrize("lack", MissingReason)
def test_a_section_that_the_capture_lacks_leaves_the_vote(lack):
    job = healthy().expecting(healthy(1, 1).drop(GpuFacts, lack)).job()
    assert expected_value(job, GpuFacts, lambda gpus: len(gpus.gpus)) is None


def test_a_value_that_the_ranks_of_the_capture_disagree_about_leaves_the_vote():
    sketch = _on((0, 1, 2), hosts=2).expecting(_on((1,), hosts=1))
    found = _split(sketch)
    assert (found.expected, found.odd) == (None, (3,))
    told = baseline_values(
        sketch.job(),
        lambda worked: ((name, getattr(one, name)) for one, _ in worked.each(SoftwareFacts) for name in _FIELDS),
    )
    assert {name: one.value for name, one in told.items()} == {"prefix": "/opt/env", "implementation": "CPython"}


_FIELDS = ("python", "prefix", "implementation")


def test_no_expectation():
    assert baseline_value(healthy().job(), lambda worked: ["never asked"]) is None
    job = healthy().job()
    job.expected = build_job([])
    assert expected_value(job, SoftwareFacts, _python) is None


@pytest.mark.parametrize(
    ("hosts", "captured", "words"),
    [
        (1, "2026-11-20T17:03:11+00:00", "capture of node0, 2026-11-20"),
        (2, "2026-11-20T17:03:11+00:00", "capture of node0 and 1 other host, 2026-11-20"),
        (1200, "", "capture of node0 and 1,199 other hosts"),
        (1, "yesterday", "capture of node0"),
        (1, "2026-11-20T\n" * 9, "capture of node0, 2026-11-20"),
    ],
)
def test_the_words_say_where_it_is_from(hosts, captured, words):
    job = healthy().job()
    job.expected = healthy(hosts, 1).job()
    job.expected.captured = captured
    assert expected_value(job, SoftwareFacts, _python).source == words


def test_ranks_that_are_grouped_already():
    found = split_groups({9000: [0, 3], 1500: [1, 2, 4]}, expected=BaselineValue(9000, "capture of a"))
    assert (found.common.ranks, found.odd) == ((0, 3), (1, 2, 4))
    assert found.unlike("MTU", str) == BaselineDifference("MTU", "9000", "1500", "capture of a")
    assert split_groups({9000: [0, 3], 1500: [1, 2, 4]}).odd == (0, 3)
    assert split_groups({}).groups == ()


def test_a_deviation_in_words_and_as_data():
    rows = tuple(BaselineDifference(f"part {number}", "1", "2", "capture of a") for number in range(6))
    told = BaselineDeviation(rows, drifted=False)
    assert told.summary == "part 0: expected 1 (baseline), found 2; part 1: expected 1, found 2; 4 more"
    long = (BaselineDifference("GPU model", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "capture of a"), rows[0])
    assert BaselineDeviation(long, drifted=False).summary == (
        "GPU model: expected NVIDIA A100-SXM4-40GB (baseline), found NVIDIA H100 80GB HBM3; part 0 differs"
    )
    assert told.evidence["expected"] == {f"part {number}": "1" for number in range(6)}
    assert told.evidence["found"] == {f"part {number}": "2" for number in range(6)}
    assert told.evidence["expected_from"] == "capture of a"
    assert (told.effect, told.fix) == ("", "")
    drifted = told._replace(drifted=True)
    assert "doctor capture" in drifted.fix
    assert drifted.effect


@pytest.mark.parametrize(
    ("sketch", "known", "alone"),
    [
        (healthy(1, 1), [None], True),
        (healthy(1, 1), [None, BaselineValue("x", "capture of a")], False),
        (healthy(1, 2), [None], False),
        (healthy(2, 1).only((0,)), [None], False),
        (healthy(2, 1).only((0,), absent=(1,)), [None], False),
    ],
)
def test_who_stands_alone(sketch, known, alone):
    assert stands_alone(sketch.job(), known) is alone


def test_a_job_apart_has_an_expectation_of_its_own():
    job = healthy().expecting(healthy(1, 1)).job()
    apart = job.apart()
    assert apart.expected is not job.expected
    assert apart.expected.ranks[0].find(HostFacts) is job.expected.ranks[0].find(HostFacts)
    assert healthy().job().apart().expected is None


def test_a_large_capture_of_one_image_costs_no_more_than_a_small_one():
    def calls(ranks):
        job = healthy().expecting(healthy(ranks // 8, 8)).job()
        count = 0

        def trace(frame, event, _):
            nonlocal count
            count += event == "call" and frame.f_code.co_filename in (__file__, baseline.__file__)

        sys.setprofile(trace)
        try:
            expected_value(job, SoftwareFacts, _python)
        finally:
            sys.setprofile(None)
        return count

    assert 0 < calls(512) == calls(8)

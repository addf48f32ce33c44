"""The published peaks of real GPUs, their factories, and how an estimate is scored against them."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import estimate_factories
from estimate_published import PublishedError, PublishedResults, covered, half_of, is_good, read_table, summary

from doctor.estimate.memory.non_torch import workspace

TABLE = read_table()


def test_every_figure_has_a_source_with_its_date_and_software():
    assert len(TABLE.cases) >= 60
    assert len({case.name for case in TABLE.cases}) == len(TABLE.cases)
    assert {case.source for case in TABLE.cases} == set(TABLE.sources)
    for source in TABLE.sources.values():
        assert source.url.startswith("https://")
        assert all((source.at, source.gpu, source.software, source.method, workspace(source.capability)))
    for case in TABLE.cases:
        figures = [size for size in (case.allocated, case.reserved, case.process) if size is not None]
        assert figures
        assert figures == sorted(figures)


def test_both_halves_have_figures_of_the_same_and_of_older_software():
    kinds = [(half_of(case, TABLE.sources[case.source]), TABLE.sources[case.source].is_current) for case in TABLE.cases]
    assert min(kinds.count((half, era)) for half in ("tuned", "held") for era in (True, False)) >= 8


def test_every_figure_s_step_has_a_factory():
    for case in TABLE.cases:
        assert callable(getattr(estimate_factories, case.name))
    with pytest.raises(AttributeError):
        _ = estimate_factories.no_such_case


def error(off, half="held", *, is_current=True, metric="allocated"):
    estimate = 1000 + off
    return PublishedError(
        name="one", half=half, is_current=is_current, metric=metric, figure=1000, estimate=estimate,
        low=estimate - 30, high=estimate + 70,
    )  # fmt: skip


def test_the_range_is_scored_by_what_it_holds_and_by_its_width():
    assert covered([error(0), error(-60), error(-80), error(40)]) == (0.5, pytest.approx(0.1, rel=0.1))


@pytest.mark.parametrize(
    ("errors", "good"),
    [
        ([error(0), error(10)], True),
        ([error(0), error(200, half="tuned")], True),
        ([error(0), error(0), error(-60)], False),
        ([error(30), error(30)], False),
        ([error(0)] * 12 + [error(-120, is_current=False)] + [error(0, is_current=False)] * 3, True),
        ([error(0)] * 40 + [error(-120, is_current=False)] * 3 + [error(0, is_current=False)] * 4, False),
        ([error(0, half="tuned")], False),
    ],
)
def test_the_aims_are_those_of_the_half_that_is_held_back(errors, good):
    results = PublishedResults(torch="", errors=tuple(errors))
    assert is_good(results) is good
    assert ("| held |" in summary(results)) == any(one.half == "held" for one in errors)

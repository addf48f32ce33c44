"""A sample of the table in benchmarks/estimate.py: the estimate against what real training steps allocate."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import estimate
from estimate import among, estimates, train
from estimate_cases import CASES
from estimate_results import BELOW, NINETY_FIFTH, Results, Row, is_good, markdown, summary
from estimate_truth import Case, by_trace

from doctor.estimate.data_model import TrainingPlan
from tests.lab.sample import ALL, long_only


def _case(name, **plan):
    return Case(factory=f"tests.estimate.models:{name}", plan=TrainingPlan(**plan), blocks="Block")


SAMPLE = {
    "activations of a GPT": _case("gpt_small", batch_size=2, optimizer="sgd"),
    "states of an optimizer": _case("gpt_untied", batch_size=1, optimizer="adamw", accumulate=2),
    "shards": _case("gpt_small", batch_size=2, strategy="fsdp2", devices=2),
}


LONG = ("states of an optimizer",)


@pytest.fixture(scope="module")
def traced():
    return estimates(tuple(case for name, case in SAMPLE.items() if ALL or name not in LONG), "cpu")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=long_only("test_trace.py compares optimizer states") if name in LONG else ())
        for name in SAMPLE
    ],
)
def test_estimate_and_truth(name, traced):
    case = SAMPLE[name]
    estimated, truth = traced[case.name], train(case, "cpu")
    off = estimated.parts.allocated / truth.peak - 1
    assert off >= -BELOW
    assert not estimated.bound, "only what depends on the data is a bound"
    assert off <= NINETY_FIFTH
    assert estimated.moment == truth.moment


def test_experts_by_the_benchmark(capsys):
    """A part of the table that it prints; what is kept stays as it is."""
    kept = estimate.path_for("cpu")
    before = kept.read_bytes()
    assert estimate.main(["--part"]) == 0
    row, sums = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"moe +([\d.]+) MiB  estimate +([\d.]+) .* s  (nonzero .*)", row)
    truth, estimated, bound = found.groups()
    assert float(estimated) / float(truth) - 1 >= -BELOW
    assert "data-dependent" in bound, "what depends on the data is a bound"
    assert re.fullmatch(r"1 configurations: lowest against the truth \S+ % \(moe; aim -5%\); 1 bounds, 0 failed", sums)
    assert kept.read_bytes() == before


def test_the_table_has_all_kinds_of_training():
    assert len({case.name for case in CASES}) == len(CASES) >= 24
    assert len({case.factory for case in CASES}) >= 10
    plans = [case.plan for case in CASES]
    assert {"none", "ddp", "fsdp2"} == {plan.strategy for plan in plans}
    assert any(plan.checkpointing for plan in plans)
    assert any(plan.accumulate > 1 for plan in plans)
    assert len({plan.precision for plan in plans}) >= 3


def test_the_truth_is_the_largest_total_once_steps_have_begun():
    def memory(total, at, device=0):
        return {"name": "[memory]", "ts": at, "args": {"Total Allocated": total, "Device Type": device}}

    phases = [{"name": "doctor: steps", "ts": 10, "dur": 90}, {"name": "backward", "ts": 30, "dur": 20}]
    events = [*phases, memory(900, 5), memory(400, 15), memory(700, 40), memory(9999, 41, device=1), memory(300, 60)]
    truth = by_trace(events)
    assert (truth.peak, truth.moment, truth.settled) == (700, "backward", 300)


def _results(*offs):
    rows = tuple(Row(name=f"row {place}", truth=1000, estimate=1000 + off) for place, off in enumerate(offs))
    return Results(machine="a machine", torch="2.13", compared="two numbers", rows=rows)


@pytest.mark.parametrize(
    ("offs", "good"),
    [
        ((0, 10, -20, 30, 20), True),
        ((0, 10, -51), False),
        ((40, 50, 60), False),
        ((0, 10, 20, 300), False),
    ],
)
def test_the_aims(offs, good):
    assert is_good(_results(*offs)) is good


def _named(machine, **truths):
    places = {"first": CASES[0].name, "second": CASES[1].name, "third": CASES[2].name}
    rows = tuple(Row(name=places[name], truth=truth, estimate=truth) for name, truth in truths.items())
    return Results(machine=machine, torch="", compared="", rows=rows)


def test_rows_that_are_run_again_take_the_places_of_those_that_were_kept():
    kept, new = _named("a machine", first=1, second=2), _named("a machine", third=30, second=20)
    assert [row.truth for row in among(kept, new).rows] == [1, 20, 30]
    assert [row.truth for row in among(None, new).rows] == [20, 30]
    assert [row.truth for row in among(_named("another", first=1), new).rows] == [20, 30]


def test_a_row_that_failed_is_no_success_and_is_shown():
    results = _results(0, 10)
    failed = Results(machine="", torch="", compared="", rows=(*results.rows, Row(name="broken", error="no answer")))
    assert not is_good(failed)
    assert "1 failed" in summary(failed)
    assert "| broken | | | no answer | |" in markdown(failed)

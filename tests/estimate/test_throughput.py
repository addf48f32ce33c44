"""What is measured of several ranks on one device: real processes with a tiny model, and how numbers are judged."""

import time
from pathlib import Path

import pytest

from tests.lab.sample import long_only
from tests.lab.speed import patience

pytest.importorskip("torch")

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.measure import throughput
from doctor.estimate.measure.throughput import (
    LATE,
    RankMeasurement,
    TrainingVariant,
    measure,
    run,
    throughput_of,
    variants_of,
)

ROOT = Path(__file__).parents[2]
TINY = "tests.estimate.models:resnet_tiny"
ALONE = TrainingVariant(name="one rank", plan=TrainingPlan())


def _told(rate, *, peak=100, size=4, seconds=2.0):
    return RankMeasurement(samples=int(rate * seconds), seconds=seconds, peak_bytes=peak, batch_size=size, device="CPU")


def test_all_ways_train_on_as_many_samples_a_step():
    plan = TrainingPlan(strategy="fsdp2", devices=4, nodes=2, accumulate=3, ranks_per_device=5, optimizer="sgd")
    ways = variants_of(plan)
    assert ways[0].name == "one rank"
    assert {way.ranks * way.copies * way.plan.accumulate for way in ways[1:]} == {15}
    assert {way.plan.optimizer for way in ways} == {"sgd"}
    assert [way.plan.world_size for way in ways] == [way.ranks for way in ways]


def test_two_ranks_are_measured_where_no_number_is_asked_for():
    assert [way.ranks for way in variants_of(TrainingPlan())] == [1, 2, 1, 1, 1]


def test_mixed_precision_is_no_way_out_where_it_is_there():
    assert "bf16-mixed" in variants_of(TrainingPlan())[-1].name
    for precision in ("bf16-mixed", "16-true"):
        assert {way.plan.precision for way in variants_of(TrainingPlan(precision=precision))} == {precision}


@pytest.mark.parametrize("place", [1, pytest.param(4, marks=long_only("two ranks in single precision are run"))])
def test_a_real_run(place, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    way = variants_of(TrainingPlan(batch_size=2, accumulate=2))[place]
    told = run(way, TINY, ROOT, 100)
    assert [one.error for one in told] == [""] * way.ranks
    assert {one.batch_size for one in told} == {2 * way.copies}
    assert all(one.samples >= 3 * 2 * way.copies * way.plan.accumulate and one.seconds > 0 for one in told)
    assert all(50 << 20 < one.peak_bytes < 4 << 30 for one in told), "a process with torch"


def test_a_factory_that_fails_is_told_in_one_sentence(tmp_path):
    (tmp_path / "broken.py").write_text(
        "def make():\n    print('about to fail')\n    raise ValueError('no such data')\n"
    )
    with pytest.raises(UnusableError, match=r"^broken.py:make: the factory raised ValueError: no such data"):
        measure("broken.py:make", TrainingPlan(), directory=tmp_path, seconds=patience(60))


def test_a_factory_that_never_returns_is_given_up(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef make():\n    time.sleep(86400)\n")
    with pytest.raises(UnusableError, match=LATE):
        measure("slow.py:make", TrainingPlan(), directory=tmp_path, seconds=2)


def test_a_rank_that_fails_does_not_keep_the_others_waiting(tmp_path):
    (tmp_path / "one.py").write_text(
        "import os, torch\n"
        "def make():\n"
        "    if torch.distributed.get_rank() == 1: raise ValueError('only here')\n"
        "    return torch.nn.Linear(4, 1), torch.ones(2, 4)\n"
    )
    told = run(variants_of(TrainingPlan())[1], "one.py:make", tmp_path, 3600)
    assert (
        "only here"
        in throughput_of(
            variants_of(TrainingPlan())[1],
            ALONE,
            [{"one rank": (_told(1),), variants_of(TrainingPlan())[1].name: told}],
        ).error
    )


def test_ratios_are_taken_within_a_round():
    way = TrainingVariant(name="two", plan=TrainingPlan(ranks_per_device=2), ranks=2)
    rounds = [
        {"one rank": (_told(10),), "two": (_told(7), _told(8))},
        {"one rank": (_told(20),), "two": (_told(15), _told(15, peak=150))},
        {"one rank": (_told(30),), "two": (_told(24), _told(24))},
    ]
    measured = throughput_of(way, ALONE, rounds)
    assert (measured.samples_per_second, measured.ratio, measured.device) == (30, 1.5, "CPU")
    assert measured.spread == pytest.approx(0.05)
    assert measured.peak_bytes == 250, "both ranks"
    assert measured.plan.batch_size == 4
    assert throughput_of(ALONE, ALONE, rounds).ratio == 1


def test_of_one_round_the_stretches_within_it_tell_the_spread():
    way = TrainingVariant(name="two", plan=TrainingPlan(), ranks=2)
    shaky = RankMeasurement(samples=20, seconds=2.0, unsteady=0.1)
    only = [{"one rank": (RankMeasurement(samples=20, seconds=2.0, unsteady=0.05),), "two": (_told(10), shaky)}]
    measured = throughput_of(way, ALONE, only)
    assert (measured.ratio, measured.spread) == (2, pytest.approx(0.3))
    assert throughput_of(ALONE, ALONE, only).spread == 0
    steady = [{"one rank": (_told(10),), "two": (_told(10), _told(10))}] * 2
    assert throughput_of(way, ALONE, steady).spread == 0, "rounds tell more than what is within them"


def test_the_slowest_rank_is_the_speed_of_all():
    way = TrainingVariant(name="two", plan=TrainingPlan(), ranks=2)
    told = (RankMeasurement(samples=10, seconds=1.0), RankMeasurement(samples=10, seconds=2.0))
    assert throughput_of(way, ALONE, [{"two": told, "one rank": (_told(5),)}]).samples_per_second == 10


def test_what_got_no_turn_says_so():
    measured = throughput_of(TrainingVariant(name="two", plan=TrainingPlan()), ALONE, [{"one rank": (_told(10),)}])
    assert (measured.error, measured.ratio) == ("no time was left for it", None)


def _measured_with(monkeypatch, answer, seconds=60.0):
    asked = []

    def fake(way, factory, directory, left):
        asked.append(way.name)
        return answer(way, len(asked))

    monkeypatch.setattr(throughput, "run", fake)
    return measure(TINY, TrainingPlan(), directory=ROOT, seconds=seconds), asked


def test_ways_take_turns_and_every_second_round_goes_back(monkeypatch):
    measured, asked = _measured_with(monkeypatch, lambda way, _: tuple(_told(10) for _ in range(way.ranks)))
    names = [way.name for way in variants_of(TrainingPlan())]
    assert asked == [*names, *reversed(names), *names]
    assert [one.name for one in measured] == names
    assert [one.ratio for one in measured] == [1, 2, 1, 1, 1]


def test_a_way_that_fails_is_not_tried_again_and_the_others_are(monkeypatch):
    def answer(way, _):
        return (
            (RankMeasurement(error="CUDA out of memory"),)
            if way.copies > 1
            else tuple(_told(10) for _ in range(way.ranks))
        )

    measured, asked = _measured_with(monkeypatch, answer)
    failed = [one.name for one in measured if one.error == "CUDA out of memory"]
    assert len(failed) == 2
    assert all(asked.count(name) == (1 if name in failed else 3) for name in asked)


def test_when_the_time_is_over_what_was_measured_is_kept(monkeypatch):
    def answer(way, number):
        time.sleep(0.2 if number < 3 else 0)
        return tuple(_told(10) for _ in range(way.ranks))

    measured, asked = _measured_with(monkeypatch, answer, seconds=0.35)
    assert asked == [way.name for way in variants_of(TrainingPlan())][:2]
    assert [bool(one.error) for one in measured] == [False, False, True, True, True]

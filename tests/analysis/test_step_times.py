"""What steps take, over windows that several ranks have in common."""

import pytest

from doctor.analysis.stats.rank_roles import replicas_in, same_role, uses_lightning
from doctor.analysis.stats.step_times import (
    common_windows,
    long_time,
    milliseconds,
    parts_of,
    recent_windows,
    time_range,
    typical_parts,
    typical_total,
)
from doctor.core.facts import ModelFacts, StepFacts, TrainingFacts, Window
from doctor.testing.loader_cases import in_a_loop
from doctor.testing.training_run import running


def windows(count, first=0, total=0.5, **parts):
    return StepFacts(windows=tuple(Window(first + 20 * place, 20, total, **parts) for place in range(count)))


def test_the_newest_windows_that_last_long_enough():
    assert [window.first_step for window in recent_windows(windows(9), 3, 5.0)] == [120, 140, 160]
    assert [window.first_step for window in recent_windows(windows(9), 3, 35.0)] == [100, 120, 140, 160]


def test_too_few_windows_or_too_short_ones_are_none():
    assert recent_windows(windows(2), 3, 5.0) == ()
    assert recent_windows(windows(9, total=0.01), 3, 5.0) == ()
    assert recent_windows(StepFacts(), 3, 5.0) == ()


def test_collectives_are_a_part_of_the_backward_pass():
    (window,) = windows(1, data=0.1, backward=0.3).windows
    assert parts_of(window) == {"data": 0.1, "forward": 0.0, "backward": 0.3, "optimizer": 0.0, "other": 0.0}


def test_medians_over_windows():
    seen = (*windows(2, data=0.1).windows, *windows(1, data=0.9, total=2.0).windows)
    assert typical_parts(seen)["data"] == 0.1
    assert typical_total(seen) == 0.5


def test_ranks_are_compared_over_the_windows_that_all_have():
    job = running(1, 3).put(windows(6)).put(windows(6, first=40), ranks=(1,)).put(StepFacts(), ranks=(2,)).job()
    steps, own = common_windows(job.ranks, 3, 5.0)
    assert steps == (60, 80, 100)
    assert set(own) == {0, 1}
    assert own[1][60].first_step == 60


def test_ranks_without_a_window_in_common():
    job = running(1, 2).put(windows(3)).put(windows(3, first=400), ranks=(1,)).job()
    assert common_windows(job.ranks, 3, 5.0)[0] == ()


def test_stages_of_a_pipeline_have_other_roles():
    job = running(1, 4).alter(ModelFacts, ranks=(2, 3), digest="second").job()
    assert [[rank.number for rank in role] for role in same_role(job)] == [[0, 1], [2, 3]]
    job = running(1, 2).alter(TrainingFacts, ranks=(1,), device="cpu").job()
    assert same_role(job) == ()


def test_who_trains_one_model():
    def numbers(sketch):
        return [[rank.number for rank in replicas] for replicas in replicas_in(sketch.job())]

    assert numbers(running(2, 2)) == [[0, 1, 2, 3]]
    assert numbers(running(2, 2).alter(TrainingFacts, data_parallel_size=2)) == []
    assert numbers(in_a_loop(running(2, 2), (0, 2), (1, 3))) == [[0, 2], [1, 3]]
    assert numbers(in_a_loop(running(2, 2), (0, 2), (1,))) == [[0, 2]]
    assert numbers(in_a_loop(running(2, 2))) == []


@pytest.mark.parametrize(
    ("framework", "is_lightning"),
    [("lightning", True), ("pytorch_lightning", True), ("transformers", False), ("plain", False)],
)
def test_words_of_lightning_are_for_its_users(framework, is_lightning):
    assert uses_lightning(running(1, 2).alter(TrainingFacts, framework=framework).job()) is is_lightning


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0004, "0.4 ms"), (0.0099999, "10 ms"), (0.12, "120 ms"), (2.45, "2.5 s")],
)
def test_times_within_a_step(seconds, words):
    assert milliseconds(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 s"), (1500, "25 min"), (12_100, "3 h 20 min"), (7200 * 5, "10 h"), (400_000, "5 days")],
)
def test_times_to_come(seconds, words):
    assert long_time(seconds) == words


def test_an_interval_is_told_where_its_ends_read_differently():
    assert time_range(1500, 3000) == " (25 min to 50 min)"
    assert time_range(12_000, 12_010) == ""

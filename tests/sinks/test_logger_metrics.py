import pytest

from doctor.api import Finding, Severity
from doctor.core.facts import Window
from doctor.facts import ProgressFacts, RunMemoryFacts, StepFacts
from doctor.monitor.sinks.logger_metrics import METRICS, metrics
from doctor.testing import running
from doctor.testing.cases import GIB
from tests.sinks.reports import SLOW, report_of, result_of


def measured(sketch, *checks):
    return metrics(sketch.job(), report_of(*checks, sketch=sketch))


def step(rank, **changes):
    values = {"total": 0.4, "data": 0.02, "forward": 0.1, "backward": 0.25, "optimizer": 0.02, **changes}
    return StepFacts(windows=(Window(0, 20, 9.9), Window(20, 20, **values))), rank


def with_steps(sketch, *steps):
    for section, rank in steps:
        sketch = sketch.put(section, ranks=(rank,))
    return sketch


def test_a_job_on_devices_shows_all_of_them():
    assert set(measured(running(2, 2))) == set(METRICS)


def test_without_devices_their_memory_is_left_out():
    names = set(METRICS) - {"doctor/memory_reserved_max_bytes", "doctor/memory_skew"}
    assert set(measured(running(1, 2, gpus=0))) == names


def test_a_single_rank_is_not_compared():
    alone = set(measured(running(1, 1)))
    assert set(METRICS) - alone == {"doctor/slowest_rank", "doctor/slowest_rank_excess", "doctor/memory_skew"}


def test_the_newest_window_counts():
    assert measured(running(1, 2))["doctor/step_seconds"] == 0.4


def test_the_slowest_rank_is_the_one_that_waits_least_for_the_others():
    """All steps take 0.4 s, because the others wait for rank 1 inside backward."""
    sketch = with_steps(running(1, 3), step(0), step(1, forward=0.3, backward=0.05), step(2))
    values = measured(sketch)
    assert values["doctor/slowest_rank"] == 1.0
    assert values["doctor/slowest_rank_excess"] == pytest.approx(0.5)


def test_the_share_of_waiting_for_data_is_that_of_the_worst_rank():
    sketch = with_steps(running(1, 2), step(0), step(1, data=0.3))
    assert measured(sketch)["doctor/data_wait_share"] == pytest.approx(0.75)


def test_memory_of_the_fullest_rank_and_how_far_it_is_from_the_others():
    sketch = running(1, 4).alter(RunMemoryFacts, ranks=(2,), reserved=45 * GIB)
    values = measured(sketch)
    assert values["doctor/memory_reserved_max_bytes"] == 45 * GIB
    assert values["doctor/memory_skew"] == 0.5


def test_who_stands_still():
    sketch = running(1, 4).alter(ProgressFacts, ranks=(1,), state="stalled", idle=31.0)
    sketch = sketch.alter(ProgressFacts, ranks=(2,), state="gone", idle=None)
    sketch = sketch.alter(ProgressFacts, ranks=(3,), state="ended")
    values = measured(sketch)
    assert values["doctor/ranks_stalled"] == 2.0
    assert values["doctor/seconds_since_progress"] == 31.0


def test_findings_that_stand_are_counted_by_severity():
    values = measured(
        running(1, 2),
        result_of("RUN003", "slow", SLOW, Finding("another"), severity=Severity.WARNING),
        result_of("RUN001", "stalled", Finding("stands")),
    )
    assert (values["doctor/findings_error"], values["doctor/findings_warning"]) == (1.0, 2.0)


def test_a_job_of_which_nothing_is_known_has_findings_alone():
    from doctor.testing import healthy

    assert set(measured(healthy(1, 2))) == {"doctor/findings_error", "doctor/findings_warning", "doctor/ranks_stalled"}

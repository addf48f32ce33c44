"""Which devices are slow, by several measurements."""

from __future__ import annotations

import pytest

from doctor.analysis.device_speed import compare_devices
from doctor.facts import DeviceSpeed, DeviceSpeedFacts
from doctor.testing import JobBuilder, healthy

USUAL = 0.001


def job(*times: tuple[float, ...], ranks: int = 5, kind: str = "CPU"):
    """Ranks of which the first ones took ``times``, one in each measurement; the others are as usual."""
    sketch: JobBuilder = healthy(ranks, 1, gpus=0)
    most = max(map(len, times))
    for rank in range(ranks):
        own = times[rank] if rank < len(times) else (USUAL * (1 + 0.01 * rank),) * most
        samples = tuple(
            DeviceSpeed("cpu", kind, "float32", 256, seconds, 100 + turn, confirms=turn > 0)
            for turn, seconds in enumerate(own)
        )
        sketch = sketch.put(DeviceSpeedFacts(samples=samples), ranks=(rank,))
    return sketch.job()


@pytest.mark.parametrize(
    ("seconds", "slow", "unconfirmed"),
    [
        ((0.003, 0.003), (0,), ()),
        ((0.003, 0.003, 0.003), (0,), ()),
        ((0.003, 0.001), (), ()),
        ((0.003, 0.003, 0.001), (), ()),
        ((0.003, 0.001, 0.003), (), ()),
        ((0.001, 0.003, 0.003), (), ()),
        ((0.003,), (), (0,)),
        ((0.0015, 0.0015), (), ()),
    ],
)
def test_slow_each_time(seconds: tuple[float, ...], slow: tuple[int, ...], unconfirmed: tuple[int, ...]) -> None:
    judged = compare_devices(job(seconds))
    assert (tuple(one.rank for one in judged.slow), judged.unconfirmed) == (slow, unconfirmed)


def test_what_the_last_turn_could_not_measure_was_slow_twice() -> None:
    judged = compare_devices(job((0.003, 0.003), (USUAL,) * 3))
    assert [one.rank for one in judged.slow] == [0]
    assert judged.slow[0].usual == pytest.approx(2 * 256**3 / USUAL, rel=0.05)


def test_peers_that_lie_far_apart_have_no_outlier() -> None:
    times = [(seconds, seconds) for seconds in (0.001, 0.0015, 0.0022, 0.0033, 0.005)]
    assert compare_devices(job(*times)).slow == ()


def test_far_below_peers_of_which_one_is_half_as_fast_as_the_other() -> None:
    """As on a busy machine: a difference of speeds can't be larger than their median."""
    times = [(seconds, seconds) for seconds in (0.001, 0.0015, 0.013)]
    judged = compare_devices(job(*times, ranks=3))
    assert [(one.rank, round(one.value / one.usual, 2)) for one in judged.slow] == [(2, 0.09)]
    assert compare_devices(job(*times[:2], (0.0026, 0.0026), ranks=3)).slow == ()


def test_two_of_eight_are_slow() -> None:
    judged = compare_devices(job((0.004, 0.004), (0.004, 0.004), ranks=8))
    assert [one.rank for one in judged.slow] == [0, 1]


def test_two_are_too_few() -> None:
    judged = compare_devices(job((0.004, 0.004), ranks=2))
    assert (judged.slow, judged.alone, judged.compared) == ((), (0, 1), 0)

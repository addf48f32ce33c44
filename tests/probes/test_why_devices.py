"""A slow device that is tried on other processors, or another device in its place."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

from doctor.collectors.base import Machine
from doctor.facts import DeviceSpeed, DeviceSpeedFacts, GpuFacts, TrialFacts
from doctor.probes.ablation import device_trials
from doctor.probes.ablation.device_trials import DeviceOrder, free_processors, times_of, try_device
from doctor.probes.ablation.experiments import trial_requests
from doctor.probes.ablation.stage import WhyStage
from doctor.probes.base import ProbeContext
from doctor.probes.devices.device_worker import DeviceTask
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.testing import healthy
from doctor.testing.cases import JobBuilder
from tests.probes.staged import staged

STAT = """cpu  100 0 100 4000 0 0 0 0 0 0
cpu0 {0} 0 0 {1} 0 0 0 0 0 0
cpu1 {2} 0 0 {3} 0 0 0 0 0 0
cpu2 {4} 0 0 {5} 0 0 0 0 0 0
intr 12 34
"""


def looks(*busy: float) -> tuple:
    """Two looks between which the processors were busy for such shares of 100 ticks."""
    before = times_of(STAT.format(*[1000] * 6))
    ticks = [ticks for share in busy for ticks in (1000 + int(share * 100), 1000 + int(100 - share * 100))]
    return before, times_of(STAT.format(*ticks))


@pytest.mark.parametrize(
    ("pinned", "busy", "free"),
    [
        ((0,), (1.0, 0.0, 0.1), (1,)),
        ((0,), (1.0, 0.9, 0.1), (2,)),
        ((0, 1), (1.0, 1.0, 0.1), (2,)),
        ((0,), (0.0, 0.9, 0.9), ()),
        ((0, 1, 2), (1.0, 0.0, 0.0), (1, 2)),
        ((), (1.0, 0.0, 0.0), (1, 2)),
    ],
)
def test_free_processors_other_than_the_own(pinned, busy, free):
    assert free_processors(pinned, *looks(*busy)) == free


def test_a_stat_that_can_not_be_read_has_no_processors():
    assert free_processors((0,), times_of(""), times_of("")) == ()


class FakeChild:
    """Computes as fast as its processors or its device let it."""

    def __init__(self, environ, changes=None, processors=()):
        self._fast = bool(processors) or (changes or {}).get("CUDA_VISIBLE_DEVICES") == "1"

    def ask(self, work, argument, kind, seconds):
        assert (work, kind) == ("device", DeviceSpeed)
        return DeviceSpeed("cpu", size=256, seconds=0.001 if self._fast else 0.01, to_device=5e10)

    def close(self):
        pass


@pytest.fixture
def children(monkeypatch):
    monkeypatch.setattr(device_trials, "TorchChild", FakeChild)
    monkeypatch.setattr(device_trials, "LOOK_SECONDS", 0.0)


USUAL = 2 * 256**3 / 0.001


def bench() -> ProbeContext:
    return ProbeContext(0, None, Machine())


def test_processors_near_the_gpu_and_another_device(children):
    order = DeviceOrder("product", USUAL, DeviceTask(0), 3, near=(4, 5, 6, 9), other=1, on_gpu=True)
    near, other = try_device(order, bench(), ProbeDeadline(5))
    assert near.setting == "taskset -c 4-6,9 <command>  # for rank 3"
    assert near.restores
    assert other.restores
    assert (near.before, near.after, near.unit) == (USUAL / 10, USUAL, "FLOP/s")


def test_what_is_as_fast_as_usual_by_now_is_mended_by_nothing(children):
    order = DeviceOrder("to_device", 5e10, DeviceTask(0), 3, near=(4,), on_gpu=True)
    [trial] = try_device(order, bench(), ProbeDeadline(5))
    assert (trial.knob, trial.restores, trial.unit) == ("nothing changed", False, "B/s")


def test_nothing_to_change_is_told(children):
    [trial] = try_device(DeviceOrder("product", USUAL, DeviceTask(0), 3, on_gpu=True), bench(), ProbeDeadline(5))
    assert (trial.knob, trial.restores) == ("not tried", False)
    assert trial.error


def measured(odd: int, **changes: object) -> JobBuilder:
    sketch = healthy(1, 4)
    for rank in range(4):
        sample = DeviceSpeed(f"cuda:{rank}", "H100", "bfloat16", 8192, seconds=0.0015 * (1 + 0.01 * rank))
        if rank == odd:
            sample = DeviceSpeed(f"cuda:{rank}", "H100", "bfloat16", 8192, **{"seconds": 0.006, **changes})
        again = DeviceSpeed(**{**{name: getattr(sample, name) for name in sample.__struct_fields__}, "confirms": True})
        sketch = sketch.put(DeviceSpeedFacts(samples=(sample, again)), ranks=(rank,))
    return sketch


def test_a_slow_device_is_a_question_and_the_rank_tries(children):
    sketch = measured(2)
    [question] = trial_requests(sketch.job())
    assert (question.subject, question.ranks, question.what) == ("device", (2,), "product")
    gpus = sketch.job().hosts[0].find(GpuFacts)
    assert len(gpus.gpus) == 4
    found = staged(sketch.members, [WhyStage() for _ in range(4)], dict(os.environ))
    assert [orders.by_token.keys() for orders in found.orders] == [{"2"}]
    assert [rank.number for rank in found.job.ranks if rank.find(TrialFacts)] == [2]


def test_a_rank_that_is_not_here_tries_nothing(children):
    sketch = measured(2)
    rest = replace(sketch, members=tuple(member for member in sketch.members if member.rank != 2))
    assert staged(rest.members, [WhyStage() for _ in range(3)], dict(os.environ)).orders == []

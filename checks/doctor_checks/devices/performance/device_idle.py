"""GPU020: a GPU is mostly idle and has free memory."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import msgspec

from doctor.analysis.stats.step_times import typical_parts, typical_total
from doctor.analysis.visible_devices import VisibleDevice, devices_of, mebibytes
from doctor.api import Finding, Job, Rank, Severity, Skip, Unknown, Verdict, check
from doctor.facts import GpuFacts, MissingReason, RunMemoryFacts, StepFacts, TrainingFacts, Window
from doctor.testing import Fails, JobBuilder, Passes, running

GIB = 1 << 30


def _busy(*percent: int, allocated: int = 4, peak: int = 12) -> JobBuilder:
    return running(1, 2).alter(
        RunMemoryFacts,
        utilization=percent,
        allocated=allocated * GIB,
        peak_allocated=peak * GIB,
        peak_reserved=(peak + 2) * GIB,
    )


def _snapshot(percent: int, used: int) -> JobBuilder:
    sketch = _busy()
    for index in range(2):
        sketch = sketch.gpu(index, utilization=percent, memory_used=used * GIB)
    return sketch


@check(
    id="GPU020",
    severity=Severity.INFO,
    when="R",
    needs=(RunMemoryFacts,),
    cases=lambda: (
        Passes("busy nearly all the time", _busy(97, 95, 99, 96)),
        Passes("a run on the CPU", running(1, 2, gpus=0)),
        Passes("not busy, and full", _busy(20, 30, 25, 22, allocated=40, peak=70)),
        Passes("not busy in one look of four", _busy(95, 5, 97, 96)),
        Passes("asked before training began", _snapshot(0, used=1)),
        Passes(
            "waiting for data, which a larger batch does not help",
            _busy(20, 30, 25).put(StepFacts(windows=(Window(0, 20, 0.4, data=0.25),) * 4)),
        ),
        Fails("hardly ever busy, and mostly empty", _busy(20, 30, 25, 22), ranks=(0, 1), severity=Severity.INFO),
        Fails("seen once", _snapshot(12, used=14), ranks=(0, 1), severity=Severity.INFO),
    ),
)
def device_idle(
    job: Job, *, busy_share: float = 0.4, memory_share: float = 0.5, waiting_share: float = 0.25
) -> Iterator[Verdict]:
    """Ask whether GPUs are mostly idle and have enough free memory for a larger batch.

    Why it hurts: the same work could be done in less time or on fewer GPUs.
    Fix: Use a larger batch and adjust the learning rate, or accumulate fewer batches.
    """
    # Below 40 %, the GPU runs no kernel for long periods. With half of the memory free, a batch twice as large fits.
    # RUN005 reports ranks that wait for data.
    devices = devices_of(job)
    looks = [(rank, memory) for rank in job.ranks if (memory := rank.find(RunMemoryFacts)) and memory.total]
    if not looks:
        yield Skip("no rank trains on a GPU")
    seen = [(rank, memory, _readings(memory, devices[rank])) for rank, memory in looks]
    if unseen := tuple(rank.number for rank, _, readings in seen if readings is None):
        yield Unknown("the utilization of the GPU is not available", unseen, _unhide(job))
    if looks and not any(readings for _, _, readings in seen):
        yield Skip("no GPU utilization was read since training began")
    idle = [
        one
        for rank, memory, readings in seen
        if readings and median(readings) < 100 * busy_share and not _waits(rank, waiting_share)
        for one in _with_room(rank, memory, readings, memory_share)
    ]
    if idle:
        yield _finding(idle)


class _Idle(msgspec.Struct, frozen=True):
    """``times``: the factor by which the batch could grow."""

    rank: Rank
    memory: RunMemoryFacts
    busy: float
    looks: int
    times: int


def _readings(memory: RunMemoryFacts, device: VisibleDevice | None) -> tuple[int, ...] | None:
    """Percentages; empty if utilization was read before training had allocated its memory."""
    if memory.utilization:
        return memory.utilization
    gpu = device.gpu if device else None
    if gpu is None or gpu.utilization is None:
        return None
    return (gpu.utilization,) if (gpu.memory_used or 0) >= (memory.allocated or 0) else ()


def _waits(rank: Rank, share: float) -> bool:
    steps = rank.find(StepFacts)
    if steps is None or not steps.windows:
        return False
    return typical_parts(steps.windows)["data"] > share * typical_total(steps.windows)


def _with_room(rank: Rank, memory: RunMemoryFacts, readings: tuple[int, ...], share: float) -> Iterator[_Idle]:
    """Ranks with free memory: parameters and optimizer state stay constant, the rest of the peak grows with the
    batch."""
    total, peak, kept = memory.total or 1, memory.peak_allocated, memory.allocated
    if peak is None or kept is None or peak + (memory.foreign or 0) >= share * total:
        return
    room = 0.9 * total - (memory.foreign or 0) - kept
    times = int(room / (peak - kept)) if peak > kept else 1
    yield _Idle(rank, memory, median(readings), len(readings), max(1, times))


def _finding(idle: list[_Idle]) -> Finding:
    worst = max(idle, key=lambda one: one.busy)
    left = (worst.memory.total or 0) - (worst.memory.foreign or 0) - (worst.memory.peak_allocated or 0)
    who = "The GPU is" if len(idle) == 1 else f"{len(idle)} GPUs are"
    training = worst.rank.find(TrainingFacts)
    times = f" (about {worst.times} times as large fits)" if worst.times > 1 else ""
    words = [f"a larger `batch_size` in the DataLoader{times}"]
    if training and training.accumulate > 1:
        words.append(f"accumulation over fewer than {training.accumulate} batches")
    return Finding(
        f"{who} busy at most {worst.busy:.0f}% of the time, with {mebibytes(left)} of "
        f"{mebibytes(worst.memory.total)} free",
        ranks=tuple(one.rank.number for one in idle),
        evidence={
            "busy_percent_by_rank": {str(one.rank.number): one.busy for one in idle[:16]},
            "readings": worst.looks,
            "peak_allocated_bytes": worst.memory.peak_allocated,
            "kept_bytes": worst.memory.allocated,
            "outside_the_allocators_bytes": worst.memory.foreign,
            "memory_total_bytes": worst.memory.total,
            "batch_could_be_times": worst.times,
        },
        fix=f"Use {', or '.join(words)}.",
        confidence=0.8 if worst.looks > 2 else 0.5,
    )


def _unhide(job: Job) -> str:
    missing = next((one for rank in job.ranks if (one := rank.missing(GpuFacts))), None)
    return "nvidia-smi dmon -s u" if missing is None or missing.lack is MissingReason.ABSENT else missing.unhide

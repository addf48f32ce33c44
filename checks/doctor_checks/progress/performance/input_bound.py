"""RUN005: ranks wait for data."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from statistics import median

import msgspec

from doctor.analysis.stats.step_times import milliseconds, recent_windows, typical_parts, typical_total
from doctor.api import Finding, Job, Rank, Severity, Skip, Verdict, check, ranks_in_words
from doctor.facts import Loader, LoaderFacts, StepFacts, Window
from doctor.testing import Fails, JobBuilder, Passes, running


def _waiting(
    *ranks: int, data: float, step: float = 0.4, windows: int = 6, workers: int = 2, device: float | None = None
) -> JobBuilder:
    facts = StepFacts(windows=tuple(Window(20 * one, 20, step, data=data, device=device) for one in range(windows)))
    loader = Loader("train", loader="DataLoader", workers=workers, persistent=True)
    return running(2, 2).put(facts, ranks=ranks).put(LoaderFacts(loaders=(loader,)), ranks=ranks)


def _logging(seconds: float) -> StepFacts:
    return StepFacts(windows=tuple(Window(20 * one, 20, 0.4, data=0.001, other=seconds) for one in range(6)))


@check(
    id="RUN005",
    severity=Severity.WARNING,
    when="R",
    needs=(StepFacts,),
    cases=lambda: (
        Passes("hardly any waiting", running(2, 2)),
        Passes("a fifth of the step", _waiting(0, 1, 2, 3, data=0.08)),
        Passes("most of a step that takes next to nothing", _waiting(0, 1, data=0.004, step=0.005, windows=50)),
        Passes("the first windows", _waiting(0, 1, data=0.3, windows=2)),
        Passes("a second of steps", _waiting(0, 1, data=0.01, step=0.015, windows=3)),
        Passes("the device works on while the host waits", _waiting(0, 1, 2, 3, data=0.2, device=0.37)),
        Passes(
            "rank 0 logs, and the others wait for its flag before they ask for a batch",
            _waiting(1, 2, 3, data=0.15).put(_logging(0.15), ranks=(0,)),
        ),
        Passes("no steps yet", running(1, 2).put(StepFacts())),
        Fails("a third of the step on all ranks", _waiting(0, 1, 2, 3, data=0.13), ranks=(0, 1, 2, 3)),
        Fails("the device waits, too", _waiting(1, data=0.2, device=0.19), ranks=(1,)),
        Fails("one rank, without workers", _waiting(2, data=0.2, workers=0), ranks=(2,)),
        Fails("a job of one process", _waiting(0, data=0.2).only((0,)), ranks=(0,)),
    ),
)
def input_bound(
    job: Job,
    *,
    waiting_share: float = 0.25,
    least_seconds: float = 0.01,
    least_windows: float = 3,
    watched_seconds: float = 3,
) -> Iterator[Verdict]:
    """Ask whether waiting for data takes a large part of the step.

    Why it hurts: the device is idle while the rank waits, and the other ranks wait for it.
    Fix: Use more `num_workers`, or decode and pack the data before the run.
    """
    # torch's TensorBoard profiler warns from 5 % of the step; at a quarter, one GPU in four is idle. Less than 10 ms
    # per step is the transfer of a ready batch to the device.
    waits = [wait for rank in job.ranks if (wait := _wait(rank, int(least_windows), watched_seconds))]
    waits = [_without_rank_zero(wait, waits[0]) for wait in waits]
    if not waits:
        yield Skip(f"fewer than {least_windows:g} windows, or less than {watched_seconds:g} s, of steps so far")
    long = [wait for wait in waits if wait.data >= least_seconds and wait.data > waiting_share * wait.total]
    if long:
        yield _finding(long, len(job.ranks))


class _Wait(msgspec.Struct, frozen=True):
    """Seconds per step that a rank waits for data, of ``total``. ``loop``: its time for optimizer, hooks, logging;
    ``workers``: of its loaders, ``None`` if unknown."""

    rank: Rank
    data: float
    loop: float
    total: float
    workers: int | None

    @property
    def share(self) -> float:
        return self.data / self.total


def _wait(rank: Rank, least: int, seconds: float) -> _Wait | None:
    steps, loaders = rank.find(StepFacts), rank.find(LoaderFacts)
    windows = recent_windows(steps, least, seconds) if steps else ()
    if not windows:
        return None
    workers = [loader.workers for loader in loaders.of("train") if loader.workers is not None] if loaders else []
    total, devices = typical_total(windows), [window.device for window in windows if window.device is not None]
    # Waiting of the host costs nothing while its device processes launched work.
    idle = max(0.0, total - median(devices)) if devices else total
    parts = typical_parts(windows)
    loop = parts["optimizer"] + parts["other"]
    return _Wait(rank, min(parts["data"], idle), loop, total, sum(workers) if workers else None)


def _without_rank_zero(wait: _Wait, first: _Wait) -> _Wait:
    """Lightning broadcasts a flag from rank 0 before each batch, so other ranks wait there for the loop of rank 0."""
    if first.rank.number != 0:
        return wait
    return msgspec.structs.replace(wait, data=max(0.0, wait.data - max(0.0, first.loop - wait.loop)))


def _finding(waits: list[_Wait], count: int) -> Finding:
    worst = max(waits, key=lambda wait: wait.share)
    ranks = tuple(wait.rank.number for wait in waits)
    who = "All ranks wait" if len(waits) == count > 1 else f"{ranks_in_words(ranks)} wait{'s' * (len(waits) == 1)}"
    most, where = ("up to ", f" on rank {worst.rank.number}") if len(waits) > 1 else ("", "")
    per_rank = {
        str(wait.rank.number): f"{milliseconds(wait.data)} of {milliseconds(wait.total)}" for wait in waits[:16]
    }
    return Finding(
        f"{who} for data for {most}{worst.share:.0%} of the step ({milliseconds(worst.data)} of "
        f"{milliseconds(worst.total)}{where})",
        ranks=ranks,
        evidence={
            **({"data_wait_by_rank": per_rank} if len(waits) > 1 else {}),
            "workers": worst.workers,
        },
        effect="The devices are idle while the ranks wait."
        if len(waits) == count > 1
        else "The device is idle while the process waits."
        if count == 1
        else "",
        fix=_fix(worst, dict.fromkeys(wait.rank.host.name for wait in waits)),
        explains=("GPU020",),
    )


def _fix(worst: _Wait, hosts: Collection[str]) -> str:
    if worst.workers == 0:
        return (
            f"Set `num_workers` of the DataLoader to the number of spare CPUs of rank {worst.rank.number}, because "
            "with 0 the training process loads each batch itself."
        )
    if worst.workers:
        free = "the hosts have" if len(hosts) > 1 else f"{worst.rank.host.name} has"
        return (
            f"Use more than {worst.workers} DataLoader workers per rank if {free} free CPUs, or preprocess the samples "
            "before the run."
        )
    return ""

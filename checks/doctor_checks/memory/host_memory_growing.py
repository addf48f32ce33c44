"""MEM009: host memory of ranks or their data workers grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from doctor.analysis.stats.rank_roles import uses_lightning
from doctor.analysis.stats.step_times import long_time, time_range
from doctor.analysis.stats.trend import LimitForecast, TrendLine, can_tell, steady_rise
from doctor.api import Finding, Job, Rank, Scope, Severity, Skip, Unknown, Verdict, check, ranks_in_words
from doctor.facts import HostFacts, Loader, LoaderFacts, MemorySample, ProgressFacts, RunMemoryFacts, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, running

GIB = 1 << 30
MIB = 1 << 20
NOON = 1_760_000_000.0

_FIELDS = ("resident", "workers")


def _grows(
    *ranks: int,
    resident: float = 0.0,
    workers: float = 0.0,
    minutes: int = 30,
    until: int = 1000,
    available: int = 100,
    epoch: int = 0,
) -> JobBuilder:
    """A CPU job on two hosts, monitored for some minutes. ``ranks`` grow by some MiB per minute, up to minute
    ``until``; workers restart every ``epoch`` minutes. ``available``: GiB available on the host at the end."""

    def sample(seconds: int) -> MemorySample:
        minute = min(seconds / 60, until)
        since = minute % epoch if epoch else minute
        return MemorySample(
            seconds,
            at=NOON + seconds,
            resident=int(4 * GIB + minute * resident * MIB),
            workers=int(2 * GIB + since * workers * MIB),
            host_available=available * GIB,
        )

    samples = tuple(sample(seconds) for seconds in range(15, minutes * 60 + 1, 15))
    return running(2, 2, gpus=0).alter(RunMemoryFacts, ranks=ranks, samples=samples)


_EPOCH = LoaderFacts(loaders=(Loader("train", length=2400),))
_LONG_EPOCH = LoaderFacts(loaders=(Loader("train", length=240_000),))


@check(
    id="MEM009",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="R",
    needs=(RunMemoryFacts,),
    cases=lambda: (
        Passes("memory stays the same", running(2, 2)),
        Passes("lazy imports and caches of the first minutes", _grows(0, 1, resident=400, until=6)),
        Passes("a minute is too short to decide", _grows(0, resident=2000, minutes=1)),
        Passes("workers that restart with each epoch", _grows(0, workers=600, epoch=4)),
        Passes("it would take weeks", _grows(0, 1, resident=3)),
        Passes("a data set that is read into memory and then fits", _grows(0, 1, workers=900, until=14)),
        Passes(
            "the first epoch fills a cache of samples, and ends in time",
            _grows(0, 1, workers=150).alter(ProgressFacts, epoch=0, batch=1800).put(_EPOCH),
        ),
        Fails(
            "the first epoch does not end in time",
            _grows(0, 1, workers=150, available=20).alter(ProgressFacts, epoch=0, batch=1800).put(_LONG_EPOCH),
            ranks=(0, 1),
        ),
        Fails(
            "a run of one epoch",
            _grows(0, 1, workers=150)
            .alter(ProgressFacts, epoch=0, batch=1800)
            .put(_EPOCH)
            .alter(TrainingFacts, max_epochs=1),
            ranks=(0, 1),
        ),
        Fails("one rank keeps its losses", _grows(2, resident=200), ranks=(2,)),
        Fails("workers copy pages of a list, one by one", _grows(0, 1, workers=150), ranks=(0, 1)),
        Fails("slowly, and little is left", _grows(3, resident=10, available=5), ranks=(3,)),
        Fails(
            "a group's limit is nearer than the host's memory",
            _grows(0, resident=40, available=900)
            .alter(HostFacts, hosts=("node0",), memory_limit=32 * GIB, memory_used=20 * GIB)
            .alter(RunMemoryFacts, ranks=(1,), samples=()),
            ranks=(0,),
        ),
    ),
)
def host_memory_growing(job: Job, *, horizon: float = 30, least_mebibytes: float = 64) -> Iterator[Verdict]:
    """Ask whether host memory used by ranks or their DataLoader workers grows until the host runs out of memory.

    Why it hurts: the OOM killer ends a process with SIGKILL (exit code -9) and without a traceback, and the other ranks
    wait for it until their timeout.
    Fix: Store numbers instead of tensors (`loss.item()`), do not let lists grow, and keep the contents of a dataset
    in arrays (numpy, torch, Arrow) instead of lists and dictionaries of Python objects.
    """
    # A forecast extends at most 30 times the observed time. Arenas of the C library and caches of compiled kernels grow
    # by 64 MiB in a healthy process.
    if not any(can_tell(_points(rank, "resident")) for rank in job.ranks):
        yield Skip("too few memory samples so far")
    for local in job.by_host():
        growths = [growth for rank in local.members for growth in _growths(rank, least_mebibytes * MIB)]
        host = local.find(HostFacts)
        sizes = [_newest_available(rank) for rank in local.members]
        in_cgroup = None
        if host and host.memory_limit is not None and host.memory_used is not None:
            in_cgroup = max(0, host.memory_limit - host.memory_used)
            sizes.append(in_cgroup)
        if not any(size is not None for size in sizes) and host:
            sizes.append(host.ram_available)
        free = min((size for size in sizes if size is not None), default=None)
        if growths and free is None:
            yield Unknown("the available memory of the host is unknown", local.ranks, "free -b")
        elif growths and free is not None:
            where = f"The cgroup on {local.name}" if free == in_cgroup else local.name
            yield from _judge(job, growths, free, horizon, where)


class _Growth(msgspec.Struct, frozen=True):
    """Growth of a rank or of its workers, in bytes per second over ``watched`` seconds."""

    rank: Rank
    field: str
    line: TrendLine
    watched: float
    newest: MemorySample


def _growths(rank: Rank, least: float) -> Iterator[_Growth]:
    facts = rank.find(RunMemoryFacts)
    for field in _FIELDS:
        points = _points(rank, field)
        if facts and len(points) > 1 and points[-1][1] - points[0][1] > least and (line := steady_rise(points)):
            yield _Growth(rank, field, line, points[-1][0] - points[0][0], facts.samples[-1])


def _points(rank: Rank, field: str) -> list[tuple[float, float]]:
    facts = rank.find(RunMemoryFacts)
    sizes = [(sample.at, getattr(sample, field)) for sample in facts.samples] if facts else []
    return [(at, float(size)) for at, size in sizes if at is not None and size is not None]


def _newest_available(rank: Rank) -> int | None:
    facts = rank.find(RunMemoryFacts)
    told = (sample.host_available for sample in reversed(facts.samples)) if facts else ()
    return next((size for size in told if size is not None), None)


def _judge(job: Job, growths: list[_Growth], free: int, horizon: float, where: str) -> Iterator[Finding]:
    rate = sum(growth.line.slope for growth in growths)
    time = LimitForecast(
        free / rate, free / sum(growth.line.high for growth in growths), free / sum(one.line.low for one in growths)
    )
    near = time.expected <= horizon * max(growth.watched for growth in growths)
    if near and not all(_may_be_a_cache(growth, time.expected) for growth in growths):
        worst = max(growths, key=lambda growth: growth.line.slope)
        ranks = tuple(dict.fromkeys(growth.rank.number for growth in growths))
        lists = "in `on_train_epoch_end`" if uses_lightning(job) else "after each epoch"
        fix = (
            _OF_WORKERS
            if worst.field == "workers"
            else (f"Store numbers instead of tensors in lists (`loss.item()`), and clear the lists {lists}.")
        )
        yield Finding(
            f"{where} runs out of memory in {long_time(time.expected)}"
            f"{time_range(time.soonest, time.latest)}: {_who(growths)} by {_a_minute(rate)}",
            ranks=ranks,
            evidence={
                "growth": [_evidence(growth) for growth in growths[:16]],
                "bytes_left": free,
                "seconds_left": {"expected": time.expected, "low": time.soonest, "high": time.latest},
                "batch_at_the_end": _batch_at(worst, time.expected),
            },
            effect="The OOM killer then ends a process with SIGKILL (exit code -9) and without a traceback, and the "
            "other ranks wait for it until their timeout.",
            fix=fix,
            explains=("MEM008", "MEM012"),
        )


_OF_WORKERS = (
    "Store the dataset's lists and dictionaries as NumPy arrays, torch tensors or Arrow tables, because each worker "
    "copies pages of Python objects when it reads them."
)


def _may_be_a_cache(growth: _Growth, seconds: float) -> bool:
    """In the first of several epochs, a dataset may cache samples and finish before memory runs out."""
    training, progress = growth.rank.find(TrainingFacts), growth.rank.find(ProgressFacts)
    loaders = growth.rank.find(LoaderFacts)
    lengths = [one.limit or one.length or 0 for one in loaders.of("train")] if loaders else []
    if training is None or training.max_epochs == 1 or progress is None or progress.epoch != 0 or not all(lengths):
        return False
    at_the_end = _batch_at(growth, seconds)
    left = max(lengths, default=0) - (progress.batch or 0)
    return at_the_end is not None and growth.newest.step + left < at_the_end


def _who(growths: Sequence[_Growth]) -> str:
    """``rank 3 grows``, ``DataLoader workers of ranks 0 and 1 grow``, ``ranks 0-3 and their workers grow``."""
    numbers = tuple(dict.fromkeys(growth.rank.number for growth in growths))
    fields = {growth.field for growth in growths}
    who = ranks_in_words(numbers)
    if fields == {"resident"}:
        return f"{who} grow{'s' if len(numbers) == 1 else ''}"
    if fields == {"workers"}:
        return f"DataLoader workers of {who} grow"
    return f"{who} and {'its' if len(numbers) == 1 else 'their'} DataLoader workers grow"


def _evidence(growth: _Growth) -> dict[str, object]:
    return {
        "rank": growth.rank.number,
        "memory_of": "rank" if growth.field == "resident" else "DataLoader workers",
        "bytes_a_second": {"median": growth.line.slope, "low": growth.line.low, "high": growth.line.high},
        "watched_seconds": growth.watched,
        "bytes_now": getattr(growth.newest, growth.field),
    }


def _batch_at(growth: _Growth, seconds: float) -> int | None:
    facts = growth.rank.find(RunMemoryFacts)
    first = facts.samples[0] if facts else growth.newest
    if first.at is None or growth.newest.at is None or growth.newest.at <= first.at:
        return None
    return growth.newest.step + round(seconds * (growth.newest.step - first.step) / (growth.newest.at - first.at))


def _a_minute(rate: float) -> str:
    return f"{rate * 60 / MIB:.0f} MiB/min" if rate * 60 >= 10 * MIB else f"{rate * 60 / MIB:.1f} MiB/min"

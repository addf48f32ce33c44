"""MEM004: a GPU will run out of memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import msgspec

from doctor.analysis.stats.rank_roles import same_role
from doctor.analysis.stats.step_times import long_time
from doctor.analysis.stats.trend import LimitForecast, TrendLine, can_tell, reach, steady_rise, theil_sen
from doctor.analysis.visible_devices import mebibytes
from doctor.api import Finding, Job, Rank, Severity, Skip, Verdict, check, ranks_in_words
from doctor.facts import Loader, LoaderFacts, MemorySample, ProgressFacts, RunMemoryFacts, Sampler, TrainingFacts
from doctor.testing import Fails, JobBuilder, Passes, running

GIB = 1 << 30
MIB = 1 << 20


def _grows(*ranks: int, mebibytes_a_step: float, until: int = 2000, after: int = 0, falls_every: int = 0) -> JobBuilder:
    """A job of two hosts at step ``until`` whose memory grows in each step, from step ``after`` to step 2000 at most;
    its cache is emptied every ``falls_every`` steps."""

    def allocated(step: int) -> int:
        steps = step % falls_every if falls_every else max(0, min(step, 2000) - after)
        return int(20 * GIB + steps * mebibytes_a_step * MIB)

    samples = tuple(
        MemorySample(step, at=1_760_000_000.0 + step, allocated=allocated(step), peak=allocated(step) + 8 * GIB)
        for step in range(50, until + 1, 50)
    )
    newest = samples[-1]
    return (
        running(2, 2)
        .alter(TrainingFacts, max_epochs=None)
        .alter(
            RunMemoryFacts,
            ranks=ranks,
            samples=samples,
            allocated=newest.allocated,
            peak_allocated=max(sample.peak or 0 for sample in samples),
        )
    )


def _batches(*units: int, met: int, gibibytes: float = 1.0, power: int = 1, foreign: int = 1) -> JobBuilder:
    """A job whose rank 1 had batches of ``units`` thousand tokens, each thousand of which takes ``gibibytes``, while
    other processes hold ``foreign`` GiB of its GPU; rank 0 had a batch of ``met`` thousand."""

    def samples(*sizes: int) -> tuple[MemorySample, ...]:
        return tuple(
            MemorySample(
                50 * place,
                at=1_760_000_000.0 + 50 * place,
                allocated=20 * GIB,
                peak=int((20 + gibibytes * size**power) * GIB) + place % 3 * 20 * MIB,
                units=size * 1000,
            )
            for place, size in enumerate(sizes, 1)
        )

    theirs, own = samples(*units[:-1], met), samples(*units)
    sketch = running(1, 2).alter(RunMemoryFacts, ranks=(0,), samples=theirs, peak_allocated=theirs[-1].peak)
    return sketch.alter(RunMemoryFacts, ranks=(1,), samples=own, foreign=foreign * GIB)


def _in_order(old: tuple[Loader, ...]) -> tuple[Loader, ...]:
    sampler = Sampler("DistributedSampler", True, shuffle=False)
    return tuple(Loader(one.stage, one.index, length=one.length, sampler=sampler) for one in old)


@check(
    id="MEM004",
    severity=Severity.WARNING,
    when="R",
    needs=(RunMemoryFacts,),
    cases=lambda: (
        Passes("memory after each step stays the same", running(2, 2)),
        Passes("a run on the CPU", running(1, 2, gpus=0)),
        Passes("the first steps", _grows(0, 1, 2, 3, mebibytes_a_step=10, until=300)),
        Passes("warm-up, then a plateau", _grows(1, mebibytes_a_step=20, until=6000)),
        Passes("a cache that is emptied every 300 steps", _grows(1, mebibytes_a_step=40, falls_every=300)),
        Passes("growth too slow to measure", _grows(1, mebibytes_a_step=0.5)),
        Passes("the run ends before", _grows(1, mebibytes_a_step=10).alter(TrainingFacts, max_steps=3000)),
        Passes("the largest batch of another rank fits", _batches(12, 20, 16, 28, 24, 18, met=50)),
        Passes("this rank has had one as large", _batches(12, 20, 16, 28, 50, 18, met=50, foreign=15)),
        Passes(
            "batches of one size, which predict nothing of larger ones",
            _batches(20, 20, 20, 20, 20, 20, met=55, foreign=15),
        ),
        Passes("too few batches to decide", _batches(12, 20, met=55, foreign=15)),
        Passes(
            "the other rank used less than the line predicts",
            _batches(12, 20, 16, 28, 24, 18, met=55, foreign=15).alter(
                RunMemoryFacts, ranks=(0,), peak_allocated=60 * GIB
            ),
        ),
        Passes(
            "each rank keeps its part of the data",
            _batches(12, 20, 16, 28, 24, 18, met=55, foreign=15).alter(LoaderFacts, loaders=_in_order),
        ),
        Passes(
            "the last epoch",
            _batches(12, 20, 16, 28, 24, 18, met=55, foreign=15).alter(TrainingFacts, max_epochs=2),
        ),
        Fails("one rank keeps 10 MiB of each step", _grows(2, mebibytes_a_step=10), ranks=(2,)),
        Fails("all ranks keep 2 MiB of each step", _grows(0, 1, 2, 3, mebibytes_a_step=2), ranks=(0, 1, 2, 3)),
        Fails(
            "the run would go on for longer",
            _grows(1, mebibytes_a_step=10).alter(TrainingFacts, max_steps=100_000),
            ranks=(1,),
        ),
        Fails(
            "a batch that another rank had is too long for this one, whose GPU others use",
            _batches(12, 20, 16, 28, 24, 18, met=55, foreign=15),
            ranks=(1,),
        ),
        Fails(
            "attention that grows with the square",
            _batches(12, 20, 16, 28, 24, 18, met=42, gibibytes=0.03, power=2, foreign=15),
            ranks=(1,),
        ),
    ),
)
def exhaustion_forecast(job: Job, *, horizon: float = 30, least_batches: float = 3) -> Iterator[Verdict]:
    """Ask whether a GPU will run out of memory before the run ends, because of a leak or a larger batch.

    Why it hurts: the run fails with "CUDA out of memory" on one rank, and the others wait for it until their timeout.
    Fix: Release tensors of past steps (call `loss.detach()` or `.item()` before summing or storing a loss), and limit
    the size of a batch.
    """
    # A forecast extends at most 30 times the observed time; slower growth cannot be distinguished from caches that
    # fill up. Two points do not make a line, and the interval of three spans all their slopes.
    holders = [
        _RankMemoryUse(rank, facts, facts.total - (facts.foreign or 0))
        for rank in job.ranks
        if (facts := rank.find(RunMemoryFacts)) and facts.total
    ]
    needs = list(_needs(job, holders, least_batches))
    if not needs and not any(can_tell(_points(holder)) for holder in holders):
        yield Skip("too few memory samples so far" if holders else "no rank trains on a GPU")
    leaks = [leak for holder in holders if (leak := _leak(holder, horizon))]
    if leaks:
        first = min(leaks, key=lambda leak: leak.steps.expected)
        who = ranks_in_words(tuple(leak.holder.rank.number for leak in leaks), 4)
        steps = first.steps
        rest = f"about {steps.expected:,.0f} batches"
        if first.seconds_a_step:
            rest = long_time(steps.expected * first.seconds_a_step)
        yield Finding(
            f"GPU memory of {who} grows by {_rate(first.line.slope)} per batch and runs out in {rest}",
            ranks=tuple(leak.holder.rank.number for leak in leaks),
            evidence={
                "by_rank": {str(leak.holder.rank.number): _leak_evidence(leak) for leak in leaks[:16]},
                "seconds_a_batch": first.seconds_a_step,
            },
            effect=_effect(job, leaks, first),
            fix=f"Detach tensors that {who} keep{'s' if len(leaks) == 1 else ''} between steps (`loss.detach()`, "
            "`loss.item()`), and reset metrics after each epoch.",
            explains=("MEM003", "MEM006", "MEM011"),
        )
    for holder, need in needs:
        yield _need_finding(holder, need)


def _effect(job: Job, leaks: Sequence[_Leak], first: _Leak) -> str:
    """Ranks whose intervals overlap may fail in the same batch."""
    together = [leak for leak in leaks if leak.steps.soonest <= first.steps.latest]
    if len(together) == job.world_size:
        return 'All ranks then fail with "CUDA out of memory" at about the same batch.'
    who = ranks_in_words(tuple(leak.holder.rank.number for leak in together), 4)
    several = len(together) > 1
    return (
        f'{who[:1].upper()}{who[1:]} then fail{"" if several else "s"} with "CUDA out of memory", and the other ranks '
        f"wait for {'them' if several else 'it'} until their timeout."
    )


class _RankMemoryUse(msgspec.Struct, frozen=True):
    rank: Rank
    facts: RunMemoryFacts
    limit: int


class _Leak(msgspec.Struct, frozen=True):
    holder: _RankMemoryUse
    line: TrendLine
    steps: LimitForecast
    now: int
    seconds_a_step: float | None


class _Met(msgspec.Struct, frozen=True, order=True):
    """``taken``: the peak of its steps above the memory that it keeps, in bytes."""

    units: int
    rank: int
    taken: int


class _BatchMemoryNeed(msgspec.Struct, frozen=True):
    """With the ends of an interval; ``seen``: the largest batch so far."""

    met: _Met
    seen: int
    expected: float
    low: float
    high: float
    grows_with: str


def _points(holder: _RankMemoryUse) -> list[tuple[float, float]]:
    return [(float(one.step), float(one.allocated)) for one in holder.facts.samples if one.allocated is not None]


def _leak(holder: _RankMemoryUse, horizon: float) -> _Leak | None:
    points = _points(holder)
    if len(points) < 2:
        return None
    watched, grown = points[-1][0] - points[0][0], points[-1][1] - points[0][1]
    room = holder.limit - max(holder.facts.peak_allocated or 0, points[-1][1])
    if grown * horizon <= room or (line := steady_rise(points)) is None:
        return None
    steps, now = reach(room, line), holder.facts.samples[-1].step
    if steps is None or steps.expected > horizon * watched or _ends_within(holder.rank, steps.expected):
        return None
    return _Leak(holder, line, steps, now, _seconds_a_step(holder.facts.samples))


def _ends_within(rank: Rank, batches: float) -> bool:
    training, progress = rank.find(TrainingFacts), rank.find(ProgressFacts)
    if training is None or progress is None:
        return False
    if training.max_steps is not None and training.max_steps >= 0:
        return (training.max_steps - (progress.step or 0)) * training.accumulate <= batches
    loaders = rank.find(LoaderFacts)
    lengths = [one.limit or one.length for one in loaders.of("train")] if loaders else []
    if training.max_epochs is None or training.max_epochs < 0 or not lengths or None in lengths:
        return False
    epochs = training.max_epochs - (progress.epoch or 0)
    return epochs * max(length or 0 for length in lengths) - (progress.batch or 0) <= batches


def _seconds_a_step(samples: tuple[MemorySample, ...]) -> float | None:
    timed = [(one.step, one.at) for one in samples if one.at is not None]
    if len(timed) < 2 or timed[-1][0] == timed[0][0]:
        return None
    return (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])


def _leak_evidence(leak: _Leak) -> dict[str, object]:
    return {
        "bytes_a_batch": {"median": leak.line.slope, "low": leak.line.low, "high": leak.line.high},
        "batches_left": {"expected": leak.steps.expected, "low": leak.steps.soonest, "high": leak.steps.latest},
        "batch_now": leak.now,
        "peak_bytes": leak.holder.facts.peak_allocated,
        "limit_bytes": leak.holder.limit,
    }


def _rate(size: float) -> str:
    return f"{size / MIB:.1f} MiB" if size >= MIB / 10 else f"{size / 1024:.0f} KiB"


def _needs(
    job: Job, holders: Sequence[_RankMemoryUse], least: float
) -> Iterator[tuple[_RankMemoryUse, _BatchMemoryNeed]]:
    for ranks in same_role(job):
        numbers = {rank.number for rank in ranks}
        peers = [holder for holder in holders if holder.rank.number in numbers]
        met = _largest_met(peers)
        for holder in peers:
            others = (one for one in met.get(_deal(holder.rank), ()) if one.rank != holder.rank.number)
            largest = next(others, None)
            if largest and (need := _need(holder, largest, least)):
                yield holder, need


def _largest_met(holders: Sequence[_RankMemoryUse]) -> Mapping[Hashable, list[_Met]]:
    met: dict[Hashable, list[_Met]] = {}
    for holder in holders:
        deal, units = _deal(holder.rank), max((one.units or 0 for one in holder.facts.samples), default=0)
        if deal is not None and units:
            taken = max(0, (holder.facts.peak_allocated or 0) - _kept(holder))
            met.setdefault(deal, []).append(_Met(units, holder.rank.number, taken))
    return {deal: sorted(own, reverse=True) for deal, own in met.items()}


def _kept(holder: _RankMemoryUse) -> int:
    return next((one.allocated for one in reversed(holder.facts.samples) if one.allocated is not None), 0)


def _deal(rank: Rank) -> Hashable:
    """The data that a sampler redistributes to all ranks in the next epoch; ``None`` without such a sampler or without
    another epoch."""
    loaders, progress = rank.find(LoaderFacts), rank.find(ProgressFacts)
    for loader in loaders.of("train") if loaders and progress else ():
        length, sampler = loader.limit or loader.length, loader.sampler
        if sampler and sampler.distributed and sampler.shuffle and length is not None and progress:
            is_last = _ends_within(rank, length - (progress.batch or 0))
            return None if is_last else (loader.index, loader.dataset_length, loader.batch_size, sampler.name)
    return None


def _need(holder: _RankMemoryUse, met: _Met, least: float) -> _BatchMemoryNeed | None:
    points = [(float(one.units), float(one.peak)) for one in holder.facts.samples if one.units and one.peak]
    if len(points) < least:
        return None
    seen = max(units for units, _ in points)
    if met.units <= seen or seen < 1.1 * min(units for units, _ in points):
        return None
    need = _predict(points, met)
    fits = need is None or need.expected <= holder.limit or _kept(holder) + met.taken <= holder.limit
    return None if fits else need


def _predict(points: list[tuple[float, float]], met: _Met) -> _BatchMemoryNeed | None:
    """A linear fit in the units, or in their square (attention without a fused kernel) if that fits twice as well."""
    squares = [(own * own, peak) for own, peak in points]
    line, curve = theil_sen(points), theil_sen(squares)
    if line is None or curve is None or max(line.slope, curve.slope) <= 0:
        return None
    by_square = _misfit(curve, squares) < _misfit(line, points) / 2
    fit, place = (curve, float(met.units**2)) if by_square else (line, float(met.units))
    seen, away, noise = int(max(own for own, _ in points)), place - fit.x, 3 * fit.spread
    low, high = fit.y + fit.low * away - noise, fit.y + fit.high * away + noise
    return _BatchMemoryNeed(
        met, seen, fit.at(place), low, high, "the square of the batch size" if by_square else "the batch size"
    )


def _misfit(line: TrendLine, points: list[tuple[float, float]]) -> float:
    """The mean distance of the points from the line, in which a single outlier counts."""
    return sum(abs(y - line.at(x)) for x, y in points) / len(points)


def _need_finding(holder: _RankMemoryUse, need: _BatchMemoryNeed) -> Finding:
    number = holder.rank.number
    return Finding(
        f"A batch of {need.met.units:,} tokens or samples needs about {mebibytes(int(need.expected))} on rank "
        f"{number}, "
        f"which has {mebibytes(holder.limit)}",
        ranks=(number,),
        evidence={
            "units_to_come": need.met.units,
            "met_by_rank": need.met.rank,
            "units_seen": need.seen,
            "expected_bytes": int(need.expected),
            "interval_bytes": [int(need.low), int(need.high)],
            "peak_grows_with": need.grows_with,
            "limit_bytes": holder.limit,
        },
        effect=f"So far, only rank {need.met.rank} had such a batch. In the next epoch, shuffling may assign one to "
        f'rank {number}, which then fails with "CUDA out of memory".',
        fix=f"Limit batches to less than {need.met.units:,} tokens or samples, for example with a token-based batch "
        "sampler, or split larger ones with gradient accumulation.",
        confidence=0.9 if need.low > holder.limit else 0.6,
        explains=("MEM011",),
    )

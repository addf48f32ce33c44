"""Process groups of one axis against their siblings, and who is to blame where a collective broke."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from doctor.analysis.stats.outliers import PeerValues, outliers
from doctor.core.facts import CollectiveFacts, CollectiveTiming
from doctor.core.job import Job

SMALL = 4096
"""Bytes up to which the time of a collective is latency."""

SILENT = "no answer within"
"""How the error begins of a rank whose child had to be ended."""


class TimedGroup(NamedTuple):
    """A collective of one group: ``seconds`` of the best and of the worst of its ``turns``."""

    axis: str
    operation: str
    backend: str
    bytes: int
    members: tuple[int, ...]
    seconds: float
    worst: float
    turns: int


class SlowGroup(NamedTuple):
    """A group that takes longer than ``usual``, what its siblings take at the median; ``siblings`` of them."""

    timed: TimedGroup
    usual: float
    siblings: int


class BrokenCollective(NamedTuple):
    """How a rank saw a collective break: ``axis`` and ``operation`` are empty where the group was not even set up."""

    rank: int
    error: str
    awaited: tuple[int, ...]
    axis: str = ""
    operation: str = ""
    backend: str = ""


def timed_groups(job: Job) -> tuple[TimedGroup, ...]:
    """Every collective that was timed, group by group. In a turn the members' median counts, and of turns the best."""
    found: dict[tuple[str, str, str, int, tuple[int, ...]], list[list[float]]] = {}
    for facts, alike in job.each(CollectiveFacts):
        for key, turns in _turns(facts.timings).items():
            by_turn = found.setdefault(key, [])
            by_turn.extend([] for _ in range(len(turns) - len(by_turn)))
            for values, seconds in zip(by_turn, turns, strict=False):
                values.extend([seconds] * len(alike.ranks))
    medians = {key: [median(seconds) for seconds in turns] for key, turns in found.items()}
    return tuple(TimedGroup(*key, min(turns), max(turns), len(turns)) for key, turns in medians.items())


Key = tuple[str, str, str, int, tuple[int, ...]]


def _turns(timings: Iterable[CollectiveTiming]) -> Mapping[Key, list[float]]:
    turns: dict[Key, list[float]] = {}
    for one in timings:
        if one.seconds is not None and len(one.members) > 1:
            turns.setdefault((one.axis, one.operation, one.backend, one.bytes, one.members), []).append(one.seconds)
    return turns


def slow_groups(groups: Iterable[TimedGroup], *, times: float, least: float, sigmas: float) -> tuple[SlowGroup, ...]:
    """The groups whose best turn takes more than ``times`` what the worst of their siblings takes at the median, more
    than ``least`` seconds longer than usual, and is more than ``sigmas`` robust standard deviations away from that;
    those of an axis and of equal size are siblings."""
    families: dict[tuple[str, str, str, int, int], list[TimedGroup]] = {}
    for one in groups:
        if one.bytes > SMALL:
            families.setdefault((one.axis, one.operation, one.backend, one.bytes, len(one.members)), []).append(one)
    return tuple(slow for family in families.values() for slow in _slow_in(family, times, least, sigmas))


def _slow_in(family: Sequence[TimedGroup], times: float, least: float, sigmas: float) -> Iterator[SlowGroup]:
    best = {place: one.seconds for place, one in enumerate(family)}
    worst = PeerValues(one.worst for one in family)
    for odd in outliers(best, share=times - 1, least=least, deviations=sigmas):
        slow = family[odd.rank]
        # On a busy machine one turn of a group is easily several times as long as another one.
        if slow.seconds > times * worst.median(slow.worst):
            yield SlowGroup(slow, odd.typical, len(family) - 1)


def in_several_groups(slow: Sequence[SlowGroup], job: Job) -> tuple[int, ...]:
    """The ranks that sit in slow groups of several axes; where none does, those of one host that together do."""
    axes: dict[int, set[str]] = {}
    for one in slow:
        for rank in one.timed.members:
            axes.setdefault(rank, set()).add(one.timed.axis)
    several = tuple(sorted(rank for rank, names in axes.items() if len(names) > 1))
    return several or next(_hosts_in_several(axes, job), ())


def _hosts_in_several(axes: Mapping[int, set[str]], job: Job) -> Iterator[tuple[int, ...]]:
    for local in job.by_host():
        members = tuple(rank for rank in local.ranks if rank in axes)
        if len(set().union(*(axes[rank] for rank in members))) > 1:
            yield members


def broken_collectives(job: Job) -> tuple[BrokenCollective, ...]:
    """What each rank says that broke, one thing at most: it stops then."""
    found = []
    for facts, alike in job.each(CollectiveFacts):
        for rank in alike.ranks:
            if facts.error:
                found.append(BrokenCollective(rank, facts.error, facts.awaited, backend=facts.backend or ""))
            found += [
                BrokenCollective(rank, one.error, one.awaited, one.axis, one.operation, one.backend)
                for one in facts.timings
                if one.error
            ][:1]
    return tuple(sorted(found))


def culprits_of(broken: Sequence[BrokenCollective]) -> tuple[int, ...]:
    """Those that broke by themselves, the silent ones among them only where nobody says more: NCCL waits without end
    where another rank has given up. Where all waited for others, those that were waited for and did not wait, else
    those for whom most wait; else all."""
    own = {one.rank for one in broken if not one.awaited}
    outspoken = own - {one.rank for one in broken if one.error.startswith(SILENT)}
    waited = {one.rank for one in broken if one.awaited}
    named = {rank for one in broken for rank in one.awaited}
    return tuple(sorted(outspoken or own or (named - waited) or _most_awaited(broken) or waited))


def _most_awaited(broken: Sequence[BrokenCollective]) -> set[int]:
    """Where they all wait in a circle, those for whom most wait."""
    counts: dict[int, int] = {}
    for one in broken:
        for rank in one.awaited:
            counts[rank] = counts.get(rank, 0) + 1
    most = max(counts.values(), default=0)
    return {rank for rank, count in counts.items() if count == most}

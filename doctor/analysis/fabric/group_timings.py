"""Process groups compared with other groups of the same axis, and the cause of broken collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from doctor.analysis.stats.outliers import PeerValues, outliers
from doctor.core.facts import CollectiveFacts
from doctor.core.job import Job

SMALL = 4096
"""The number of bytes up to which the duration of a collective is latency."""

SILENT = "no answer within"
"""The start of the error of a rank whose child process had to be killed."""


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
    """A group that takes longer than ``usual``, the median of its siblings; ``siblings``: their number."""

    timed: TimedGroup
    usual: float
    siblings: int


class BrokenCollective(NamedTuple):
    """A broken collective as one rank reported it; ``axis`` and ``operation`` are empty if the group was not set up."""

    rank: int
    error: str
    awaited: tuple[int, ...]
    axis: str = ""
    operation: str = ""
    backend: str = ""


Key = tuple[str, str, str, int, tuple[int, ...]]


def timed_groups(job: Job) -> tuple[TimedGroup, ...]:
    """Every timed collective by group: the median of the members in each turn, and the best turn."""
    found: dict[Key, list[list[float]]] = {}
    for facts, same in job.each(CollectiveFacts):
        own: dict[Key, list[float]] = {}
        for one in facts.timings:
            if one.seconds is not None and len(one.members) > 1:
                own.setdefault((one.axis, one.operation, one.backend, one.bytes, one.members), []).append(one.seconds)
        for key, turns in own.items():
            by_turn = found.setdefault(key, [])
            by_turn.extend([] for _ in range(len(turns) - len(by_turn)))
            for values, seconds in zip(by_turn, turns, strict=False):
                values.extend([seconds] * len(same.ranks))
    medians = {key: [median(seconds) for seconds in turns] for key, turns in found.items()}
    return tuple(TimedGroup(*key, min(turns), max(turns), len(turns)) for key, turns in medians.items())


def slow_groups(groups: Iterable[TimedGroup], *, times: float, least: float, sigmas: float) -> tuple[SlowGroup, ...]:
    """Groups that are significantly slower than their siblings, which are groups of one axis with the same size.

    The best turn of a slow group takes more than ``times`` the median of the siblings' worst turns, more than ``least``
    seconds longer than usual, and differs from that by more than ``sigmas`` robust standard deviations."""
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
        # On a busy machine one turn of a group may take several times as long as another one.
        if slow.seconds > times * worst.median(slow.worst):
            yield SlowGroup(slow, odd.typical, len(family) - 1)


def in_several_groups(slow: Sequence[SlowGroup], job: Job) -> tuple[int, ...]:
    """The ranks that are in slow groups of several axes; if there are none, those of one host that together are."""
    axes: dict[int, set[str]] = {}
    for one in slow:
        for rank in one.timed.members:
            axes.setdefault(rank, set()).add(one.timed.axis)
    several = tuple(sorted(rank for rank, names in axes.items() if len(names) > 1))
    if several:
        return several
    for local in job.by_host():
        members = tuple(rank for rank in local.ranks if rank in axes)
        if len(set().union(*(axes[rank] for rank in members))) > 1:
            return members
    return ()


def broken_collectives(job: Job) -> tuple[BrokenCollective, ...]:
    """The first broken collective that each rank reported; a rank stops after one."""
    found = []
    for facts, same in job.each(CollectiveFacts):
        for rank in same.ranks:
            if facts.error:
                found.append(BrokenCollective(rank, facts.error, facts.awaited, backend=facts.backend or ""))
            found += [
                BrokenCollective(rank, one.error, one.awaited, one.axis, one.operation, one.backend)
                for one in facts.timings
                if one.error
            ][:1]
    return tuple(sorted(found))


def culprits_of(broken: Sequence[BrokenCollective]) -> tuple[int, ...]:
    """The ranks that caused broken collectives.

    Those whose own error broke them; among these the silent ones only if there are no others, because NCCL blocks
    indefinitely after another rank has given up. If all ranks waited for others, those that others waited for and that
    did not wait, else those that most ranks wait for; else all."""
    own = {one.rank for one in broken if not one.awaited}
    outspoken = own - {one.rank for one in broken if one.error.startswith(SILENT)}
    waited = {one.rank for one in broken if one.awaited}
    named = {rank for one in broken for rank in one.awaited}
    return tuple(sorted(outspoken or own or (named - waited) or _most_awaited(broken) or waited))


def _most_awaited(broken: Sequence[BrokenCollective]) -> set[int]:
    counts = Counter(rank for one in broken for rank in one.awaited)
    most = max(counts.values(), default=0)
    return {rank for rank, count in counts.items() if count == most}

"""What the charts of memory and of pairs of hosts show, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from doctor.core.facts import (
    CollectiveFacts,
    MemorySample,
    PathFacts,
    PathSample,
    Reach,
    ReachFacts,
    RunMemoryFacts,
    TransferFacts,
)
from doctor.core.job import Job
from doctor.core.report_document import Report
from doctor.core.text import byte_size
from doctor.report.narrative import narrative_of

MOST_LINES = 128
"""Ranks whose memory is drawn: those that findings name, then those that hold most."""
MOST_POINTS = 200
"""Points of one line; of more, the highest of each stretch."""
ALL_POINTS = 12_000
"""Points of all lines together, so that a report of a large job stays small."""
MOST_HOSTS = 64
"""Hosts of which pairs are drawn."""

MEMORY = {
    "reserved": "device, held by torch's allocator",
    "allocated": "device, allocated by tensors",
    "device_used": "device, used by all",
    "resident": "host, this process",
    "workers": "host, its data workers",
    "host_available": "host, available",
}
"""Fields of a sample and what they measure."""


class MemoryLine(NamedTuple):
    """A rank's memory by step: ``points`` of (step, bytes)."""

    rank: int
    blamed: bool
    points: tuple[tuple[int, int], ...]

    @property
    def highest(self) -> tuple[int, int]:
        """The point with the most bytes."""
        return max(self.points, key=lambda point: point[1])


class MemoryChart(NamedTuple):
    """One thing that was measured: ``field`` of :data:`MEMORY`; ``limit``: bytes that there are."""

    field: str
    name: str
    lines: tuple[MemoryLine, ...]
    limit: int | None
    left_out: int


def memory_of(report: Report, job: Job | None) -> tuple[MemoryChart, ...]:
    """Memory of ranks while they ran, each measure that any of them has; empty without samples."""
    if job is None:
        return ()
    blamed = _blamed(report)
    sampled = [(rank.number, used) for rank in job.ranks if (used := rank.find(RunMemoryFacts)) and used.samples]
    fields = [field for field in MEMORY if any(_has(used.samples, field) for _, used in sampled)]
    return tuple(_memory_chart(field, sampled, blamed, len(fields)) for field in fields)


def _blamed(report: Report) -> set[int]:
    """The ranks that findings about memory name; where there are none those that the primary finding names."""
    story = narrative_of(report)
    told = [*((story.primary,) if story.primary else ()), *story.followed, *story.others]
    named = {rank for one in told if one.result.family == "memory" for rank in one.finding.ranks}
    return named or (set(story.primary.finding.ranks) if story.primary else set())


def _has(samples: Iterable[MemorySample], field: str) -> bool:
    return any(getattr(sample, field) for sample in samples)


def _memory_chart(
    field: str, sampled: Sequence[tuple[int, RunMemoryFacts]], blamed: set[int], charts: int
) -> MemoryChart:
    most = max(20, min(MOST_POINTS, ALL_POINTS // (max(1, min(len(sampled), MOST_LINES)) * charts)))
    lines = [
        MemoryLine(rank, rank in blamed, tuple(_thinned(points, most)))
        for rank, used in sampled
        if (points := _points(used.samples, field))
    ]
    chosen = sorted(lines, key=lambda line: (not line.blamed, -line.highest[1]))[:MOST_LINES]
    totals = [used.total for _, used in sampled if used.total] if field in _OF_DEVICE else []
    return MemoryChart(
        field,
        MEMORY[field],
        tuple(sorted(chosen, key=lambda line: line.rank)),
        min(totals, default=None),
        len(lines) - len(chosen),
    )


_OF_DEVICE = ("reserved", "allocated", "device_used")


def _points(samples: Iterable[MemorySample], field: str) -> list[tuple[int, int]]:
    return [(sample.step, value) for sample in samples if (value := getattr(sample, field)) is not None]


def _thinned(points: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """At most ``most`` points: the highest of each stretch, and the last."""
    if len(points) <= most:
        yield from points
        return
    width = -(-len(points) // (most - 1))
    for start in range(0, len(points) - 1, width):
        yield max(points[start : start + width], key=lambda point: point[1])
    yield points[-1]


class Pair(NamedTuple):
    """What was measured from one host to another. ``weight``: higher is worse; ``text`` with its unit."""

    source: str
    target: str
    weight: float
    text: str
    bad: bool = False


class PairChart(NamedTuple):
    """One measure between hosts. ``unit`` of the weights; ``steps``: names of weights 0, 1, 2 … where they are no
    quantity; ``higher_is_better``: of a quantity; ``usual``: the weight of one where most are well."""

    name: str
    unit: str
    pairs: tuple[Pair, ...]
    steps: tuple[str, ...] = ()
    higher_is_better: bool = False
    usual: float | None = None


class PairCharts(NamedTuple):
    """All measures between hosts, those in which something is bad first; ``hosts`` in the order of the ranks."""

    hosts: tuple[str, ...]
    charts: tuple[PairChart, ...]
    left_out: int


OUTCOMES = ("open", "refused", "unanswered", "stranger", "unresolved", "unroutable", "silent")
"""How a connection ended, from good to bad."""


def pairs_of(job: Job | None, report: Report | None = None) -> PairCharts | None:
    """What probes measured between hosts; ``None`` where none ran. What is slow is bad where ``report`` blames it."""
    if job is None:
        return None
    found = (chart for chart in _charts(job, _blamed_hosts(report)) if chart.pairs)
    charts = tuple(sorted(found, key=lambda chart: not any(pair.bad for pair in chart.pairs)))
    named = dict.fromkeys(host.name for host in job.hosts)
    met = {name for chart in charts for pair in chart.pairs for name in (pair.source, pair.target)}
    hosts = [name for name in (*named, *sorted(met - set(named))) if name in met]
    shown = set(hosts[:MOST_HOSTS])
    if len(hosts) < _LEAST_HOSTS:
        return None
    kept = tuple(chart._replace(pairs=tuple(_within(chart.pairs, shown))) for chart in charts)
    return PairCharts(tuple(hosts[:MOST_HOSTS]), kept, len(hosts) - len(shown))


_LEAST_HOSTS = 2


def _within(pairs: Iterable[Pair], hosts: set[str]) -> Iterator[Pair]:
    return (pair for pair in pairs if pair.source in hosts and pair.target in hosts)


def _blamed_hosts(report: Report | None) -> list[frozenset[str]]:
    """The hosts of each finding about the network."""
    if report is None:
        return []
    story = narrative_of(report)
    told = [*((story.primary,) if story.primary else ()), *story.followed, *story.others]
    return [frozenset(one.finding.hosts) for one in told if one.result.family == "network"]


def _charts(job: Job, blamed: Sequence[frozenset[str]]) -> Iterator[PairChart]:
    yield PairChart("connections", "", _reached(job), steps=OUTCOMES)
    paths = [(host.name, sample) for host in job.hosts if (facts := host.find(PathFacts)) for sample in facts.samples]
    yield PairChart("round trip", "ms", _measured(paths, lambda path: _times(path.round_trip, 1e3), _milliseconds))
    yield _transferred(job, blamed)
    yield _exchanged(job, blamed)
    looks = _measured(paths, lambda path: _times(path.forward_lookup, 1e3), _milliseconds)
    yield PairChart("name look-up", "ms", looks)
    yield PairChart("full-size packets", "", tuple(_sized(paths)), steps=("arrive", "do not arrive"))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _milliseconds(value: float) -> str:
    return f"{value:.3g} ms"


def _reached(job: Job) -> tuple[Pair, ...]:
    """The worst connection of each pair."""
    worst: dict[tuple[str, str], Reach] = {}
    for rank in job.ranks:
        facts = rank.find(ReachFacts)
        for attempt in facts.attempts if facts else ():
            key = (rank.host.name, attempt.peer)
            if key not in worst or _weight(attempt) > _weight(worst[key]):
                worst[key] = attempt
    return tuple(
        Pair(source, target, _weight(one), f"{one.outcome}, {one.address}:{one.port}", one.outcome != "open")
        for (source, target), one in worst.items()
    )


def _weight(attempt: Reach) -> int:
    return OUTCOMES.index(attempt.outcome)


def _measured(
    paths: Iterable[tuple[str, PathSample]],
    value: Callable[[PathSample], float | None],
    words: Callable[[float], str],
) -> tuple[Pair, ...]:
    found = ((host, path.peer, value(path)) for host, path in paths)
    return tuple(
        Pair(host, peer, number, words(number))
        for host, peer, number in found
        if number is not None and math.isfinite(number)
    )


_SLOW_SHARE = 0.6
"""Of the usual bandwidth, below which a transfer of a blamed host is bad; those to its other peers may be well."""


def _transferred(job: Job, blamed: Sequence[frozenset[str]]) -> PairChart:
    """The least bandwidth that was measured from each host to each other."""
    least: dict[tuple[str, str], float] = {}
    for host in job.hosts:
        facts = host.find(TransferFacts)
        for sample in facts.samples if facts else ():
            if sample.bandwidth is not None:
                key = (host.name, sample.peer)
                least[key] = min(sample.bandwidth, least.get(key, sample.bandwidth))
    return _bandwidth_chart("bandwidth", least, blamed)


def _exchanged(job: Job, blamed: Sequence[frozenset[str]]) -> PairChart:
    """The least bandwidth of messages over the back end of the job, from the ranks of each host to those of others."""
    hosts = {rank.number: rank.host.name for rank in job.ranks}
    backends, least = set(), dict[tuple[str, str], float]()
    for rank in job.ranks:
        facts = rank.find(CollectiveFacts)
        if facts is None:
            continue
        for one in facts.exchanges:
            source = hosts.get(one.source, rank.host.name)
            if source != rank.host.name and one.seconds > 0:
                backends.add(facts.backend or "")
                key = (source, rank.host.name)
                least[key] = min(one.bytes / one.seconds, least.get(key, math.inf))
    return _bandwidth_chart(f"messages over {'/'.join(sorted(backends))}", least, blamed)


def _bandwidth_chart(name: str, least: Mapping[tuple[str, str], float], blamed: Sequence[frozenset[str]]) -> PairChart:
    better = sorted(least.values())[len(least) // 2 :]
    usual = median(better) if better else 0.0
    pairs = tuple(
        Pair(*way, value, f"{byte_size(value)}/s", value < _SLOW_SHARE * usual and _is_blamed(way, blamed))
        for way, value in least.items()
    )
    return PairChart(name, "B/s", pairs, higher_is_better=True, usual=usual)


def _is_blamed(way: tuple[str, str], blamed: Iterable[frozenset[str]]) -> bool:
    """Whether a finding is about this way: about one of its hosts, or about several among which both are."""
    ends = frozenset(way)
    return any(hosts & ends if len(hosts) == 1 else ends <= hosts for hosts in blamed)


def _sized(paths: Iterable[tuple[str, PathSample]]) -> Iterator[Pair]:
    for host, path in paths:
        if path.full_size_arrived is not None:
            lost = not path.full_size_arrived
            yield Pair(host, path.peer, float(lost), "do not arrive" if lost else "arrive", lost)

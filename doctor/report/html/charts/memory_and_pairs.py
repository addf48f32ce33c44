"""The charts of memory and of pairs of hosts, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from doctor.core.facts import CollectiveFacts, PathFacts, PathSample, Reach, ReachFacts, RunMemoryFacts, TransferFacts
from doctor.core.job import Job
from doctor.core.text import byte_size
from doctor.report.narrative import Narrative

MOST_LINES = 8
"""Ranks up to which the memory of each is a line; of more, those that findings name and the one with the highest peak,
and the others are a band."""
MOST_POINTS = 200
"""Points of one line; of more, the highest of each interval."""
ALL_POINTS = 3_000
"""Points of all lines, so that the page stays small."""
BAND_POINTS = 60
"""Points of a band."""
MOST_HOSTS = 32
"""Hosts up to which each pair has a cell; of more, consecutive hosts share a row and a column."""
MOST_PAIRS = 20
"""Pairs in a table, worst first."""

MEMORY = {
    "reserved": "device, reserved by torch",
    "allocated": "device, allocated by tensors",
    "device_used": "device, used by all processes",
    "resident": "host, this process",
    "workers": "host, its data workers",
    "host_available": "host, available",
}
"""Fields of a sample, and their labels."""
OUTCOMES = ("open", "refused", "unanswered", "stranger", "unresolved", "unroutable", "silent")
"""Outcomes of a connection attempt, from good to bad."""
_SLOW_SHARE = 0.6
"""Share of the usual bandwidth below which a transfer of a blamed host is bad; others of that host may be healthy."""


class MemoryLine(NamedTuple):
    """The memory of a rank: ``points`` of (step, bytes)."""

    rank: int
    blamed: bool
    points: tuple[tuple[int, int], ...]

    @property
    def highest(self) -> tuple[int, int]:
        """The point with the most bytes."""
        return max(self.points, key=lambda point: point[1])


class MemoryBand(NamedTuple):
    """Bytes of the other ranks around a step."""

    step: int
    lowest: int
    median: int
    highest: int


class MemoryTableRow(NamedTuple):
    """A row of the table: bytes at first, at most, and at last; ``step``: of the most, if it is one rank's."""

    name: str
    first: int
    highest: int
    step: int | None
    last: int


class MemoryChart(NamedTuple):
    """One quantity: ``field`` of :data:`MEMORY`; ``limit``: bytes of the device; ``steps``: the first and the last.

    ``others``: the number of ranks in the band; ``rows``: of the table."""

    field: str
    name: str
    lines: tuple[MemoryLine, ...]
    limit: int | None
    steps: tuple[int, int]
    band: tuple[MemoryBand, ...]
    others: int
    rows: tuple[MemoryTableRow, ...]


def memory_of(story: Narrative, job: Job | None) -> tuple[MemoryChart, ...]:
    """Return a chart for each quantity that any rank sampled while it ran."""
    if job is None:
        return ()
    blamed = {rank for one in story.faults if one.result.family == "memory" for rank in one.finding.ranks}
    if not blamed and story.primary is not None:
        blamed = set(story.primary.finding.ranks)
    sampled = [(rank.number, used) for rank in job.ranks if (used := rank.find(RunMemoryFacts)) and used.samples]
    fields = [
        field for field in MEMORY if any(getattr(sample, field) for _, used in sampled for sample in used.samples)
    ]
    return tuple(_memory_chart(field, sampled, blamed, len(fields)) for field in fields)


def _memory_chart(
    field: str, sampled: Sequence[tuple[int, RunMemoryFacts]], blamed: set[int], charts: int
) -> MemoryChart:
    most = max(20, min(MOST_POINTS, ALL_POINTS // (max(1, min(len(sampled), MOST_LINES)) * charts)))
    every = [
        MemoryLine(rank, rank in blamed, points)
        for rank, used in sampled
        if (points := tuple((one.step, value) for one in used.samples if (value := getattr(one, field)) is not None))
    ]
    apart = set(_apart(every))
    others = [line for line in every if line.rank not in apart]
    lines = [line._replace(points=tuple(_thinned(line.points, most))) for line in every if line.rank in apart]
    steps = [step for line in every for step, _ in (line.points[0], line.points[-1])]
    between = (min(steps), max(steps))
    totals = (
        [used.total for _, used in sampled if used.total] if field in ("reserved", "allocated", "device_used") else []
    )
    rows = (*map(_row, sorted(lines, key=lambda line: line.rank)), *_rows_of_others(others))
    band = tuple(_band(others, *between))
    lines = sorted(lines, key=lambda line: line.rank)
    limit = min(totals, default=None)
    return MemoryChart(field, MEMORY[field], tuple(lines), limit, between, band, len(others), rows)


def _apart(lines: Sequence[MemoryLine]) -> list[int]:
    """Return the ranks whose memory is drawn as a line."""
    ordered = [line.rank for line in sorted(lines, key=lambda line: (not line.blamed, -line.highest[1]))]
    if len(lines) <= MOST_LINES:
        return ordered
    named = sum(line.blamed for line in lines)
    return ordered[: min(named, MOST_LINES - 1) + 1]


def _row(line: MemoryLine) -> MemoryTableRow:
    step, most = line.highest
    return MemoryTableRow(f"rank {line.rank}", line.points[0][1], most, step, line.points[-1][1])


def _rows_of_others(lines: Sequence[MemoryLine]) -> Iterator[MemoryTableRow]:
    """Return the lowest, the median and the highest of each column."""
    if not lines:
        return
    columns = [
        sorted(column) for column in zip(*((one.first, one.highest, one.last) for one in map(_row, lines)), strict=True)
    ]
    for name, position in (("lowest", 0), ("median", len(lines) // 2), ("highest", len(lines) - 1)):
        first, highest, last = (column[position] for column in columns)
        yield MemoryTableRow(f"{len(lines)} other ranks, {name}", first, highest, None, last)


def _band(lines: Sequence[MemoryLine], first: int, last: int) -> Iterator[MemoryBand]:
    """Return the lowest, median and highest rank of each interval of steps; a rank counts with its peak there."""
    width = max(1, -(-(last - first + 1) // BAND_POINTS))
    peaks: dict[int, dict[int, int]] = {}
    for line in lines:
        for step, count in line.points:
            ranks = peaks.setdefault((step - first) // width, {})
            ranks[line.rank] = max(count, ranks.get(line.rank, 0))
    for interval, ranks in sorted(peaks.items()):
        values = sorted(ranks.values())
        yield MemoryBand(
            min(first + interval * width + width // 2, last), values[0], values[len(values) // 2], values[-1]
        )


def _thinned(points: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Return at most ``most`` points: the highest of each interval, and the last."""
    if len(points) <= most:
        yield from points
        return
    width = -(-len(points) // (most - 1))
    for start in range(0, len(points) - 1, width):
        yield max(points[start : start + width], key=lambda point: point[1])
    yield points[-1]


class Pair(NamedTuple):
    """A measurement from one host to another. ``weight``: higher is worse; ``text``: the value with its unit."""

    source: str
    target: str
    weight: float
    text: str
    bad: bool = False


class PairChart(NamedTuple):
    """One quantity between hosts. ``unit`` of the weights; ``steps``: names of the weights 0, 1, 2 … of a category;
    ``higher_is_better``: whether larger weights are better; ``usual``: the weight of a healthy pair. ``worst``: the
    pairs of the table; ``measured``: the number of all."""

    name: str
    unit: str
    pairs: tuple[Pair, ...]
    steps: tuple[str, ...] = ()
    higher_is_better: bool = False
    usual: float | None = None
    worst: tuple[Pair, ...] = ()
    measured: int = 0


class PairCharts(NamedTuple):
    """All quantities between hosts, those with bad pairs first; ``hosts``: the rows and columns in the order of the
    ranks, each of which is ``together`` consecutive hosts."""

    hosts: tuple[str, ...]
    charts: tuple[PairChart, ...]
    together: int


def pairs_of(story: Narrative, job: Job | None) -> PairCharts | None:
    """Return what probes measured between hosts, or ``None`` if none ran. Slow pairs that a finding names are bad."""
    if job is None:
        return None
    blamed = [frozenset(one.finding.hosts) for one in story.faults if one.result.family == "network"]
    found = (chart for chart in _charts(job, blamed) if chart.pairs)
    charts = tuple(sorted(found, key=lambda chart: not any(pair.bad for pair in chart.pairs)))
    named = dict.fromkeys(host.name for host in job.hosts)
    met = {name for chart in charts for pair in chart.pairs for name in (pair.source, pair.target)}
    hosts = [name for name in (*named, *sorted(met - set(named))) if name in met]
    if len(hosts) < 2:
        return None
    together = -(-len(hosts) // MOST_HOSTS)
    blocks = [hosts[start : start + together] for start in range(0, len(hosts), together)]
    rows = tuple(block[0] if len(block) == 1 else f"{block[0]} … {block[-1]}" for block in blocks)
    row_of = {host: row for row, block in zip(rows, blocks, strict=True) for host in block}
    return PairCharts(rows, tuple(_cells(chart, row_of, together) for chart in charts), together)


def _cells(chart: PairChart, row_of: Mapping[str, str], together: int) -> PairChart:
    """Return the chart with the worst pair of each cell, and the worst pairs of all."""
    ordered = sorted(chart.pairs, key=lambda pair: pair.weight, reverse=not chart.higher_is_better)
    listed = chart._replace(worst=tuple(ordered[:MOST_PAIRS]), measured=len(ordered))
    if together == 1:
        return listed
    cells: dict[tuple[str, str], Pair] = {}
    for pair in ordered:
        cell = (row_of[pair.source], row_of[pair.target])
        worst = cells.setdefault(cell, pair._replace(source=cell[0], target=cell[1]))
        if pair.bad and not worst.bad:
            cells[cell] = worst._replace(bad=True)
    return listed._replace(pairs=tuple(cells.values()))


def _charts(job: Job, blamed: Sequence[frozenset[str]]) -> Iterator[PairChart]:
    yield PairChart("connections", "", _reached(job), steps=OUTCOMES)
    paths = [(host.name, sample) for host in job.hosts if (facts := host.find(PathFacts)) for sample in facts.samples]
    yield PairChart("round trip", "ms", _milliseconds(paths, "round_trip"))
    yield _transferred(job, blamed)
    yield _exchanged(job, blamed)
    yield PairChart("name lookup", "ms", _milliseconds(paths, "forward_lookup"))
    steps = ("received", "lost")
    sized = (
        (host, path.peer, not path.full_size_arrived) for host, path in paths if path.full_size_arrived is not None
    )
    lost = tuple(Pair(host, peer, float(is_lost), steps[is_lost], is_lost) for host, peer, is_lost in sized)
    yield PairChart("full-size packets", "", lost, steps=steps)


def _reached(job: Job) -> tuple[Pair, ...]:
    worst: dict[tuple[str, str], tuple[int, Reach]] = {}
    for rank in job.ranks:
        facts = rank.find(ReachFacts)
        for attempt in facts.attempts if facts else ():
            key = (rank.host.name, attempt.peer)
            weight = OUTCOMES.index(attempt.outcome)
            if key not in worst or weight > worst[key][0]:
                worst[key] = (weight, attempt)
    return tuple(
        Pair(source, target, weight, f"{one.outcome}, {one.address}:{one.port}", one.outcome != "open")
        for (source, target), (weight, one) in worst.items()
    )


def _milliseconds(paths: Iterable[tuple[str, PathSample]], field: str) -> tuple[Pair, ...]:
    found = ((host, path.peer, getattr(path, field)) for host, path in paths)
    return tuple(
        Pair(host, peer, 1e3 * seconds, f"{1e3 * seconds:.3g} ms")
        for host, peer, seconds in found
        if seconds is not None and math.isfinite(seconds)
    )


def _transferred(job: Job, blamed: Sequence[frozenset[str]]) -> PairChart:
    least: dict[tuple[str, str], float] = {}
    for host in job.hosts:
        facts = host.find(TransferFacts)
        for sample in facts.samples if facts else ():
            if sample.bandwidth is not None:
                key = (host.name, sample.peer)
                least[key] = min(sample.bandwidth, least.get(key, sample.bandwidth))
    return _bandwidth_chart("bandwidth", least, blamed)


def _exchanged(job: Job, blamed: Sequence[frozenset[str]]) -> PairChart:
    """Return the least bandwidth of messages over the job's backend, from the ranks of each host to those of others."""
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
        Pair(*path, value, f"{byte_size(value)}/s", value < _SLOW_SHARE * usual and _is_blamed(path, blamed))
        for path, value in least.items()
    )
    return PairChart(name, "B/s", pairs, higher_is_better=True, usual=usual)


def _is_blamed(path: tuple[str, str], blamed: Iterable[frozenset[str]]) -> bool:
    """Whether a finding names only one host of this path, or both of them."""
    ends = frozenset(path)
    return any(hosts & ends if len(hosts) == 1 else ends <= hosts for hosts in blamed)

"""Many lanes of a timeline as one band: the share of them that did each thing, by time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from doctor.report.html.charts.rank_timeline import MARKS, SPANS, Mark, Span, Timeline

BEFORE = 80
"""Columns before the part that is shown first."""
SHOWN = 240
"""Columns of that part."""
CALLS = ("call", "open")
"""Kinds of spans that a rank is in besides another."""


class BandColumn(NamedTuple):
    """A part of the period: where it begins and ends, and the share of the lanes in each kind of span (0 to 1)."""

    begin: float
    end: float
    shares: dict[str, float]


def columns_of(timeline: Timeline) -> list[BandColumn]:
    """Return the columns of the band of the other lanes; finer from the focus on."""
    edges = _edges(timeline)
    columns = [BandColumn(begin, end, {}) for begin, end in itertools.pairwise(edges)]
    for lane in timeline.others:
        for span in _undoubled(lane.spans):
            _add(columns, timeline, span, 1 / len(timeline.others))
    return columns


def marks_of(timeline: Timeline) -> list[tuple[Mark, int]]:
    """Return the gravest mark of each column, and how many marks of its kind the column has."""
    edges = _edges(timeline)
    found: dict[int, list[Mark]] = {}
    for lane in timeline.others:
        for mark in lane.marks:
            found.setdefault(_column(timeline, mark.at, len(edges) - 1), []).append(mark)
    gravest = [min(marks, key=lambda mark: (_GRAVITY[mark.kind], mark.at)) for marks in found.values()]
    return [
        (one, sum(mark.kind == one.kind for mark in marks)) for one, marks in zip(gravest, found.values(), strict=True)
    ]


_GRAVITY = {kind: number for number, kind in enumerate(MARKS)}


def _undoubled(spans: Iterable[Span]) -> Sequence[Span]:
    """Return the spans without the period of the log, if others say more."""
    kept = list(spans)
    return [span for span in kept if span.kind != "log"] or kept


def _edges(timeline: Timeline) -> list[float]:
    begin, focus, end = timeline.begin, timeline.focus, max(timeline.end, timeline.begin + 1e-3)
    before = [begin + (focus - begin) * number / BEFORE for number in range(BEFORE)] if focus > begin else []
    return [*before, *(focus + (end - focus) * number / SHOWN for number in range(SHOWN + 1))]


def _column(timeline: Timeline, at: float, columns: int) -> int:
    before = columns - SHOWN
    if at < timeline.focus:
        return min(int((at - timeline.begin) / (timeline.focus - timeline.begin) * before), before - 1)
    length = max(timeline.end - timeline.focus, 1e-3)
    return min(before + int((at - timeline.focus) / length * SHOWN), columns - 1)


def _add(columns: Sequence[BandColumn], timeline: Timeline, span: Span, weight: float) -> None:
    first, last = (_column(timeline, at, len(columns)) for at in (span.begin, span.end))
    for column in columns[first : last + 1]:
        part = (min(span.end, column.end) - max(span.begin, column.begin)) / (column.end - column.begin)
        if part > 0:
            column.shares[span.kind] = column.shares.get(span.kind, 0.0) + weight * part


class BandBlock(NamedTuple):
    """A rectangle of the band: from one moment to another, between two heights, counted from the bottom."""

    begin: float
    end: float
    low: int
    high: int


def blocks_of(columns: Sequence[BandColumn], *, calls: bool, steps: int) -> dict[str, list[BandBlock]]:
    """Return the rectangles of each kind, stacked in the order of :data:`SPANS`, in ``steps`` of height; neighbors of
    the same height are one rectangle."""
    blocks: dict[str, list[BandBlock]] = {}
    kinds = [kind for kind in SPANS if (kind in CALLS) == calls]
    for column in columns:
        below = 0.0
        for kind in kinds:
            share = column.shares.get(kind, 0.0)
            low, high = round(steps * min(below, 1.0)), round(steps * min(below + share, 1.0))
            below += share
            if high > low:
                _extend(blocks.setdefault(kind, []), BandBlock(column.begin, column.end, low, high))
    return blocks


def _extend(row: list[BandBlock], block: BandBlock) -> None:
    if row and row[-1].end == block.begin and row[-1][2:] == block[2:]:
        row[-1] = row[-1]._replace(end=block.end)
    else:
        row.append(block)

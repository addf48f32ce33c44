"""The timeline of ranks as plain data: its lanes, and the period that is shown first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from doctor.core.job import Job
from doctor.report.html.charts.lanes import MOST_LANES, STUCK, Lane, Mark, Span, lanes_of
from doctor.report.narrative import Narrative


class Timeline(NamedTuple):
    """All lanes, and the period that is shown first, ``focus`` to ``end``.

    ``first_at``: when the primary finding began, if that is known; ``left_out``: the number of lanes not drawn."""

    lanes: tuple[Lane, ...]
    begin: float
    end: float
    focus: float
    first_at: float | None
    left_out: int

    @property
    def marks(self) -> list[tuple[Lane, Mark]]:
        """The evidence of findings, and errors, in the order of time."""
        marks = [(lane, mark) for lane in self.lanes for mark in lane.marks if mark.kind != "message"]
        return sorted(marks, key=lambda one: one[1].at)


def timeline_of(story: Narrative, job: Job | None) -> Timeline | None:
    """Return the timeline of all ranks, or ``None`` if records, recorders and logs of ranks have no times."""
    if job is None:
        return None
    lanes = lanes_of(job, story)
    if not any(lane.rank is not None and (lane.spans or lane.marks) for lane in lanes):
        return None
    shown = _chosen(lanes)
    spans = [span for lane in shown for span in lane.spans]
    marks = [mark for lane in shown for mark in lane.marks]
    begin = min(one[0] for one in (*spans, *marks))
    end = max(*(span.end for span in spans), *(mark.at for mark in marks), begin)
    first_at = min((mark.at for mark in marks if mark.kind == "first"), default=None)
    focus = _focus(first_at, spans, begin, end)
    return Timeline(tuple(shown), begin, end, focus, first_at, len(lanes) - len(shown))


def _chosen(lanes: Sequence[Lane]) -> list[Lane]:
    """Return at most :data:`MOST_LANES`: first those of blamed ranks and those with errors, then every n-th."""
    if len(lanes) <= MOST_LANES:
        return list(lanes)
    telling = [lane for lane in lanes if lane.blamed or any(mark.kind != "message" for mark in lane.marks)]
    chosen = {id(lane) for lane in telling[: MOST_LANES * 3 // 4]}
    rest = [lane for lane in lanes if id(lane) not in chosen]
    step = -(-len(rest) // (MOST_LANES - len(chosen)))
    chosen |= {id(lane) for lane in rest[::step]}
    return [lane for lane in lanes if id(lane) in chosen]


def _focus(first_at: float | None, spans: Sequence[Span], begin: float, end: float) -> float:
    """Return the start of the period to show: shortly before the first fault, or ``begin`` if that is not far."""
    starts = [span.begin for span in spans if span.kind in STUCK]
    moments = [at for at in (first_at, min(starts, default=None)) if at is not None]
    if not moments:
        return begin
    focus = max(begin, min(moments) - _BEFORE * (end - min(moments)) - _LEAST)
    return focus if focus - begin > _MOST_SHOWN * (end - begin) else begin


_BEFORE = 0.5
"""Period shown before the first fault, as a share of the period after it."""
_LEAST = 2.0
"""Least seconds shown before the first fault."""
_MOST_SHOWN = 0.3
"""Least share of the whole period that must be skipped for the chart to start later."""

"""The chart of ranks by time, as plain data: its lanes, and what of the time is worth looking at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from doctor.core.job import Job
from doctor.core.report_document import Report
from doctor.report.html.charts.lanes import MOST_LANES, STUCK, Lane, Mark, Span, lanes_of
from doctor.report.narrative import narrative_of


class Timeline(NamedTuple):
    """All lanes, and the moments between which they are shown at first. ``first_at``: when it began, as far as known;
    ``left_out``: lanes that are not drawn."""

    lanes: tuple[Lane, ...]
    begin: float
    end: float
    focus: float
    first_at: float | None
    left_out: int

    @property
    def marks(self) -> list[tuple[Lane, Mark]]:
        """What findings rest on, and errors, in the order in which they happened."""
        marks = [(lane, mark) for lane in self.lanes for mark in lane.marks if mark.kind != "message"]
        return sorted(marks, key=lambda one: one[1].at)


def timeline_of(report: Report, job: Job | None) -> Timeline | None:
    """Where each rank was, as far as records, recorders and logs tell the time; ``None`` where they do not."""
    if job is None:
        return None
    lanes = lanes_of(job, narrative_of(report))
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
    """At most :data:`MOST_LANES`: first those to blame and those that something is known of, then every n-th."""
    if len(lanes) <= MOST_LANES:
        return list(lanes)
    telling = [lane for lane in lanes if lane.blamed or any(mark.kind != "message" for mark in lane.marks)]
    chosen = {id(lane) for lane in telling[: MOST_LANES * 3 // 4]}
    rest = [lane for lane in lanes if id(lane) not in chosen]
    step = -(-len(rest) // (MOST_LANES - len(chosen)))
    chosen |= {id(lane) for lane in rest[::step]}
    return [lane for lane in lanes if id(lane) in chosen]


def _focus(first_at: float | None, spans: Sequence[Span], begin: float, end: float) -> float:
    """From when on it is worth looking: a little before it began; the whole where that is most of the time anyway."""
    starts = [span.begin for span in spans if span.kind in STUCK]
    moments = [at for at in (first_at, min(starts, default=None)) if at is not None]
    if not moments:
        return begin
    focus = max(begin, min(moments) - _BEFORE * (end - min(moments)) - _LEAST)
    return focus if focus - begin > _MOST_SHOWN * (end - begin) else begin


_BEFORE = 0.5
"""How much of the time before it is shown, of the time since."""
_LEAST = 2.0
"""Seconds before it that are shown at least."""
_MOST_SHOWN = 0.3
"""The share of the whole time that must be saved for the chart to begin later."""

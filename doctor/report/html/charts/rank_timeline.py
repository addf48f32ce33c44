"""The timeline of ranks as plain data: what each rank did and when, from records, recorders and logs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from doctor.core.facts import Event, PointInTime, ProgressFacts, RecorderFacts
from doctor.core.job import UNKNOWN_HOST, Job, Rank
from doctor.core.text import ranges
from doctor.report.narrative import Narrative, quotes
from doctor.report.rank_table import call_words, is_done, place_words

MOST_LANES = 32
"""Lanes up to which each is drawn."""
APART = 16
"""Lanes that are drawn apart if there are more than :data:`MOST_LANES`; the others are drawn as one band."""
MOST_ACTIVITIES = 40
"""Rows of the table of last activities."""
MOST_CALLS = 40
"""Newest collectives of a rank that are drawn."""
MOST_MESSAGES = 40
"""Messages of a rank that are drawn, besides the evidence of findings."""
ALL_DRAWN = 1_000
"""Collectives, and messages, of all lanes that are drawn, so that the report on a large job stays small."""
_LEAST_DRAWN = 6
_LONGEST = 200
"""Characters of a message in a chart."""

SPANS = {
    "work": "computing",
    "data": "waiting for data",
    "save": "checkpoint",
    "evaluation": "evaluation",
    "setup": "setup or teardown",
    "call": "collective",
    "open": "collective not completed",
    "still": "no progress",
    "log": "period of its log",
}
MARKS = {
    "first": "evidence of the root cause",
    "evidence": "evidence of another finding",
    "error": "error",
    "message": "message",
}
STUCK = ("still", "open")
"""Kinds of spans that did not end."""
_BEFORE = 0.5
"""Period shown before the first fault, as a share of the period after it."""
_LEAST = 2.0
"""Least seconds shown before the first fault."""
_MOST_SHOWN = 0.3
"""Least share of the whole period that must be skipped for the chart to start later."""
_KINDS = {"data": "data", "checkpoint": "save", "setup": "setup", "ended": "setup"}


class Span(NamedTuple):
    """What a rank did from ``begin`` to ``end`` (seconds since the epoch). ``kind``: a key of :data:`SPANS`."""

    begin: float
    end: float
    kind: str
    text: str


class Mark(NamedTuple):
    """A log event or failure. ``kind``: a key of :data:`MARKS`; ``place``: file and line."""

    at: float
    kind: str
    text: str
    place: str = ""


class Lane(NamedTuple):
    """A rank, or a host or launcher without a rank, by time. ``blamed``: the primary finding names it."""

    rank: int | None
    name: str
    blamed: bool
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]

    @property
    def last(self) -> Span | Mark | None:
        """The last span or mark: one that did not end, or else the one that began last; ``None`` without times."""
        ends: list[Span | Mark] = [*self.marks, *(span for span in self.spans if span.kind != "log")]
        return max(ends or self.spans, key=lambda one: (one.kind in STUCK, one[0]), default=None)


class LastActivity(NamedTuple):
    """The last activity of the lanes that ended with the same one. ``began``: the earliest and the latest of them."""

    lanes: tuple[Lane, ...]
    last: Span | Mark | None
    began: tuple[float, float] | None

    @property
    def blamed(self) -> bool:
        """Whether the primary finding names one of the lanes."""
        return any(lane.blamed for lane in self.lanes)

    @property
    def name(self) -> str:
        """The lane, or the ranks and other lanes without numbers."""
        if len(self.lanes) == 1:
            return self.lanes[0].name
        numbers = [lane.rank for lane in self.lanes if lane.rank is not None]
        return ", ".join(
            [f"ranks {ranges(numbers)}"] * bool(numbers) + [one.name for one in self.lanes if one.rank is None]
        )


class Timeline(NamedTuple):
    """All lanes, and the period that is shown first, ``focus`` to ``end``.

    ``others``: lanes that are drawn together; ``first_at``: when the primary finding began, if that is known."""

    lanes: tuple[Lane, ...]
    others: tuple[Lane, ...]
    begin: float
    end: float
    focus: float
    first_at: float | None

    @property
    def every(self) -> tuple[Lane, ...]:
        """The lanes that are drawn apart, and the others."""
        return (*self.lanes, *self.others)

    @property
    def marks(self) -> list[tuple[Lane, Mark]]:
        """The evidence of findings, and errors, in the order of time."""
        marks = [(lane, mark) for lane in self.every for mark in lane.marks if mark.kind != "message"]
        return sorted(marks, key=lambda one: one[1].at)

    @property
    def activities(self) -> list[LastActivity]:
        """What the lanes did last: one entry for all that did the same, those of the primary finding first, then those
        of the fewest lanes."""
        found = [_activity(lanes) for lanes in _by_activity(self.every).values()]
        return sorted(found, key=lambda one: (not one.blamed, len(one.lanes), one.began or (math.inf,)))


def timeline_of(story: Narrative, job: Job | None) -> Timeline | None:
    """Return the timeline of all ranks, or ``None`` if records, recorders and logs of ranks have no times."""
    if job is None:
        return None
    lanes = lanes_of(job, story)
    if not any(lane.rank is not None and (lane.spans or lane.marks) for lane in lanes):
        return None
    apart = _apart(lanes)
    spans = [span for lane in lanes for span in lane.spans]
    marks = [mark for lane in lanes for mark in lane.marks]
    begin = min(one[0] for one in (*spans, *marks))
    end = max(*(span.end for span in spans), *(mark.at for mark in marks), begin)
    first_at = min((mark.at for mark in marks if mark.kind == "first"), default=None)
    focus = _focus(first_at, spans, begin, end)
    lanes_apart = tuple(lane for number, lane in enumerate(lanes) if number in apart)
    others = tuple(lane for number, lane in enumerate(lanes) if number not in apart)
    return Timeline(lanes_apart, others, begin, end, focus, first_at)


def _apart(lanes: Sequence[Lane]) -> set[int]:
    """Return the positions of the lanes to draw apart. Of many, these are the lanes of blamed ranks, those whose end
    differs from that of most, and those with errors; others are added evenly."""
    if len(lanes) <= MOST_LANES:
        return set(range(len(lanes)))
    common = max(_by_activity(lanes).values(), key=len)[0].last
    loud = {number: any(mark.kind != "message" for mark in lane.marks) for number, lane in enumerate(lanes)}
    differs = {number: _words(lane.last) != _words(common) for number, lane in enumerate(lanes)}
    telling = [number for number, lane in enumerate(lanes) if lane.blamed or loud[number] or differs[number]]
    telling.sort(key=lambda number: (not lanes[number].blamed, not differs[number], number))
    chosen = set(telling[: APART * 3 // 4])
    rest = [number for number in range(len(lanes)) if number not in chosen]
    return chosen | set(rest[:: -(-len(rest) // (APART - len(chosen)))])


def _by_activity(lanes: Iterable[Lane]) -> dict[object, list[Lane]]:
    groups: dict[object, list[Lane]] = {}
    for lane in lanes:
        groups.setdefault(_words(lane.last), []).append(lane)
    return groups


def _words(last: Span | Mark | None) -> tuple[str, str] | None:
    return None if last is None else (last.kind, last.text)


def _activity(lanes: Sequence[Lane]) -> LastActivity:
    times = [lane.last[0] for lane in lanes if lane.last is not None]
    return LastActivity(tuple(lanes), lanes[0].last, (min(times), max(times)) if times else None)


def _focus(first_at: float | None, spans: Sequence[Span], begin: float, end: float) -> float:
    """Return the start of the period to show: shortly before the first fault, or ``begin`` if that is not far."""
    starts = [span.begin for span in spans if span.kind in STUCK]
    moments = [at for at in (first_at, min(starts, default=None)) if at is not None]
    if not moments:
        return begin
    focus = max(begin, min(moments) - _BEFORE * (end - min(moments)) - _LEAST)
    return focus if focus - begin > _MOST_SHOWN * (end - begin) else begin


class _LaneStyle(NamedTuple):
    """What decides how events are drawn. ``cited``: places of lines that findings quote -> the kind of their mark;
    ``blamed``: ranks that the primary finding names; ``began``: those whose own failure is the primary one; ``calls``
    and ``messages``: how many are drawn per rank."""

    cited: Mapping[str, str]
    blamed: frozenset[int]
    began: frozenset[int]
    calls: int
    messages: int


def lanes_of(job: Job, story: Narrative) -> list[Lane]:
    """Return a lane for each rank, in order, absent ones included; then for each host whose log names no rank."""
    style = _lane_style(job, story)
    events = _events_by_writer(job)
    logs = _logs(job)
    lanes = [_lane(rank, style, logs.get(rank.number, ()), events.pop(rank.number, ())) for rank in job.ranks]
    lanes += [Lane(rank, f"rank {rank}", rank in style.blamed, (), ()) for rank in job.absent]
    for writer, own in events.items():
        marks = tuple(_marks(own, style))
        if isinstance(writer, int):
            lanes.append(Lane(writer, f"rank {writer}", writer in style.blamed, (), marks))
        else:
            lanes.append(Lane(None, writer or "no rank", False, (), marks))
    return sorted(lanes, key=lambda lane: (lane.rank is None, lane.rank or 0))


def _lane_style(job: Job, story: Narrative) -> _LaneStyle:
    lanes = max(1, min(len(job.ranks), MOST_LANES))
    calls, messages = (max(_LEAST_DRAWN, min(most, ALL_DRAWN // lanes)) for most in (MOST_CALLS, MOST_MESSAGES))
    cited = {quote.place: "evidence" for one in (*story.followed, *story.others) for quote in quotes(one.finding)}
    if story.primary is None:
        return _LaneStyle(cited, frozenset(), frozenset(), calls, messages)
    own = {quote.place: "first" for quote in quotes(story.primary.finding)}
    blamed = frozenset(story.primary.finding.ranks)
    return _LaneStyle({**cited, **own}, blamed, frozenset() if own else blamed, calls, messages)


def _events_by_writer(job: Job) -> dict[int | str, list[Event]]:
    """Return events with a time, by rank, or else by host, or else by an empty name."""
    events: dict[int | str, list[Event]] = {}
    for event in job.evidence.events if job.evidence else ():
        if event.at is not None and math.isfinite(event.at):
            events.setdefault(event.rank if event.rank is not None else event.host or "", []).append(event)
    return events


def _lane(rank: Rank, style: _LaneStyle, logs: Iterable[Span], events: Iterable[Event]) -> Lane:
    spans = [*logs, *_progress_spans(rank), *_call_spans(rank, style.calls)]
    marks = (*_failure(rank, "first" if rank.number in style.began else "error"), *_marks(events, style))
    name = f"rank {rank.number}" + (f" · {rank.host.name}" if rank.host.name != UNKNOWN_HOST else "")
    finite = tuple(span for span in spans if math.isfinite(span.begin) and math.isfinite(span.end))
    return Lane(rank.number, name, rank.number in style.blamed, finite, marks)


def _logs(job: Job) -> dict[int, list[Span]]:
    """Return the period of each log that only one rank wrote."""
    spans: dict[int, list[Span]] = {}
    for file in job.evidence.files if job.evidence else ():
        if len(file.ranks) == 1 and file.first_at is not None and file.last_at is not None:
            spans.setdefault(file.ranks[0], []).append(Span(file.first_at, file.last_at, "log", file.path))
    return spans


def _progress_spans(rank: Rank) -> Iterator[Span]:
    """Return the points that the rank passed, each until the next one, the last one until the facts were taken."""
    progress = rank.find(ProgressFacts)
    if progress is None or progress.at is None:
        return
    stuck = progress.state in ("stalled", "silent", "stopped") and progress.idle is not None
    since = progress.at - (progress.idle or 0.0)
    until = since if stuck else progress.at
    timed = [(moment, moment.at) for moment in progress.recent if moment.at is not None and moment.at < until]
    ends = [at for _, at in timed[1:]] + [until] * bool(timed)
    for (moment, at), end in zip(timed, ends, strict=True):
        batch = f", batch {moment.batch}" if moment.batch is not None else ""
        yield Span(at, max(at, end), _span_kind(moment), place_words(moment.stage, moment.point) + batch)
    if stuck:
        text = f"{progress.state} for {progress.idle:.0f} s: {place_words(progress.stage, progress.point)}"
        yield Span(since, progress.at, "still", text)


def _span_kind(moment: PointInTime) -> str:
    if moment.stage in ("validate", "sanity", "test", "predict"):
        return "evaluation"
    return "setup" if moment.stage in ("setup", "teardown") else _KINDS.get(moment.point, "work")


def _call_spans(rank: Rank, most: int) -> Iterator[Span]:
    recorder = rank.find(RecorderFacts)
    if recorder is None:
        return
    progress = rank.find(ProgressFacts)
    calls = [(call, call.at) for call in recorder.collectives[-most:] if call.at is not None]
    newest = max((at for _, at in calls), default=0.0)
    end = max(progress.at if progress and progress.at else newest, newest)
    for call, at in calls:
        until, kind = (at + (call.seconds or 0.0), "call") if is_done(call) else (end, "open")
        yield Span(at, until, kind, call_words(call))


def _failure(rank: Rank, kind: str) -> Iterator[Mark]:
    progress = rank.find(ProgressFacts)
    failure = progress.failure if progress else None
    if failure is not None and failure.at is not None and math.isfinite(failure.at):
        first = (failure.message.strip().splitlines() or [failure.kind])[0]
        yield Mark(failure.at, kind, first[:_LONGEST])


def _marks(events: Iterable[Event], style: _LaneStyle) -> list[Mark]:
    """Return the evidence of findings, and errors; of many other messages, the first and the last ones."""
    marks = []
    for event in events:
        place = f"{event.file}:{event.line}"
        kind = style.cited.get(place) or ("error" if event.kind == "python.exception" else "message")
        marks.append(Mark(event.at or 0.0, kind, event.text[:_LONGEST], place))
    loud = [mark for mark in marks if mark.kind != "message"][: style.messages]
    quiet = [mark for mark in marks if mark.kind == "message"]
    half = style.messages // 2
    return [*loud, *(quiet if len(quiet) <= style.messages else (*quiet[:half], *quiet[-half:]))]

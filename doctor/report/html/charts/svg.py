"""Draws the charts of a page as SVG, which styles of the page color: no library and no script is needed to see them.

Horizontal positions are shares of the width, so that a chart fits any width with letters of one size; only lines, whose
points can't be shares, are in a viewport that is stretched. Each shape has its text as a ``title``.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from doctor.core.text import byte_size
from doctor.report.formatting import spelt_out
from doctor.report.html.charts.lane_band import blocks_of, columns_of, marks_of
from doctor.report.html.charts.memory_and_pairs import MemoryChart, MemoryLine, PairChart
from doctor.report.html.charts.rank_timeline import MARKS, SPANS, STUCK, Lane, Mark, Span, Timeline

if TYPE_CHECKING:
    from markupsafe import Markup

AXIS = 22
"""Pixels above the lanes, for the times."""
HEIGHT = 300
"""Pixels of a chart of memory."""
BAND = 72
"""Pixels of the band of the lanes that are not drawn apart."""
MOST_LABELED = 6
"""Hosts up to which each cell of a matrix has its value."""
MOST_TITLED = 8
"""Lanes up to which each span has its text; of more, only those that did not end."""
LEVELS = 5
"""Colors of cells, from good to bad."""
_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
_MOST_TICKS = 6
_LEAST_LABEL = 25.0
"""Percent of the width that a period without progress needs to bear its text."""
_SHAPES = {
    "first": "M0-8 8 0 0 8-8 0Z",
    "evidence": "M0-6 6 5-6 5Z",
    "error": "M-5-5H5V5H-5Z",
    "message": "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0Z",
}
"""The mark of each kind around its middle."""
_FLAT = ("call", "open")
"""Kinds of spans below what the rank did meanwhile."""


class Period(NamedTuple):
    """What a chart shows, in seconds after the start of the run: all of it, and from ``focus`` on first."""

    begin: float
    end: float
    focus: float

    def share(self, after: float) -> float:
        """Return the position of a moment, in percent of the width."""
        return 100 * (after - self.begin) / (self.end - self.begin)

    @property
    def zoom(self) -> float:
        """How many times wider than its frame the chart is if it shows only what follows the focus."""
        return (self.end - self.begin) / (self.end - self.focus)


def period_of(timeline: Timeline) -> Period:
    """Return the period of a timeline, with a little room at both ends."""
    length, focus = timeline.end - timeline.begin, timeline.focus - timeline.begin
    room = _room(length * 0.01)
    begin = -room if focus <= 0 else focus - _room((length - focus) * 0.02)
    return Period(-room, length + room, max(begin, -room))


def _room(seconds: float) -> float:
    return max(0.5, seconds)


def _ticks(timeline: Timeline, begin: float, end: float) -> list[tuple[float, str]]:
    step = next((one for one in _TICKS if (end - begin) / one <= _MOST_TICKS), (end - begin) / _MOST_TICKS)
    first, last = math.ceil((timeline.begin + begin) / step), math.floor((timeline.begin + end) / step)
    times = (number * step for number in range(first, last + 1))
    return [(at - timeline.begin, _time(at, step)) for at in times]


def _time(at: float, step: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return ""
    if step >= 43200:
        return str(moment.date())
    return moment.strftime("%H:%M:%S") + (f".{moment.microsecond // 10000:02d}" if step < 1 else "")


def lane_height(timeline: Timeline) -> int:
    """Return the pixels of a lane: less, the more lanes there are."""
    return next((pixels for most, pixels in ((12, 34), (32, 26), (72, 18)) if len(timeline.lanes) <= most), 14)


def timeline_svg(timeline: Timeline) -> Markup:
    """Return the lanes of a timeline, and the band of the others. The grid is drawn twice, for the whole run and for
    what follows the focus."""
    pitch = lane_height(timeline)
    height = AXIS + pitch * len(timeline.lanes) + BAND * bool(timeline.others)
    period = period_of(timeline)
    scale = _Scale(timeline, period, digits=2 + math.ceil(math.log10(period.zoom)))
    parts = [*_grid("all", timeline, scale, period.begin, height), *_rules(len(timeline.lanes), pitch)]
    if period.zoom > 1:
        parts += _grid("focus", timeline, scale, period.focus, height)
    if len(timeline.lanes) > MOST_TITLED:
        parts += _bare_spans(timeline, pitch, height, period)
    for number, lane in enumerate(timeline.lanes):
        parts += _lane(lane, AXIS + number * pitch, pitch, scale)
    if timeline.others:
        parts += _band(timeline, height - BAND, height, scale)
    if timeline.first_at is not None:
        at = scale.at(timeline.first_at)
        parts.append(_filled('<line class="first-at" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', at, AXIS, height))
    return _svg(height, parts)


class _Scale(NamedTuple):
    """Where moments are. ``digits``: of percents, more for a chart that is stretched."""

    timeline: Timeline
    period: Period
    digits: int

    def share(self, at: float) -> float:
        return self.period.share(at - self.timeline.begin)

    def at(self, at: float) -> str:
        return self.percent(self.share(at))

    def percent(self, share: float) -> str:
        return f"{share:.{self.digits}f}".rstrip("0").rstrip(".") + "%"


def _grid(name: str, timeline: Timeline, scale: _Scale, begin: float, height: int) -> Iterator[Markup]:
    yield _filled('<g class="ticks{}" data-view="{}">', " unused" if name == "focus" else "", name)
    for after, text in _ticks(timeline, begin, scale.period.end):
        at = scale.percent(scale.period.share(after))
        yield _filled('<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>', at, AXIS, height)
        yield _filled('<text class="tick" x="{}" y="14">{}</text>', at, text)
    yield _filled("</g>")


def _rules(lanes: int, pitch: int) -> Iterator[Markup]:
    path = "".join(f"M0 {AXIS + number * pitch}h9999" for number in range(lanes + 1))
    yield _filled('<path class="grid" d="{}"/>', path)


def _lane(lane: Lane, top: int, pitch: int, scale: _Scale) -> Iterator[Markup]:
    if not lane.spans and not lane.marks:
        yield _filled('<text class="tick none" x="8" y="{}">no timestamps</text>', top + pitch / 2 + 4)
    for span in lane.spans:
        yield from _span(span, top + 2, pitch - 4, scale)
    # The gravest marks are drawn last, above the others.
    for mark in sorted(lane.marks, key=lambda one: -_GRAVITY[one.kind]):
        yield _mark(mark, top + pitch / 2, scale)


def _bare_spans(timeline: Timeline, pitch: int, height: int, period: Period) -> Iterator[Markup]:
    """Draw all spans of a kind as one path, in a viewport that is stretched: a tenth of the text of rectangles."""
    paths: dict[str, list[str]] = {}
    for number, lane in enumerate(timeline.lanes):
        for span in lane.spans:
            if span.kind not in STUCK:
                left, right = (_WIDE * period.share(at - timeline.begin) / 100 for at in (span.begin, span.end))
                top, tall = _part(span.kind, AXIS + number * pitch + 2, pitch - 4)
                wide = f"{max(right - left, 0):.0f}"
                path = f"M{left:.0f} {top:.0f}h{wide}v{tall:.0f}h-{wide}z"
                paths.setdefault(span.kind, []).append(path)
    yield _filled(_STRETCHED, _WIDE, height)
    for kind in SPANS:
        if kind in paths:
            yield _filled('<path class="s-{}" d="{}"><title>{}</title></path>', kind, "".join(paths[kind]), SPANS[kind])
    yield _filled("</svg>")


def _band(timeline: Timeline, top: int, height: int, scale: _Scale) -> Iterator[Markup]:
    """Draw the share of the other lanes in each kind of span, and the gravest marks of each moment."""
    count = len(timeline.others)
    columns = columns_of(timeline)
    yield _filled(_STRETCHED, _WIDE, height)
    for calls, (low, tall) in ((False, _part("work", top + 4, BAND - 8)), (True, _part("call", top + 4, BAND - 8))):
        for kind, blocks in blocks_of(columns, calls=calls, steps=int(tall)).items():
            path = ""
            for block in blocks:
                left, right = (_WIDE * scale.share(at) / 100 for at in (block.begin, block.end))
                wide, down = f"{right - left:.0f}", low + tall - block.high
                path += f"M{left:.0f} {down:.0f}h{wide}v{block.high - block.low}h-{wide}z"
            most = round(count * max(column.shares.get(kind, 0.0) for column in columns))
            words = f"{SPANS[kind]}: at most {most} of {count} at once"
            yield _filled('<path class="s-{}" d="{}"><title>{}</title></path>', kind, path, words)
    yield _filled("</svg>")
    for mark, many in sorted(marks_of(timeline), key=lambda one: -_GRAVITY[one[0].kind]):
        text = mark.text if many == 1 else f"{mark.text}\nand {many - 1} more at this time"
        yield _mark(mark._replace(text=text), top + BAND / 2, scale)


_STRETCHED = '<svg width="100%" height="{1}" viewBox="0 0 {0} {1}" preserveAspectRatio="none">'
"""A viewport that is stretched to the width of the page."""
_WIDE = 100_000
"""Units of the width of a viewport that is stretched."""


def _part(kind: str, top: float, height: float) -> tuple[float, float]:
    """Return top and height of a span: collectives are below what the rank did meanwhile."""
    low, part = (0.0, 1.0) if kind == "log" else (0.72, 0.24) if kind in _FLAT else (0.0, 0.66)
    return top + low * height, part * height


_GRAVITY = {kind: number for number, kind in enumerate(MARKS)}


def _span(span: Span, top: float, height: float, scale: _Scale) -> Iterator[Markup]:
    if len(scale.timeline.lanes) > MOST_TITLED and span.kind not in STUCK:
        return
    y, tall = _part(span.kind, top, height)
    width = max(scale.share(span.end) - scale.share(span.begin), 0.0)
    yield _filled(
        '<rect class="s-{}" x="{}" y="{:.4g}" width="{}" height="{:.3g}"><title>{}</title></rect>',
        span.kind,
        scale.at(span.begin),
        y,
        scale.percent(width),
        tall,
        f"{SPANS[span.kind]}: {spelt_out(span.text)}\n{_clock(span.begin)}, {span.end - span.begin:.3g} s",
    )
    if span.kind == "still" and width * scale.period.zoom >= _LEAST_LABEL and height >= 14:
        text = '<text class="still" x="{}" dx="6" y="{:.4g}">{}</text>'
        yield _filled(text, scale.at(span.begin), top + 0.33 * height + 4, spelt_out(span.text))


def _mark(mark: Mark, middle: float, scale: _Scale) -> Markup:
    first_at = scale.timeline.first_at
    since = "" if first_at is None else f" ({mark.at - first_at:+.3f} s)"
    words = f"{MARKS[mark.kind]}: {mark.text}\n{_clock(mark.at)}{since}\n{mark.place}".rstrip()
    template = '<svg class="m-{}" x="{}" y="{:.4g}"><path d="{}"><title>{}</title></path></svg>'
    return _filled(template, mark.kind, scale.at(mark.at), middle, _SHAPES[mark.kind], spelt_out(words))


def _clock(at: float) -> str:
    return _time(at, 0.01) or "unknown"


def legend_of(timeline: Timeline) -> list[tuple[Markup, str]]:
    """Return the kinds of spans and marks that a timeline has: a swatch, and the name."""
    kinds = {span.kind for lane in timeline.every for span in lane.spans}
    kinds |= {mark.kind for lane in timeline.every for mark in lane.marks}
    spans = ((kind, name, '<rect class="s-{}" y="3" width="14" height="10"/>') for kind, name in SPANS.items())
    marks = (
        (kind, name, f'<svg class="m-{{}}" x="7" y="8"><path d="{_SHAPES[kind]}"/></svg>')
        for kind, name in MARKS.items()
    )
    frame = '<svg width="16" height="16" aria-hidden="true">{}</svg>'
    return [(_filled(frame, _filled(shape, kind)), name) for kind, name, shape in (*spans, *marks) if kind in kinds]


def memory_svg(chart: MemoryChart) -> Markup:
    """Return the memory of each rank by step; the lines of blamed ranks are emphasized. Of many ranks, most are a band
    from the lowest to the highest, with the median as a line."""
    low, high = chart.steps
    highest = max([line.highest[1] for line in chart.lines] + [one.highest for one in chart.band])
    most = max(chart.limit or 0, highest, 1)

    def across(step: float) -> float:
        return (step - low) / max(high - low, 1)

    def down(count: float) -> float:
        return (HEIGHT - 40) * (1 - count / most) + 12

    parts = [*_byte_grid(most, down), *_step_labels(low, high)]
    points = [*_memory_band(chart, across, down), _filled('<g class="lines">')]
    for index, line in enumerate(sorted(chart.lines, key=lambda one: one.blamed)):
        points.append(_line(line, _ink(line, index, chart), across, down))
    points.append(_filled("</g>"))
    frame = '<svg x="0" y="0" width="100%" height="{0}" viewBox="0 0 1000 {0}" preserveAspectRatio="none">'
    parts += [_filled(frame, HEIGHT), *points, _filled("</svg>")]
    if chart.limit is not None:
        where = f"{down(chart.limit):.4g}"
        parts.append(_filled('<line class="first-at" x1="0" x2="100%" y1="{0}" y2="{0}"/>', where))
        text = f"limit: {byte_size(chart.limit)}"
        parts.append(_filled('<text class="tick limit" x="100%" y="{:.4g}">{}</text>', down(chart.limit) - 3, text))
    return _svg(HEIGHT, parts)


def _memory_band(chart: MemoryChart, across: Callable[[float], float], down: Callable[[float], float]) -> list[Markup]:
    if not chart.band:
        return []
    places = [
        (round(1000 * across(one.step)), *(round(down(value), 1) for value in (one.lowest, one.median, one.highest)))
        for one in chart.band
    ]
    if len(places) == 1:
        places.append((places[0][0] + 1, *places[0][1:]))
    upper = " ".join(f"{x} {high:g}" for x, _, _, high in places)
    lower = " ".join(f"{x} {low:g}" for x, low, _, _ in reversed(places))
    middle = " ".join(f"{x} {median:g}" for x, _, median, _ in places)
    words = f"{chart.others} other ranks: from the lowest to the highest"
    return [
        _filled('<polygon class="spread" points="{} {}"><title>{}</title></polygon>', upper, lower, words),
        _filled('<g class="lines"><polyline class="other" points="{}"><title>median</title></polyline></g>', middle),
    ]


FEW_LINES = 8
"""Lines up to which each has its own color."""


def _ink(line: MemoryLine, index: int, chart: MemoryChart) -> str:
    if line.blamed and not (chart.band == () and all(one.blamed for one in chart.lines)):
        return "blamed"
    has_blamed = any(one.blamed for one in chart.lines)
    return f"l{index + bool(chart.band)}" if len(chart.lines) <= FEW_LINES and not has_blamed else "other"


def memory_legend(chart: MemoryChart) -> list[tuple[str, str]]:
    """Return the classes of the lines that have their own color, and the names of their ranks."""
    ordered = sorted(chart.lines, key=lambda one: one.blamed)
    inks = [(_ink(line, index, chart), line) for index, line in enumerate(ordered)]
    named = [(ink, f"rank {line.rank}") for ink, line in inks if ink != "other"][:FEW_LINES]
    if chart.band:
        return [*named, ("other", f"{chart.others} other ranks: median, and range from lowest to highest")]
    return [*named, ("other", "other ranks")] if named and len(named) < len(inks) else named


def _line(line: MemoryLine, ink: str, across: Callable[[float], float], down: Callable[[float], float]) -> Markup:
    places = [(round(1000 * across(step)), round(down(count), 1)) for step, count in line.points]
    if len(places) == 1:
        places.append((places[0][0] + 1, places[0][1]))
    path = " ".join(f"{x} {y:g}" for x, y in places)
    step, count = line.highest
    words = f"rank {line.rank}: highest {byte_size(count)} at step {step}, last {byte_size(line.points[-1][1])}"
    return _filled('<polyline class="{}" points="{}"><title>{}</title></polyline>', ink, path, words)


def _byte_grid(most: float, down: Callable[[float], float]) -> Iterator[Markup]:
    step = 2.0 ** max(0, math.floor(math.log2(most)) - 2)
    count = 0.0
    while count <= most:
        place = f"{down(count):.4g}"
        yield _filled('<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/>', place)
        yield _filled('<text class="tick bytes" x="2" y="{:.4g}">{}</text>', down(count) - 3, byte_size(count))
        count += step


def _step_labels(low: int, high: int) -> Iterator[Markup]:
    middle = [(low + high) // 2] if high - low > 1 else []
    for position, step in zip(("start", "middle", "end"), (low, *(middle or [low]), high), strict=True):
        share = {"start": "0", "middle": "50%", "end": "100%"}[position]
        if (position == "middle" and not middle) or (position == "end" and high == low):
            continue
        text = f"step {step}"
        yield _filled('<text class="tick {}" x="{}" y="{}">{}</text>', position, share, HEIGHT - 6, text)


def pairs_svg(chart: PairChart, hosts: Sequence[str]) -> Markup:
    """Return a matrix: a row for each host that sent, a column for each that received. Bad pairs have a cross."""
    place = {host: number for number, host in enumerate(hosts)}
    size = len(hosts)
    pitch = next((pixels for most, pixels in ((12, 34), (32, 20)) if size <= most), 11)
    level = _leveled(chart)
    parts: list[Markup] = []
    if size <= MOST_LABELED:
        for pair in chart.pairs:
            left, top = 100 * place[pair.target] / size, pitch * place[pair.source]
            words = spelt_out(f"{pair.source} to {pair.target}: {pair.text}")
            rect = '<rect class="c{}" x="{:.2f}%" y="{}" width="{:.2f}%" height="{}"><title>{}</title></rect>'
            parts.append(_filled(rect, level(pair.weight), left, top, 100 / size, pitch, words))
            shown = f"{'✗ ' if pair.bad else ''}{pair.text if size <= 6 and not chart.steps else ''}".strip()
            if shown or chart.steps:
                text = '<text class="cell" x="{:.2f}%" y="{}">{}</text>'
                parts.append(_filled(text, left + 50 / size, top + pitch / 2 + 4, shown or "✓"))
        return _svg(pitch * size, parts)
    levels: dict[tuple[int, int], int] = {}
    for pair in chart.pairs:
        levels[place[pair.source], place[pair.target]] = level(pair.weight)
    for number in range(LEVELS):
        path = _runs(sorted(cell for cell, value in levels.items() if value == number))
        if path:
            parts.append(_filled('<path class="c{}" d="{}"/>', number, path))
    frame = '<svg width="100%" height="100%" viewBox="0 0 {0} {0}" preserveAspectRatio="none">'
    marks = [
        _filled('<text class="cell" x="{:.2f}%" y="{}">✗</text>', 100 * (place[one.target] + 0.5) / size, y)
        for one in chart.pairs
        if one.bad
        for y in [pitch * place[one.source] + pitch / 2 + 4]
    ]
    return _svg(pitch * size, [_filled(frame, size), *parts, _filled("</svg>"), *marks])


def _runs(cells: Iterable[tuple[int, int]]) -> str:
    """Return a path over cells (row, column) in order; neighbors of a row are one rectangle."""
    runs: list[tuple[int, int, int]] = []
    for row, column in cells:
        if runs and runs[-1][0] == row and sum(runs[-1][1:]) == column:
            runs[-1] = (row, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((row, column, 1))
    return "".join(f"M{column} {row}h{wide}v1h-{wide}z" for row, column, wide in runs)


def _leveled(chart: PairChart) -> Callable[[float], int]:
    """Return the color of a weight. The colors span at least a factor of two, because less is noise, and a tenth of
    what is usual, if that is known: one pair a thousand times slower would otherwise make all others look the same."""
    if chart.steps:
        return lambda weight: min(int(weight), LEVELS - 1)
    weights = [pair.weight for pair in chart.pairs]
    low, high = min(weights), max(weights)
    if chart.higher_is_better:
        low, high = (chart.usual / 10, chart.usual) if chart.usual else (min(low, high / 2), high)
    else:
        high = max(high, low * 2)

    def level(weight: float) -> int:
        share = min(max((weight - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        return min(int((1 - share if chart.higher_is_better and high > low else share) * LEVELS), LEVELS - 1)

    return level


def _svg(height: float, parts: Iterable[Markup]) -> Markup:
    from markupsafe import Markup

    return _filled('<svg width="100%" height="{}">{}</svg>', height, Markup("").join(parts))


def _filled(template: str, *values: object) -> Markup:
    """Return markup in which each value is escaped."""
    from doctor.report.html.assets import as_markup

    return as_markup(template).format(*values)

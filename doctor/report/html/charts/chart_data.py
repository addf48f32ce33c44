"""The charts of a page as the data that its script draws: short arrays, and every text once."""

from __future__ import annotations

from typing import Any

from doctor.report.formatting import spelt_out
from doctor.report.html.charts.lanes import MARKS, SPANS
from doctor.report.html.charts.memory_and_pairs import MemoryChart, PairChart, PairCharts
from doctor.report.html.charts.rank_timeline import Timeline


def chart_data(
    timeline: Timeline | None, memory: tuple[MemoryChart, ...], pairs: PairCharts | None
) -> dict[str, Any] | None:
    """What the script needs of the charts that there are; ``None`` where there is none."""
    data: dict[str, Any] = {}
    if timeline is not None:
        data["timeline"] = _timeline(timeline)
    if memory:
        data["memory"] = [_memory(chart) for chart in memory]
    if pairs is not None:
        data["pairs"] = {"hosts": [spelt_out(host) for host in pairs.hosts], "charts": _pairs(pairs)}
    return data or None


class _StringTable:
    """Every text once: a number stands for it."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Of ``text``, its control characters spelt out."""
        return self.known.setdefault(spelt_out(text), len(self.known))


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Spans as (lane, begin, end, kind, text), marks as (lane, at, kind, text, place); times in milliseconds after
    ``origin``, kinds and texts by number."""
    texts = _StringTable()
    span_kinds, mark_kinds = list(SPANS), list(MARKS)

    def after(at: float) -> int:
        return round((at - timeline.begin) * 1000)

    spans = [
        (number, after(span.begin), after(span.end), span_kinds.index(span.kind), texts.number(span.text))
        for number, lane in enumerate(timeline.lanes)
        for span in lane.spans
    ]
    marks = [
        (number, after(mark.at), mark_kinds.index(mark.kind), texts.number(mark.text), texts.number(mark.place))
        for number, lane in enumerate(timeline.lanes)
        for mark in lane.marks
    ]
    return {
        "origin": round(timeline.begin * 1000),
        "end": after(timeline.end),
        "focus": after(timeline.focus),
        "first": None if timeline.first_at is None else after(timeline.first_at),
        "lanes": [(spelt_out(lane.name), int(lane.blamed)) for lane in timeline.lanes],
        "kinds": span_kinds,
        "markKinds": mark_kinds,
        "names": {**SPANS, **MARKS},
        "spans": spans,
        "marks": marks,
        "texts": list(texts.known),
    }


def _memory(chart: MemoryChart) -> dict[str, Any]:
    lines = [(line.rank, int(line.blamed), line.points) for line in chart.lines]
    return {"name": chart.name, "limit": chart.limit, "lines": lines}


def _pairs(pairs: PairCharts) -> list[dict[str, Any]]:
    position = {host: number for number, host in enumerate(pairs.hosts)}
    return [_pair_chart(chart, position) for chart in pairs.charts]


def _pair_chart(chart: PairChart, position: dict[str, int]) -> dict[str, Any]:
    cells = [
        (position[pair.source], position[pair.target], pair.weight, spelt_out(pair.text), int(pair.bad))
        for pair in chart.pairs
    ]
    measure = {"name": chart.name, "unit": chart.unit, "steps": chart.steps, "cells": cells}
    return {**measure, "up": chart.higher_is_better, "usual": chart.usual}

"""Encodes the charts of a page for its script: short arrays, and each text once."""

from __future__ import annotations

from typing import Any

from doctor.report.formatting import spelt_out
from doctor.report.html.charts.memory_and_pairs import MemoryChart, PairChart, PairCharts
from doctor.report.html.charts.rank_timeline import MARKS, SPANS, Timeline


def chart_data(
    timeline: Timeline | None, memory: tuple[MemoryChart, ...], pairs: PairCharts | None
) -> dict[str, Any] | None:
    """Return the data of the charts, or ``None`` if there are none."""
    data: dict[str, Any] = {}
    if timeline is not None:
        data["timeline"] = _timeline(timeline)
    if memory:
        data["memory"] = []
        for chart in memory:
            lines = [(line.rank, int(line.blamed), line.points) for line in chart.lines]
            data["memory"].append({"name": chart.name, "limit": chart.limit, "lines": lines})
    if pairs is not None:
        position = {host: number for number, host in enumerate(pairs.hosts)}
        charts = [_pair_chart(one, position) for one in pairs.charts]
        data["pairs"] = {"hosts": [spelt_out(host) for host in pairs.hosts], "charts": charts}
    return data or None


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Encode spans as (lane, begin, end, kind, text) and marks as (lane, at, kind, text, place).

    Times are milliseconds after ``origin``; kinds and texts are numbers."""
    texts: dict[str, int] = {}
    span_kinds, mark_kinds = list(SPANS), list(MARKS)

    def after(at: float) -> int:
        return round((at - timeline.begin) * 1000)

    def numbered(text: str) -> int:
        return texts.setdefault(spelt_out(text), len(texts))

    spans = [
        (number, after(span.begin), after(span.end), span_kinds.index(span.kind), numbered(span.text))
        for number, lane in enumerate(timeline.lanes)
        for span in lane.spans
    ]
    marks = [
        (number, after(mark.at), mark_kinds.index(mark.kind), numbered(mark.text), numbered(mark.place))
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
        "texts": list(texts),
    }


def _pair_chart(chart: PairChart, position: dict[str, int]) -> dict[str, Any]:
    cells = [
        (position[pair.source], position[pair.target], pair.weight, spelt_out(pair.text), int(pair.bad))
        for pair in chart.pairs
    ]
    measure = {"name": chart.name, "unit": chart.unit, "steps": chart.steps, "cells": cells}
    return {**measure, "up": chart.higher_is_better, "usual": chart.usual}

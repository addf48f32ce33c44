"""Adds up where all of the time since the first training batch went, from logged events. Called by readers only."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from doctor.core.facts import TIME_PARTS, TimeSpan, time_part
from doctor.monitor.telemetry.event_log import ENDED, LoggedEvent, StageEntered

BATCHES, MOST_SPANS = 16, 32
"""Batches of a span at first, and the number of spans at which pairs of them are merged."""
UNMEASURED = TIME_PARTS.index("unmeasured")
WORK_IS_DONE = frozenset({"checkpoint", "batch-end", "epoch-end"})
"""Points that follow the work of a batch, besides its end and the start of another stage."""


@functools.lru_cache(1024)
def _place(stage: str, point: str) -> int:
    """Return the place of a part; cached, because a loop passes the same few points."""
    return TIME_PARTS.index(time_part(stage, point))


class TimeSpans:
    """The time of one rank by spans of batches, in bounded memory.

    The number of batches of a span depends on the number of batches alone, so that spans of several ranks coincide or
    are halves of one another.
    """

    def __init__(self) -> None:
        self._size = BATCHES
        self._rows: dict[int, _Row] = {}
        self._row = _Row()
        self._entered = -1
        self._part = 0
        self._stage = "setup"
        self._batch = -1
        self._at: float | None = None

    def take(self, events: Iterable[LoggedEvent], *, contiguous: bool = True) -> None:
        """Process ``events``; ``contiguous``: no events were lost before them."""
        part = self._part if contiguous else UNMEASURED
        last, stage, batch, row = self._at, self._stage, self._batch, self._row
        seconds, begin, end = row.seconds, *self._bounds()
        places: dict[str, int] = {}  # of the points of this stage
        for at, point, detail in events:
            if last is not None:
                seconds[part] += at - last
                last = at
            is_done = False
            if detail is None:
                is_done = point in WORK_IS_DONE
            elif detail is ENDED:
                is_done = True
            elif isinstance(detail, StageEntered):
                stage, places = detail.stage, {}
                is_done = stage != "train"
            elif detail[2] >= 0:  # type: ignore[index]  # bool is ENDED alone
                if stage != "train":
                    stage, places = "train", {}
                last = at if last is None and batch < 0 else last
                batch = detail[2]  # type: ignore[index]
                if not begin <= batch < end:
                    row = self._enter(batch)
                    seconds, begin, end = row.seconds, *self._bounds()
                row.batches += 1
            # What follows the work of a batch counts for the next one.
            if is_done and batch >= 0 and not begin <= batch + 1 < end:
                row = self._enter(batch + 1)
                seconds, begin, end = row.seconds, *self._bounds()
            found = places.get(point)
            part = places[point] = _place(stage, point) if found is None else found
        self._part, self._at, self._stage, self._batch = part, last, stage, batch

    def stop(self, now: float) -> None:
        """Count the time until ``now``, and none that follows."""
        if self._at is not None:
            self._row.seconds[self._part] += max(0.0, now - self._at)
            self._at = None

    def add_device(self, batch: int, seconds: float) -> None:
        """Add the seconds of a batch on its device, which are known some batches later."""
        row = self._rows.get(batch // self._size)
        if row is not None:
            row.device = (row.device or 0.0) + seconds

    def facts(self, now: float) -> tuple[TimeSpan, ...]:
        """Return the spans, with the time since the last event. For any thread."""
        size, open_row, since, part = self._size, self._row, self._at, self._part
        spans = []
        for place, row in sorted(self._rows.copy().items()):
            seconds = row.seconds.copy()
            if row is open_row and since is not None:
                seconds[part] += max(0.0, now - since)
            device = None if row.device is None else round(row.device, 4)
            spans.append(TimeSpan(place * size, row.batches, tuple(round(one, 4) for one in seconds), device))
        return tuple(spans)

    @property
    def size(self) -> int:
        """The number of batches of a span."""
        return self._size

    def _bounds(self) -> tuple[int, int]:
        """Return the first batch of the current span and that of the next one."""
        return self._entered * self._size, (self._entered + 1) * self._size

    def _enter(self, batch: int) -> _Row:
        """Return the row of ``batch``, which becomes the current one."""
        while batch // self._size >= MOST_SPANS:
            self._size *= 2
            merged: dict[int, _Row] = {}
            for place, row in self._rows.items():
                merged.setdefault(place // 2, _Row()).add(row)
            self._rows = merged
        place = batch // self._size
        if place not in self._rows:
            self._rows[place] = _Row()
        self._row, self._entered = self._rows[place], place
        return self._row


class _Row:
    """The sums of one span."""

    __slots__ = ("batches", "device", "seconds")

    def __init__(self) -> None:
        self.batches = 0
        self.seconds = [0.0] * len(TIME_PARTS)
        self.device: float | None = None

    def add(self, other: _Row) -> None:
        """Add the sums of another span."""
        self.batches += other.batches
        self.seconds = [mine + theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)]
        if other.device is not None:
            self.device = (self.device or 0.0) + other.device

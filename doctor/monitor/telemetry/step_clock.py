"""Time breakdown of training steps from logged events: one row of seconds per batch.

Medians are computed on request.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from doctor.core.clock import monotonic
from doctor.core.facts import StepFacts, Window
from doctor.monitor.telemetry.cuda_events import CudaEvent, EventFactory, event_factory
from doctor.monitor.telemetry.event_log import ENDED, LoggedEvent, StageEntered
from doctor.monitor.telemetry.time_spans import TimeSpans

WINDOW, KEPT = 20, 50
"""Batches per window, and number of windows that are kept."""
ROWS = WINDOW * (KEPT + 1)
"""One window more than is shown: the oldest one is being overwritten."""
PAIRS = 16
"""Pairs of events in progress: the number of batches a device can lag behind its host and still be timed."""

BEFORE, DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, OUTSIDE, UNKNOWN_WAIT, DEVICE, GRADIENTS, WAITED = range(11)
COLUMNS = 11
"""Columns of a row, in seconds. ``BEFORE``: from the start of a batch to its first point. ``OUTSIDE``: time outside
steps. ``UNKNOWN_WAIT``: not 0 if the start of the wait for data is unknown. ``GRADIENTS``: of ``BACKWARD``, and
``WAITED``: of ``OTHER``, 0 if they were not measured."""
PHASES = {"data": DATA, "forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
PHASES |= {"step": OTHER, "batch-end": OTHER}
"""The phase that follows a point. Any other point (a checkpoint, validation, the end of an epoch) is outside steps."""
PARTS = (BEFORE, DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER)
HALVES = (BEFORE, FORWARD, BACKWARD, OTHER)
NOTHING = array("d", [0.0] * COLUMNS)


class StepClock:
    """The clock of training batches.

    A row lasts from one batch's start to the next one's; its ``data`` is the wait for that next one. Time outside steps
    in between (validation, a checkpoint) is not counted. Without the point ``data``, the wait for the next batch is
    unknown, and the row only counts if a window has no better one. Points as in
    :class:`~doctor.core.facts.ProgressFacts`; without ``forward``, it is the time before ``backward``.

    ``device``: the clock of a CUDA device, for the training thread to start and stop. ``spans``: all of the time.
    ``timed``: batches, columns and seconds of what the training thread measured itself, which appends them.
    """

    def __init__(self) -> None:
        self.device: DeviceClock | None = None
        self.spans = TimeSpans()
        self.timed: deque[tuple[int, int, float]] = deque(maxlen=ROWS)
        self._rows = array("d", [0.0] * (ROWS * COLUMNS))
        self._closed = 0
        self._seen = 0
        self._batch = -1
        self._spent = array("d", NOTHING)
        self._phase = OUTSIDE
        self._at: float | None = None
        self._is_training = False
        self._gaps: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._windows: dict[int, Window] = {}  # of the last facts, by their first step

    def use_device(self, device: Any) -> None:
        """Also time batches on this :class:`torch.device`, if it is a CUDA device and not ``None``."""
        events = event_factory(device)
        self.device = DeviceClock(events) if events is not None else None

    def take(self, events: Sequence[LoggedEvent], *, contiguous: bool = True) -> None:
        """Process ``events``; ``contiguous``: no events were lost before them."""
        self.spans.take(events, contiguous=contiguous)
        if not contiguous:
            self._at = None
        spent, phase, last, is_training = self._spent, self._phase, self._at, self._is_training
        for at, point, detail in events:
            if last is not None and (is_training or isinstance(detail, StageEntered)):
                spent[phase] += at - last
                last = at
            if detail is None or detail is ENDED:
                if is_training:
                    phase = PHASES.get(point, OUTSIDE)
                if detail is ENDED:
                    self._seen = self._batch + 1
            elif isinstance(detail, StageEntered):
                is_training, phase = detail.stage == "train", OUTSIDE
            elif detail[2] >= 0:  # type: ignore[index]  # bool is ENDED alone
                spent[UNKNOWN_WAIT] = phase == OUTSIDE
                self._begin(detail[2], follows=last is not None)  # type: ignore[index]
                is_training, last, phase = True, at, BEFORE
        self._phase, self._at, self._is_training = phase, last, is_training
        self._take_timed()
        self._take_device()

    def facts(self) -> StepFacts:
        """Return the medians of all complete windows. For any thread."""
        before = self._closed
        rows = self._rows[:]  # atomic in the interpreter, so no row is split
        oldest = max(0, self._closed // WINDOW - KEPT)
        gaps = tuple(self._gaps)
        known, windows = self._windows, {}
        for begin in range(oldest * WINDOW, before // WINDOW * WINDOW, WINDOW):
            if not any(first < begin + WINDOW and begin < end for first, end in gaps):
                base = begin % ROWS * COLUMNS
                windows[begin] = known.get(begin) or _window_of(begin, rows[base : base + WINDOW * COLUMNS])
        self._windows = windows
        spans = self.spans.facts(monotonic())
        return StepFacts(
            windows=tuple(windows.values()), seen=self._seen, spans=spans, span_batches=self.spans.size if spans else 0
        )

    def _begin(self, batch: int, *, follows: bool) -> None:
        """Write the last batch's row and begin ``batch``. Not ``follows``: events before were lost."""
        spent = self._spent
        if follows:
            base = self._batch % ROWS * COLUMNS
            self._rows[base : base + COLUMNS] = spent
        elif batch > 0:
            self._gaps.append((max(0, self._batch), batch))
        self._closed = self._batch = batch
        spent[:] = NOTHING

    def _take_timed(self) -> None:
        """Add what was measured to complete rows."""
        timed = self.timed
        while timed and timed[0][0] < self._closed:
            batch, column, seconds = timed.popleft()
            if batch >= self._closed - ROWS:
                self._rows[batch % ROWS * COLUMNS + column] += seconds
                self._windows.pop(batch // WINDOW * WINDOW, None)

    def _take_device(self) -> None:
        """Fill in seconds on the device, which are known some batches later, in complete rows."""
        timed = self.device.timed if self.device is not None else None
        while timed and timed[0][0] < self._closed:
            batch, seconds = timed.popleft()
            self.spans.add_device(batch, seconds)
            if batch >= self._closed - ROWS:
                self._rows[batch % ROWS * COLUMNS + DEVICE] = seconds
                self._windows.pop(batch // WINDOW * WINDOW, None)


class DeviceClock:
    """Seconds on a device from a batch's start to its end. For the training thread only.

    ``timed``: the batches whose start and end the device has passed. A batch that starts while all pairs of events are
    in use is not timed.
    """

    def __init__(self, events: EventFactory, pairs: int = PAIRS) -> None:
        self.timed: deque[tuple[int, float]] = deque(maxlen=ROWS)
        self._events = events
        self._free = [(events.make(), events.make()) for _ in range(pairs)]
        self._begun: tuple[int, CudaEvent, CudaEvent] | None = None
        self._under_way: deque[tuple[int, CudaEvent, CudaEvent]] = deque()

    def begin(self, batch: int) -> None:
        """Record the start of ``batch``."""
        if self._begun is not None:  # it had no end
            self._free.append(self._begun[1:])
            self._begun = None
        if self._events.capturing():
            return
        self._read()
        if self._free:
            first, second = self._free.pop()
            self._events.record(first)
            self._begun = batch, first, second

    def end(self) -> None:
        """Record the end of the batch."""
        if self._begun is not None and not self._events.capturing():
            self._events.record(self._begun[2])
            self._under_way.append(self._begun)
            self._begun = None

    def _read(self) -> None:
        under_way = self._under_way
        while under_way and under_way[0][2].query():
            batch, first, second = under_way.popleft()
            self._free.append((first, second))
            self.timed.append((batch, first.elapsed_time(second) / 1000.0))


def _window_of(first_step: int, rows: array[float]) -> Window:
    """Return the medians over the rows of a window.

    A phase that no batch had is ``None``; one that some had (the optimizer with gradient accumulation) is the median of
    those.
    """
    columns: list[Sequence[float]] = [rows[column::COLUMNS] for column in range(COLUMNS)]
    is_unknown = columns[UNKNOWN_WAIT]
    if any(is_unknown) and not all(is_unknown):
        columns = [[one for one, unknown in zip(column, is_unknown, strict=True) if not unknown] for column in columns]
    totals = list(map(sum, zip(*(columns[part] for part in PARTS), strict=True)))
    forwards, others = zip(*map(_forward_and_other, *(columns[part] for part in HALVES)), strict=True)
    means = (columns[DATA], forwards, columns[BACKWARD], columns[OPTIMIZER], others, columns[WAITED])
    return Window(
        first_step,
        len(rows) // COLUMNS,
        _middle(totals),
        data=_middle(columns[DATA]),
        forward=_median(forwards),
        backward=_median(columns[BACKWARD]),
        optimizer=_median(columns[OPTIMIZER]),
        other=_middle(others),
        device=_median(columns[DEVICE]),
        slowest=round(max(totals), 6),
        mean=_mean(totals),
        means=tuple(map(_mean, means)),
        gradients=_median(columns[GRADIENTS]),
        waited=_median(columns[WAITED]),
    )


def _forward_and_other(before: float, forward: float, backward: float, other: float) -> tuple[float, float]:
    """Return forward and other time; the time before the first point is forward before backward."""
    return (forward, other + before) if forward or not backward else (before, other)


def _median(values: Sequence[float]) -> float | None:
    known = [value for value in values if value]
    return _middle(known) if known else None


def _middle(values: Sequence[float]) -> float:
    return round(median(values), 6)


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 6)

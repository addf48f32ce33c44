"""Where the time of training steps goes, by the moments that a rank noted: each batch is a row of seconds, and medians
are taken when somebody asks."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from doctor.core.facts import StepFacts, Window
from doctor.monitor.telemetry.cuda_events import CudaEvent, EventFactory, event_factory
from doctor.monitor.telemetry.event_log import ENDED, LoggedEvent, StageEntered

WINDOW, KEPT = 20, 50
"""Batches of a window, and windows that are kept."""
ROWS = WINDOW * (KEPT + 1)
"""One window more than are shown: the oldest one is being overwritten."""
PAIRS = 16
"""Pairs of events under way: a device can be so many batches behind its host and still be timed."""

BEFORE, DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, ASIDE, UNSURE, DEVICE, COLUMNS = range(10)
"""Columns of a row, in seconds. ``BEFORE``: from the begin of a batch to the first point that was told. ``ASIDE``:
spent on what is no part of a step. ``UNSURE``: not 0 where it is not told when waiting for data began."""
PHASES = {"data": DATA, "forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
PHASES |= {"step": OTHER, "batch-end": OTHER}
"""What follows a point. What follows any other one (a checkpoint, validation, the end of an epoch) is no step."""
PARTS = (BEFORE, DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER)
NOTHING = array("d", [0.0] * COLUMNS)


class StepClock:
    """The clock of training batches.

    A row goes from one batch's begin to the next one's; its ``data`` is the wait for that next one. What was spent on
    other things in between (validation, a checkpoint) is in no number. Where the point ``data`` did not follow, it is
    not known how long the next batch was waited for, and the row counts only where a window has no better one. Points
    as in :class:`~doctor.core.facts.ProgressFacts`; where no ``forward`` is told, it is what lies before ``backward``.

    ``device``: the clock of a CUDA device, for the training thread to start and stop.
    """

    def __init__(self) -> None:
        self.device: DeviceClock | None = None
        self._rows = array("d", [0.0] * (ROWS * COLUMNS))
        self._closed = 0
        self._seen = 0
        self._batch = -1
        self._spent = array("d", NOTHING)
        self._phase = ASIDE
        self._at: float | None = None
        self._trains = False
        self._torn: deque[tuple[int, int]] = deque(maxlen=KEPT)

    def use_device(self, device: Any) -> None:
        """Time batches on this :class:`torch.device` too, where it is a CUDA device; ``None`` for none."""
        events = event_factory(device)
        self.device = DeviceClock(events) if events is not None else None

    def take(self, moments: Iterable[LoggedEvent], *, whole: bool = True) -> None:
        """Go on to the last of ``moments``; ``whole``: they follow those that were taken before."""
        if not whole:
            self._at = None
        spent, phase, last, trains = self._spent, self._phase, self._at, self._trains
        for at, point, more in moments:
            if last is not None and (trains or isinstance(more, StageEntered)):
                spent[phase] += at - last
                last = at
            if more is None or more is ENDED:
                if trains:
                    phase = PHASES.get(point, ASIDE)
                if more is ENDED:
                    self._seen = self._batch + 1
            elif isinstance(more, StageEntered):
                trains, phase = more.stage == "train", ASIDE
            elif more[2] >= 0:  # type: ignore[index]  # bool is ENDED alone
                spent[UNSURE] = phase == ASIDE
                self._begin(more[2], follows=last is not None)  # type: ignore[index]
                trains, last, phase = True, at, BEFORE
        self._phase, self._at, self._trains = phase, last, trains
        self._take_device()

    def facts(self) -> StepFacts:
        """Medians of the windows that are full. For any thread."""
        before = self._closed
        rows = self._rows[:]  # one step of the interpreter, so no row is cut in two
        first = max(0, self._closed // WINDOW - KEPT)
        windows = [
            window_of(number * WINDOW, _window(rows, number))
            for number in range(first, before // WINDOW)
            if not self._is_torn(number)
        ]
        return StepFacts(windows=tuple(windows), seen=self._seen)

    def _begin(self, batch: int, *, follows: bool) -> None:
        """``batch`` begins, and the row of the one before is written; not ``follows``: what came before it is lost."""
        spent = self._spent
        if follows:
            base = self._batch % ROWS * COLUMNS
            self._rows[base : base + COLUMNS] = spent
        elif batch > 0:
            self._torn.append((max(0, self._batch), batch))
        self._closed = self._batch = batch
        spent[:] = NOTHING

    def _is_torn(self, window: int) -> bool:
        """Whether a row of a window is missing."""
        begin = window * WINDOW
        return any(first < begin + WINDOW and begin < end for first, end in tuple(self._torn))

    def _take_device(self) -> None:
        """Seconds on the device, which are known some batches later, of rows that are written."""
        timed = self.device.timed if self.device is not None else None
        while timed and timed[0][0] < self._closed:
            batch, seconds = timed.popleft()
            if batch >= self._closed - ROWS:
                self._rows[batch % ROWS * COLUMNS + DEVICE] = seconds


class DeviceClock:
    """Seconds that pass on a device from one batch's begin to its end, ``timed`` when it has passed both. It belongs to
    the training thread.

    A batch that begins while all pairs of events are under way is not timed.
    """

    def __init__(self, events: EventFactory, pairs: int = PAIRS) -> None:
        self.timed: deque[tuple[int, float]] = deque(maxlen=ROWS)
        self._events = events
        self._free = [(events.make(), events.make()) for _ in range(pairs)]
        self._begun: tuple[int, CudaEvent, CudaEvent] | None = None
        self._under_way: deque[tuple[int, CudaEvent, CudaEvent]] = deque()

    def begin(self, batch: int) -> None:
        """``batch`` begins."""
        if self._begun is not None:  # it came to no end
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
        """The batch that began ends."""
        if self._begun is not None and not self._events.capturing():
            self._events.record(self._begun[2])
            self._under_way.append(self._begun)
            self._begun = None

    def _read(self) -> None:
        """Take the seconds of the batches that the device is done with."""
        under_way = self._under_way
        while under_way and under_way[0][2].query():
            batch, first, second = under_way.popleft()
            self._free.append((first, second))
            self.timed.append((batch, first.elapsed_time(second) / 1000.0))


def window_of(first_step: int, rows: Sequence[Sequence[float]]) -> Window:
    """Medians over the rows of a window. A part that no batch had is ``None``; one that some had (the optimizer, where
    gradients are accumulated) is the median of those."""
    sure = [row for row in rows if not row[UNSURE]] or rows
    totals = [sum(row[part] for part in PARTS) for row in sure]
    halves = [_forward_and_other(row) for row in sure]
    return Window(
        first_step,
        len(rows),
        round(median(totals), 6),
        data=round(median(row[DATA] for row in sure), 6),
        forward=_median(forward for forward, _ in halves),
        backward=_median(row[BACKWARD] for row in sure),
        optimizer=_median(row[OPTIMIZER] for row in sure),
        other=round(median(other for _, other in halves), 6),
        device=_median(row[DEVICE] for row in sure),
        slowest=round(max(totals), 6),
        mean=round(fmean(totals), 6),
    )


def _forward_and_other(row: Sequence[float]) -> tuple[float, float]:
    """What lies before the first point is forward where that is not told and a backward is."""
    if row[FORWARD] or not row[BACKWARD]:
        return row[FORWARD], row[OTHER] + row[BEFORE]
    return row[BEFORE], row[OTHER]


def _median(values: Any) -> float | None:
    told = [value for value in values if value]
    return round(median(told), 6) if told else None


def _window(rows: Sequence[float], number: int) -> list[Sequence[float]]:
    begins = ((number * WINDOW + row) % ROWS * COLUMNS for row in range(WINDOW))
    return [rows[begin : begin + COLUMNS] for begin in begins]

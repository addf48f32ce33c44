"""The current point of a rank and the time spent there, from its event log.

Plain assignments, no lock: a reader during an update may see a point with the time of the one before it, which is wrong
by one step of a healthy run, and right as soon as it stalls.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from doctor.core.clock import monotonic, time
from doctor.core.facts import EpochEnd, Failure, Frame, LeftLoop, PointInTime, ProgressFacts
from doctor.monitor.telemetry import event_log
from doctor.monitor.telemetry.event_log import ENDED, StageEntered
from doctor.monitor.telemetry.stacks.live_stacks import awaited_transfer, has_other_work, is_waiting_in_collective
from doctor.monitor.telemetry.stacks.stillness import Stillness, nanoseconds_busy
from doctor.monitor.telemetry.stacks.tight_loops import TightLoop

FLOOR = 8.0
"""Seconds without progress below which nothing counts as a stall, however short the steps."""
PHASE_TIMEOUTS = {"setup": 300.0, "checkpoint": 120.0, "epoch-start": 60.0, "teardown": 120.0}
"""Seconds for points that are slow by nature, until the run has shown how slow: rank 0 may prepare data while the
others wait, a checkpoint goes to a busy file server."""
FIRST = 60.0
"""Seconds for the first pass of any other point: kernels are compiled, communicators created, workers started.

Once a batch has been trained, both apply to busy ranks only. A rank that waits for others in a collective outside a
step has no work of its own there, and reports early. Whether the others are busy with something that may take so long
is decided by their own limits.
"""
COMPUTES, BUSY = 300.0, 0.8
"""The same for a rank that computes in work of which nothing is known: merges of a tokenizer, an index, a metric may
take minutes, and end. Half of the shortest default timeout of a process group (NCCL's, 600 s); and the least share of
the time for which its thread runs, or could run if a processor were free."""
KEPT_ENDS, RECENT, KEPT_LEFT = 64, 32, 4
EARLY, EARLY_LOOK = 8.0, 1.0
"""Seconds without progress from which a rank that is still reports its position before the pace of the run is known,
and from which its stillness is measured."""
YOUNG = 30
"""Points passed, some batches, before which the typical intervals of a run are unknown."""
FACTOR = 4.0
"""Limit of a point as a multiple of its typical duration,"""
SLACK = 1.5
"""and as a multiple of its longest duration, however rare that is."""
OUTLIERS = 3
"""Passes that may take far longer without counting as typical: a kernel compiled anew, a busy file server."""
KEPT_FROM = 1.0
"""Minimum duration in seconds of a pass that is kept: no limit is as low as :data:`FACTOR` times as much."""


class Stall(msgspec.Struct, frozen=True):
    """No progress for ``idle`` seconds, more than the ``limit``.

    ``early``: the pace of the run is not known yet, and this rank neither moves nor computes: the positions of all
    ranks show whether that is a hang.
    """

    idle: float
    limit: float
    early: bool = False


class TypicalInterval:
    """The typical duration of one point, without its first pass (see :data:`FIRST`)."""

    __slots__ = ("_first", "_longest")

    def __init__(self, first: float) -> None:
        self._first = first
        self._longest: list[float] = []

    def add(self, seconds: float) -> None:
        """Add a later pass of at least :data:`KEPT_FROM` seconds."""
        self._longest = sorted((*self._longest, seconds), reverse=True)[: OUTLIERS + 1]

    def most(self, *, young: bool) -> float:
        """Return the seconds a pass may take. ``young``: too few passes to recognize outliers."""
        if not self._longest:
            return FACTOR * self._first if young else 0.0
        usual = self._longest[-1] if len(self._longest) > OUTLIERS else 0.0
        return max(FACTOR * (self._longest[0] if young else usual), SLACK * self._longest[0])


class Progress:
    """The progress of one rank.

    ``hang_after``: fixed limit in seconds instead of typical intervals; ``step_now``: returns the optimizer steps, from
    any thread; ``phase_timeouts``: as :data:`PHASE_TIMEOUTS`. ``has_peers``: other ranks may wait for this one.
    """

    def __init__(self, run: str = "", hang_after: float | None = None) -> None:
        self.run = run
        self.stage = "setup"
        self.point = "setup"
        self.epoch: int | None = None
        self.step: int | None = None
        self.step_now: Callable[[], int] | None = None
        self.phase_timeouts: Mapping[str, float] = PHASE_TIMEOUTS
        self.batch: int | None = None
        self.loader: int | None = None
        self.passed = 0
        self.since = monotonic()
        self.state = "running"
        self.has_peers = False
        self._has_trained = False
        self.failure: Failure | None = None
        self._hang_after = hang_after
        self._intervals: dict[str, dict[str, TypicalInterval]] = {}
        self._stage_intervals = self._intervals.setdefault(self.stage, {})
        self._recent: deque[tuple[str, str, int | None, float]] = deque(maxlen=RECENT)
        self._ends: list[EpochEnd] = []
        self._left: list[LeftLoop] = []
        self._offset = time() - monotonic()
        self._work = (0.0, 0.0, 0)
        self.follow(threading.get_ident(), threading.get_native_id())

    def follow(self, thread: int, native_id: int) -> None:
        """Have the thread that trains followed: by default the one that made this object."""
        self.training_thread, self.native_id = thread, native_id
        self._stillness = Stillness(thread, native_id)
        self._loop = TightLoop(thread, native_id)

    def take(self, events: Sequence[event_log.LoggedEvent], *, contiguous: bool = True) -> None:
        """Process ``events``; ``contiguous``: no events were lost before them."""
        intervals, point, since = self._stage_intervals, self.point, self.since if contiguous else events[0][0]
        stage, batch, left = self.stage, self.batch, len(events)
        for at, entered, detail in events:
            if point not in intervals:
                intervals[point] = TypicalInterval(at - since)
            elif at - since >= KEPT_FROM:
                intervals[point].add(at - since)
            point, since = entered, at
            if detail is not None and detail is not ENDED:
                if isinstance(detail, StageEntered):
                    self._enter(detail)
                    intervals, stage, batch = self._stage_intervals, self.stage, None
                else:
                    batch, self.loader, _ = detail  # type: ignore[misc]  # bool is ENDED alone
            if left <= RECENT:
                self._recent.append((stage, point, batch, at))
            left -= 1
        self.point, self.since, self.batch = point, since, batch
        self.passed += len(events)
        if not self._has_trained:
            self._has_trained = any(detail is ENDED for _, _, detail in events)

    def _enter(self, entered: StageEntered) -> None:
        self.stage = entered.stage
        self._stage_intervals = self._intervals.setdefault(entered.stage, {})
        self.loader = None
        if entered.epoch is not None:
            self.epoch = entered.epoch

    def end_of_loader(self, stage: str, loader: int, epoch: int, batches: int) -> None:
        """Record that a loader was exhausted."""
        self._ends = [*self._ends[-KEPT_ENDS:], EpochEnd(stage, loader, epoch, batches)]

    def left_loop(self, stage: str, loader: int, epoch: int, batches: int, frame: Frame | None) -> None:
        """Record that the loop left a pass in its batch number ``batches``, before the loader was exhausted."""
        self._left = [*self._left[-KEPT_LEFT + 1 :], LeftLoop(stage, loader, epoch, batches, frame)]

    def limit(self) -> float:
        """Return the seconds the current point may take if this rank is busy."""
        if self._hang_after is not None:
            return self._hang_after
        interval = self._interval
        floor = self.phase_timeouts.get("setup" if self.stage == "setup" else self.point, FLOOR)
        return max(floor, FIRST if interval is None else interval.most(young=self.passed < YOUNG))

    def limit_of_waiting(self) -> float:
        """Return the seconds it may take if this rank waits for others."""
        if self._hang_after is not None or "step" not in self._intervals.get("train", ()):
            return self.limit()
        return max(FLOOR, self._interval.most(young=self.passed < YOUNG) if self._interval else 0.0)

    @property
    def _interval(self) -> TypicalInterval | None:
        """The typical interval of the current point; ``None`` in its first pass."""
        return self._intervals.get(self.stage, {}).get(self.point)

    def stall(self) -> Stall | None:
        """Return the stall, if progress has stopped. A rank that ended or failed is not stalled."""
        if self.state != "running":
            return None
        idle, limit, still, loops = monotonic() - self.since, self.limit(), self.still(), self.loops()
        computes = self._computes(idle)
        if idle > limit and not computes:
            return Stall(idle, limit)
        early = self.limit_of_waiting()
        if idle > early and (is_waiting_in_collective(self.training_thread) or awaited_transfer(self.training_thread)):
            return Stall(idle, early)
        stands = max(still or 0.0, loops or 0.0) if idle > EARLY else 0.0
        return Stall(idle, EARLY, early=True) if stands > EARLY - 2 * EARLY_LOOK else None

    def _computes(self, idle: float) -> bool:
        """Return whether this rank has computed since :data:`EARLY` at a point whose pace is not known yet."""
        limit = self.limit()
        if self._hang_after is not None or idle < EARLY or not FIRST <= limit < COMPUTES or idle > COMPUTES:
            return False
        now, busy, (since, at, before) = monotonic(), nanoseconds_busy(self.native_id), self._work
        if busy is None or since != self.since:
            self._work = (self.since, now, busy or 0)
            return False
        return now - at > EARLY and busy - before >= BUSY * (now - at) * 1e9

    def still(self) -> float | None:
        """Return the seconds for which this rank has been still; ``None`` if its pace is known or it moves.

        Once it has trained, only where it may be busy for longer than others wait, and in one call or a loop of naps.
        Before, not while it waits for others and another of its threads is at work.
        """
        if not self.has_peers or self._hang_after is not None or monotonic() - self.since <= EARLY_LOOK:
            return None
        if self._has_trained and self.limit() <= self.limit_of_waiting():
            return None
        prepares, waits = self.stage == "setup" or self._has_trained, is_waiting_in_collective(self.training_thread)
        if waits and not self._has_trained and has_other_work(self.training_thread):
            return None
        in_one_call = prepares and not waits
        return self._stillness.look(in_one_call=in_one_call, naps=self._has_trained)

    def loops(self) -> float | None:
        """Return the seconds for which this rank has been in a loop without an end in sight; ``None`` where
        :meth:`still` is. Before the first batch, only in one that pauses."""
        idle = monotonic() - self.since
        if not self.has_peers or self._hang_after is not None or idle <= EARLY_LOOK:
            return None
        if not self._has_trained:
            return self._loop.look(computes=False) if self.stage == "setup" or self.point == "data" else None
        return self._loop.look() if self.limit() > self.limit_of_waiting() else None

    def facts(self) -> ProgressFacts:
        """Return the current progress, without stack and children, which cost more."""
        now = monotonic()
        stall, still, loops = self.stall(), self.still(), self.loops()
        if stall is not None and stall.early:
            stall = None
        offset, recent = self._offset, list(self._recent)
        return ProgressFacts(
            run=self.run,
            state="stalled" if stall else self.state,
            pid=os.getpid(),
            at=now + self._offset,
            stage=self.stage,
            point=self.point,
            epoch=self.epoch,
            step=self.step if self.step_now is None else self.step_now(),
            batch=self.batch,
            loader=self.loader,
            passed=self.passed,
            idle=round(now - self.since, 3),
            still=None if still is None else round(still, 3),
            loops=None if loops is None else round(loops, 3),
            limit=round(stall.limit if stall else self.limit(), 3),
            patience=round(self.limit(), 3),
            blocked=self._loop.words() if loops else "",
            failure=self.failure,
            ended=tuple(self._ends),
            left=tuple(self._left),
            recent=tuple(PointInTime(stage, point, batch, round(at + offset, 4)) for stage, point, batch, at in recent),
        )

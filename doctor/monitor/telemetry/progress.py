"""Where this rank is, and for how long, by the moments that it noted.

Plain assignments, no lock: who asks while moments are being taken may see a point and the time of the one before it,
which is wrong by one step of a run that is going well, and right as soon as it stands still.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from doctor.core.facts import EpochEnd, Failure, PointInTime, ProgressFacts
from doctor.monitor.telemetry import event_log
from doctor.monitor.telemetry.event_log import ENDED, StageEntered
from doctor.monitor.telemetry.stacks.live_stacks import is_waiting_in_collective

FLOOR = 8.0
"""Seconds without progress below which nothing is called a stall, however short the steps."""
PHASE_TIMEOUTS = {"setup": 300.0, "checkpoint": 120.0, "epoch-start": 60.0, "teardown": 120.0}
"""Seconds for points that are slow by nature, until the run has shown how slow: rank 0 may prepare data while the
others wait, a checkpoint goes to a busy file server."""
FIRST = 60.0
"""Seconds for the first pass of any other point: kernels are compiled, communicators built, workers started.

Once a batch has been trained, both are for ranks that are busy. One that waits for others in a call that is no part of
a step has nothing to do there that takes its time, and asks early where they are. Whether those are about something
that may take so long is told by their own limits."""
KEPT_ENDS, RECENT = 64, 32
YOUNG = 30
"""Points passed, some batches, before which a run is taken not to have found its pace."""
FACTOR = 4.0
"""A point may take this many times what it usually takes,"""
SLACK = 1.5
"""and this many times what it took at its longest, be that as rare as it may."""
OUTLIERS = 3
"""Passes that may be far longer than the others and do not count as usual: a kernel that is compiled anew, a file
server that was busy."""
WORTH = 1.0
"""Seconds of a pass below which it is not kept: no limit is as low as :data:`FACTOR` times as much."""


class Stall(NamedTuple):
    """No progress for ``idle`` seconds, where ``limit`` would have been usual."""

    idle: float
    limit: float


class TypicalInterval:
    """Of one point. The first pass is no measure: kernels are compiled, communicators built, workers started."""

    __slots__ = ("_first", "_longest")

    def __init__(self, first: float) -> None:
        self._first = first
        self._longest: list[float] = []

    def add(self, seconds: float) -> None:
        """A later pass of at least :data:`WORTH`."""
        self._longest = sorted((*self._longest, seconds), reverse=True)[: OUTLIERS + 1]

    def most(self, *, young: bool) -> float:
        """Seconds that a pass may take. ``young``: the run is, and outliers can't be told from what is usual."""
        if not self._longest:
            return FACTOR * self._first if young else 0.0
        usual = self._longest[-1] if len(self._longest) > OUTLIERS else 0.0
        return max(FACTOR * (self._longest[0] if young else usual), SLACK * self._longest[0])


class Progress:
    """The record of one rank. ``hang_after``: seconds without progress in place of the run's own pace. ``step_now``:
    where to ask for the optimiser's steps, from any thread."""

    def __init__(self, run: str = "", hang_after: float | None = None) -> None:
        self.run = run
        self.stage = "setup"
        self.point = "setup"
        self.epoch: int | None = None
        self.step: int | None = None
        self.step_now: Callable[[], int] | None = None
        self.batch: int | None = None
        self.loader: int | None = None
        self.passed = 0
        self.since = time.monotonic()
        self.state = "running"
        self.failure: Failure | None = None
        self._hang_after = hang_after
        self._paces: dict[str, dict[str, TypicalInterval]] = {}
        self._here = self._paces.setdefault(self.stage, {})
        self._recent: deque[tuple[str, str, int | None, float]] = deque(maxlen=RECENT)
        self._ends: list[EpochEnd] = []
        self._offset = time.time() - time.monotonic()
        self._trainer = threading.get_ident()

    def take(self, moments: Sequence[event_log.LoggedEvent], *, whole: bool = True) -> None:
        """Go on to the last of ``moments``; ``whole``: they follow those that were taken before."""
        here, point, since = self._here, self.point, self.since if whole else moments[0][0]
        stage, batch, note = self.stage, self.batch, self._recent.append
        for at, entered, more in moments:
            if point not in here:
                here[point] = TypicalInterval(at - since)
            elif at - since >= WORTH:
                here[point].add(at - since)
            point, since = entered, at
            if more is not None and more is not ENDED:
                if isinstance(more, StageEntered):
                    self._enter(more)
                    here, stage, batch = self._here, self.stage, None
                else:
                    batch, self.loader, _ = more  # type: ignore[misc]  # bool is ENDED alone
            note((stage, point, batch, at))
        self.point, self.since, self.batch = point, since, batch
        self.passed += len(moments)

    def _enter(self, entered: StageEntered) -> None:
        """A stage is entered, or gone back to (training after validation)."""
        self.stage = entered.stage
        self._here = self._paces.setdefault(entered.stage, {})
        self.loader = None
        if entered.epoch is not None:
            self.epoch = entered.epoch

    def end_of_loader(self, stage: str, loader: int, epoch: int, batches: int) -> None:
        """A loader came to its end."""
        self._ends = [*self._ends[-KEPT_ENDS:], EpochEnd(stage, loader, epoch, batches)]

    @property
    def training_thread(self) -> int:
        """The identity of the thread that trains."""
        return self._trainer

    def limit(self) -> float:
        """Seconds that the present point may take where this rank is busy."""
        if self._hang_after is not None:
            return self._hang_after
        pace = self._pace
        floor = PHASE_TIMEOUTS.get("setup" if self.stage == "setup" else self.point, FLOOR)
        return max(floor, FIRST if pace is None else pace.most(young=self._is_young))

    def limit_of_waiting(self) -> float:
        """Seconds that it may take where this rank waits for others."""
        if self._hang_after is not None or "step" not in self._paces.get("train", ()):
            return self.limit()
        return max(FLOOR, self._pace.most(young=self._is_young) if self._pace else 0.0)

    @property
    def _is_young(self) -> bool:
        return self.passed < YOUNG

    @property
    def _pace(self) -> TypicalInterval | None:
        """That of the present point; ``None`` in its first pass."""
        return self._paces.get(self.stage, {}).get(self.point)

    def stall(self) -> Stall | None:
        """Whether progress has stopped. A rank that ended or failed does not stall."""
        if self.state != "running":
            return None
        idle, limit = time.monotonic() - self.since, self.limit()
        if idle > limit:
            return Stall(idle, limit)
        early = self.limit_of_waiting()
        return Stall(idle, early) if idle > early and is_waiting_in_collective(self._trainer) else None

    def facts(self) -> ProgressFacts:
        """The record as it stands; without stack and children, which cost more."""
        now = time.monotonic()
        stall = self.stall()
        return ProgressFacts(
            run=self.run,
            state="stalled" if stall else self.state,
            pid=os.getpid(),
            at=now + self._offset,
            stage=self.stage,
            point=self.point,
            epoch=self.epoch,
            step=self._step(),
            batch=self.batch,
            loader=self.loader,
            passed=self.passed,
            idle=round(now - self.since, 3),
            limit=round(stall.limit if stall else self.limit(), 3),
            patience=round(self.limit(), 3),
            failure=self.failure,
            ended=tuple(self._ends),
            recent=self._passed_last(),
        )

    def _step(self) -> int | None:
        """Optimiser steps so far: asked of the loop that counts them, where there is one, and not once a batch."""
        return self.step if self.step_now is None else self.step_now()

    def _passed_last(self) -> tuple[PointInTime, ...]:
        newest = list(self._recent)
        return tuple(
            PointInTime(stage, point, batch, round(at + self._offset, 4)) for stage, point, batch, at in newest
        )

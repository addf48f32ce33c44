"""Which stalls of this rank are news, and when it goes on after one that was judged sick."""

from __future__ import annotations

import math
from typing import NamedTuple

from doctor.monitor.telemetry.progress import Stall


class ConfirmedStall(NamedTuple):
    """A stall that was judged sick. ``alarm``: by that name; ``passed``: the points that this rank had passed by then;
    ``since``: when it began here."""

    alarm: str
    passed: int
    since: float


class StallTracker:
    """Of one rank. A stall that was judged sick is not news again; one that was judged healthy is after twice the
    time."""

    def __init__(self) -> None:
        self._judged_at = -math.inf
        self._sick = False
        self._factor = 1.0
        self._began: float | None = None
        self._held: ConfirmedStall | None = None

    def note(self, stall: Stall | None, now: float) -> None:
        """Whether this rank stands still now, and since when."""
        self._began = now - stall.idle if stall is not None else None

    def is_news(self, stall: Stall | None, now: float) -> bool:
        """Whether the others are to be told."""
        if stall is None:
            return False
        if now - stall.idle > self._judged_at:  # it began after the last one was judged
            self._factor = 1.0
            return True
        return not self._sick and stall.idle > stall.limit * self._factor

    def judged(self, alarm: str, now: float, *, sick: bool, passed: int) -> None:
        """All ranks that stand still now were judged."""
        self._judged_at, self._sick = now, sick
        self._factor *= 2
        if sick:
            self._held = ConfirmedStall(alarm, passed, now if self._began is None else self._began)

    @property
    def may_go_on(self) -> bool:
        """Whether one was judged sick, and this rank does not stand still any more."""
        return self._held is not None and self._began is None

    def goes_on(self, passed: int) -> ConfirmedStall | None:
        """The stall that was judged sick, where this rank has passed a point since. Said once."""
        held = self._held
        if held is None or passed <= held.passed:
            return None
        self._held = None
        return held

"""Tracks which stalls of this rank are new, and when it resumes after a confirmed one."""

from __future__ import annotations

import math

import msgspec

from doctor.monitor.telemetry.progress import Stall

AGAIN, AGAIN_EARLY = 2.0, 1.5
"""Multiples of the time of a stall after which it is evaluated again."""


class ConfirmedStall(msgspec.Struct, frozen=True):
    """A confirmed stall, the points passed by then, and since when this rank stalls."""

    incident: str
    passed: int
    since: float


class StallTracker:
    """Stall tracking of one rank.

    A confirmed stall is not reported again; one that was evaluated as healthy is reported again after twice the time.
    Early stalls (:class:`.Stall`) count separately, and are reported again after half of their time: what a rank waits
    for may have come to a stop a moment after the rank.
    """

    def __init__(self) -> None:
        self._evaluated_at = -math.inf
        self._confirmed = False
        self._factors = {False: 1.0, True: 1.0}
        self._is_early = False
        self._began: float | None = None
        self._stall: ConfirmedStall | None = None

    def note(self, stall: Stall | None, now: float) -> None:
        """Record whether this rank is stalled now, and since when."""
        self._began = now - stall.idle if stall is not None else None
        self._is_early = stall is not None and stall.early

    def is_news(self, stall: Stall | None, now: float) -> bool:
        """Return whether the stall is to be reported to the other ranks."""
        if stall is None:
            return False
        if now - stall.idle > self._evaluated_at:  # it began after the last evaluation
            self._factors = {False: 1.0, True: 1.0}
            return True
        return not self._confirmed and stall.idle > stall.limit * self._factors[stall.early]

    def evaluated(self, incident: str, now: float, *, confirmed: bool, passed: int) -> None:
        """Record that all stalled ranks were evaluated."""
        self._evaluated_at, self._confirmed = now, confirmed
        self._factors[self._is_early] *= AGAIN_EARLY if self._is_early else AGAIN
        if confirmed:
            self._stall = ConfirmedStall(incident, passed, now if self._began is None else self._began)

    @property
    def may_have_resumed(self) -> bool:
        """Whether there is a confirmed stall and this rank is no longer stalled."""
        return self._stall is not None and self._began is None

    def take_resumed(self, passed: int) -> ConfirmedStall | None:
        """Return the confirmed stall, once, if this rank has passed a point since."""
        stall = self._stall
        if stall is None or passed <= stall.passed:
            return None
        self._stall = None
        return stall

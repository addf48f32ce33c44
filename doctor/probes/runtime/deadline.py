"""Deadlines of probes."""

from __future__ import annotations

import math

from doctor.core.clock import monotonic


class ProbeDeadline:
    """A deadline ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = monotonic() + seconds

    def left(self, most: float = math.inf) -> float:
        """Return the seconds left, at most ``most``; 0 after the deadline."""
        return min(most, max(0.0, self._end - monotonic()))

    def within(self, seconds: float) -> ProbeDeadline:
        """Return this deadline, or one in ``seconds`` if that is earlier."""
        return ProbeDeadline(self.left(seconds))

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.left() == 0.0

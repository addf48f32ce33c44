"""A point in time that nothing may go beyond."""

from __future__ import annotations

import math
import time


class ProbeDeadline:
    """So many ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, most: float = math.inf) -> float:
        """Seconds until then: ``most`` at most, 0 once it is over."""
        return min(most, max(0.0, self._end - time.monotonic()))

    def within(self, seconds: float) -> ProbeDeadline:
        """This one, or the one that is ``seconds`` away if that is earlier."""
        return ProbeDeadline(self.left(seconds))

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.left() == 0.0

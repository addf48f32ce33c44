"""Polling interval of a store: short at first, then as long as the load of all ranks requires."""

from __future__ import annotations

import time

FIRST = 0.005
"""Seconds before the second look."""
SLOWEST, PER_RANK = 0.1, 1 / 10_000
"""Seconds between looks in the long run, and what each rank of the world adds: ten thousand looks a second in all."""


class PollInterval:
    """Rests that double up to a limit."""

    def __init__(self, world_size: int) -> None:
        self._pause = FIRST
        self._limit = SLOWEST + world_size * PER_RANK

    def rest(self, until: float) -> None:
        """Sleep for the pause, not beyond the monotonic moment ``until``."""
        time.sleep(max(0.0, min(self._pause, until - time.monotonic())))
        self._pause = min(self._limit, self._pause * 2)

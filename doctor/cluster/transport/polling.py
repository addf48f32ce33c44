"""Polling interval of a store: short at first, then longer to limit the load."""

from __future__ import annotations

from doctor.core.clock import monotonic, sleep

FIRST = 0.005
"""Seconds before the second poll."""
SLOWEST, PER_RANK = 0.1, 1 / 10_000
"""Seconds between polls in the long run, plus a share for each rank: ten thousand polls a second in all."""


class PollInterval:
    """Pause between two polls, which doubles up to a limit."""

    def __init__(self, world_size: int) -> None:
        self._pause = FIRST
        self._limit = SLOWEST + world_size * PER_RANK

    def rest(self, until: float) -> None:
        """Sleep for one pause, but not beyond the monotonic time ``until``."""
        sleep(max(0.0, min(self._pause, until - monotonic())))
        self._pause = min(self._limit, self._pause * 2)

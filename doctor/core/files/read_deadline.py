"""Time for reading what was given: a deadline for each file, and one for all files together."""

from __future__ import annotations

import time
from collections.abc import Callable

FILE_SECONDS = 60.0
"""Seconds that any file may take."""
ALL_SECONDS = 120.0
"""Seconds that all files together may take."""
SECONDS_PER_BYTE = 0.5 / (1 << 20)
"""Further seconds for each byte on disk. An ordinary log is read at 60 MiB/s, one of nothing but errors at 3 MiB/s."""


class ReadDeadline:
    """When a file has to be read. ``seconds``: since its reading began."""

    def __init__(self, until: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._until = until

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be read."""
        return self._clock() >= self._until

    @property
    def seconds(self) -> float:
        """Seconds since the file was opened."""
        return self._clock() - self._began


NO_DEADLINE = ReadDeadline(float("inf"))


class ReadBudget:
    """The time of one command. ``seconds``: for all files together, as the user asked; by their sizes otherwise."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = seconds
        self._bytes = 0

    def for_file(self, size: int) -> ReadDeadline:
        """The deadline of a file of ``size`` bytes, which is opened now."""
        self._bytes += size
        together = ALL_SECONDS + self._bytes * SECONDS_PER_BYTE if self._seconds is None else self._seconds
        alone = FILE_SECONDS + size * SECONDS_PER_BYTE if self._seconds is None else self._seconds
        return ReadDeadline(min(self._began + together, self._clock() + alone), self._clock)

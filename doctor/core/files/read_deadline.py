"""Deadlines for reading input files: one for each file, and one for all files together."""

from __future__ import annotations

from collections.abc import Callable

from doctor.core.clock import monotonic

FILE_SECONDS = 60.0
"""The basic timeout of each file, in seconds."""
ALL_SECONDS = 120.0
"""The basic timeout of all files together, in seconds."""
SECONDS_PER_BYTE = 0.5 / (1 << 20)
"""Further seconds for each byte on disk. An ordinary log is read at 60 MiB/s, one of nothing but errors at 3 MiB/s."""


class ReadDeadline:
    """The time by which a file has to be read."""

    def __init__(self, until: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._until = until

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._clock() >= self._until

    @property
    def seconds(self) -> float:
        """The seconds since the file was opened."""
        return self._clock() - self._began


NO_DEADLINE = ReadDeadline(float("inf"))


class ReadBudget:
    """The time of one command for its files: ``seconds`` as the user specified, otherwise derived from their sizes."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = seconds
        self._bytes = 0

    def for_file(self, size: int) -> ReadDeadline:
        """Return the deadline of a file of ``size`` bytes that is opened now."""
        self._bytes += size
        together = ALL_SECONDS + self._bytes * SECONDS_PER_BYTE if self._seconds is None else self._seconds
        alone = FILE_SECONDS + size * SECONDS_PER_BYTE if self._seconds is None else self._seconds
        return ReadDeadline(min(self._began + together, self._clock() + alone), self._clock)

"""The heartbeat by which others see that a process is alive and does its task."""

from __future__ import annotations

from collections.abc import Callable

from doctor.cluster.membership.protocol import HeartbeatMessage
from doctor.cluster.transport.codec import encode
from doctor.core.clock import monotonic

PAUSED = b"rest"
"""Value while no heartbeats are to be expected: evaluating a large job leaves no time for them."""


class Heartbeat:
    """Writes the heartbeat of the process ``number``, at most once in ``every`` seconds."""

    def __init__(self, write: Callable[[bytes], None], number: int, every: float = 0.0) -> None:
        self._write = write
        self._number = number
        self._every = every
        self._count = 0
        self._due = 0.0

    def beat(self) -> None:
        """Write a heartbeat if one is due."""
        if monotonic() >= self._due:
            self._due = monotonic() + self._every
            self._count += 1
            self._write(encode(HeartbeatMessage(self._number, self._count)))

    def pause(self) -> None:
        """Tell monitors to expect no more heartbeats."""
        self._write(PAUSED)


class HeartbeatMonitor:
    """Counts how often in a row a heartbeat was read and had not changed.

    Reads it at most once in ``every`` seconds. Counted rather than timed, so that a process that was suspended itself
    does not take the others for dead.
    """

    def __init__(self, read: Callable[[], bytes | None], every: float = 0.0) -> None:
        self._read = read
        self._every = every
        self._due = 0.0
        self.value: bytes | None = None
        self.missed = 0

    def look(self) -> int:
        """Read it if that is due; return how many heartbeats were missed."""
        if monotonic() >= self._due:
            self._due = monotonic() + self._every
            value = self._read()
            self.missed = 0 if value != self.value or value == PAUSED else self.missed + 1
            self.value = value
        return self.missed

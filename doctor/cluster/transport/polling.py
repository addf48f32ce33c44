"""How often a board is looked at: often at first, then as often as so many processes may without burdening it; and the
pulse by which others see that a keeper is alive."""

from __future__ import annotations

import time

from doctor.cluster.transport.store import KeyValueStore

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


HEARTBEAT_EVERY, HEARTBEAT_TIMEOUT = 1.0, 5.0
"""Seconds between beats, and without one after which a keeper is taken for dead or stopped."""
HEARTBEAT_PAUSED = b"rest"
"""Stands for the pulse once the gathering is closed: judging a large job leaves no time for beats."""


class CoordinatorHeartbeat:
    """Of the keeper of a gathering."""

    def __init__(self, board: KeyValueStore, nonce: str) -> None:
        self._board = board
        self._name = f"{nonce}/pulse"
        self._count = 0
        self._due = 0.0

    def beat(self) -> None:
        """Beat, if it is time to."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + HEARTBEAT_EVERY
            self._count += 1
            self._board.set(self._name, b"%d" % self._count)

    def rest(self) -> None:
        """No more beats are to be expected."""
        self._board.set(self._name, HEARTBEAT_PAUSED)


class HeartbeatMonitor:
    """Watches the pulse of a gathering's keeper."""

    def __init__(self, board: KeyValueStore, nonce: str) -> None:
        self._board = board
        self._name = f"{nonce}/pulse"
        self._last: bytes | None = None
        self._since = time.monotonic()
        self._due = 0.0

    def is_silent(self) -> bool:
        """Whether the keeper has not been heard of for too long. Looks once a beat."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + HEARTBEAT_EVERY
            pulse = self._board.get(self._name)
            if pulse != self._last or pulse == HEARTBEAT_PAUSED:
                self._last, self._since = pulse, now
        return now - self._since >= HEARTBEAT_TIMEOUT

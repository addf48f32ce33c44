"""The heartbeat by which members see that the coordinator of their gather is alive."""

from __future__ import annotations

import time

from doctor.cluster.transport.store import KeyValueStore

HEARTBEAT_EVERY, HEARTBEAT_TIMEOUT = 1.0, 5.0
"""Seconds between beats, and without one after which a keeper is taken for dead or stopped."""
HEARTBEAT_PAUSED = b"rest"
"""Stands for the pulse once the gathering is closed: judging a large job leaves no time for beats."""


class CoordinatorHeartbeat:
    """Of the keeper of a gathering."""

    def __init__(self, store: KeyValueStore, nonce: str) -> None:
        self._store = store
        self._name = f"{nonce}/pulse"
        self._count = 0
        self._due = 0.0

    def beat(self) -> None:
        """Beat, if it is time to."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + HEARTBEAT_EVERY
            self._count += 1
            self._store.set(self._name, b"%d" % self._count)

    def rest(self) -> None:
        """No more beats are to be expected."""
        self._store.set(self._name, HEARTBEAT_PAUSED)


class HeartbeatMonitor:
    """Watches the pulse of a gathering's keeper."""

    def __init__(self, store: KeyValueStore, nonce: str) -> None:
        self._store = store
        self._name = f"{nonce}/pulse"
        self._last: bytes | None = None
        self._since = time.monotonic()
        self._due = 0.0

    def is_silent(self) -> bool:
        """Whether the keeper has not been heard of for too long. Looks once a beat."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + HEARTBEAT_EVERY
            value = self._store.get(self._name)
            if value != self._last or value == HEARTBEAT_PAUSED:
                self._last, self._since = value, now
        return now - self._since >= HEARTBEAT_TIMEOUT

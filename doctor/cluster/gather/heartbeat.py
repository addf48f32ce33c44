"""The heartbeat by which members see that the coordinator of their gather is alive."""

from __future__ import annotations

import time

from doctor.cluster.transport.failover import Store

HEARTBEAT_EVERY, HEARTBEAT_TIMEOUT = 1.0, 5.0
"""Seconds between heartbeats, and without one after which a coordinator counts as dead or stopped."""
HEARTBEAT_PAUSED = b"rest"
"""Value after the gather is closed: evaluating a large job leaves no time for heartbeats."""


class CoordinatorHeartbeat:
    """Heartbeat that the coordinator of a gather writes."""

    def __init__(self, store: Store, nonce: str) -> None:
        self._store = store
        self._name = f"{nonce}/pulse"
        self._count = 0
        self._due = 0.0

    def beat(self) -> None:
        """Write a heartbeat if one is due."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + HEARTBEAT_EVERY
            self._count += 1
            self._store.set(self._name, b"%d" % self._count)

    def rest(self) -> None:
        """Tell monitors to expect no more heartbeats."""
        self._store.set(self._name, HEARTBEAT_PAUSED)


class HeartbeatMonitor:
    """Watches the heartbeat of a gather's coordinator."""

    def __init__(self, store: Store, nonce: str) -> None:
        self._store = store
        self._name = f"{nonce}/pulse"
        self._last: bytes | None = None
        self._since = time.monotonic()
        self._due = 0.0

    def is_silent(self) -> bool:
        """Whether the heartbeat has timed out. Polls at the interval of heartbeats."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + HEARTBEAT_EVERY
            value = self._store.get(self._name)
            if value != self._last or value == HEARTBEAT_PAUSED:
                self._last, self._since = value, now
        return now - self._since >= HEARTBEAT_TIMEOUT

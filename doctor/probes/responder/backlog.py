"""Connections of callers that wait until this host has time for them."""

from __future__ import annotations

import socket
import threading

from doctor.probes.bandwidth.transfer_wire import TransferHandshake
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import affordable, reset_connection

MOST_WAITING = 64
"""That wait at the same time: a host has one caller a round, and a job of 4,096 hosts has a dozen rounds."""


class ConnectionBacklog:
    """A waiting room: the responder's thread brings callers in, and the program asks for the one that is due."""

    def __init__(self) -> None:
        self._waiting: dict[TransferHandshake, socket.socket] = {}
        self._changed = threading.Condition()
        self._most = affordable(MOST_WAITING)
        self._closed = False

    def bring(self, visit: TransferHandshake, connection: socket.socket) -> None:
        """Let a caller wait. One that came for the same before is sent away, and of too many who came first."""
        with self._changed:
            former = self._waiting.pop(visit, None)
            if former is None and len(self._waiting) >= self._most:
                former = self._waiting.pop(next(iter(self._waiting)))
            if self._closed:
                former = connection
            else:
                self._waiting[visit] = connection
            self._changed.notify_all()
        if former is not None:
            reset_connection(former)

    def take(self, visit: TransferHandshake, deadline: ProbeDeadline) -> socket.socket | None:
        """The connection of who came for ``visit``; ``None`` where nobody does before ``deadline``."""
        with self._changed:
            self._changed.wait_for(lambda: visit in self._waiting or self._closed, deadline.left())
            return self._waiting.pop(visit, None)

    def close(self) -> None:
        """Send all away, and everybody who comes from now on."""
        with self._changed:
            self._closed = True
            left = [*self._waiting.values()]
            self._waiting.clear()
            self._changed.notify_all()
        for connection in left:
            reset_connection(connection)

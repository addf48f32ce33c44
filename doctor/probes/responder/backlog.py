"""Accepted connections that wait until this host is ready for their transfer."""

from __future__ import annotations

import socket
import threading

from doctor.probes.bandwidth.transfer_wire import TransferHandshake
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import affordable, reset_connection

MOST_WAITING = 64
"""Maximum of waiting connections: a host has one caller per round, and a job of 4,096 hosts has a dozen rounds."""


class ConnectionBacklog:
    """Waiting connections by handshake: the thread of the responder adds them, the transfer worker takes them."""

    def __init__(self) -> None:
        self._waiting: dict[TransferHandshake, socket.socket] = {}
        self._changed = threading.Condition()
        self._most = affordable(MOST_WAITING)
        self._closed = False

    def add(self, handshake: TransferHandshake, connection: socket.socket) -> None:
        """Keep the connection until it is taken; reset an earlier one with its handshake, or the oldest of too many."""
        with self._changed:
            former = self._waiting.pop(handshake, None)
            if former is None and len(self._waiting) >= self._most:
                former = self._waiting.pop(next(iter(self._waiting)))
            if self._closed:
                former = connection
            else:
                self._waiting[handshake] = connection
            self._changed.notify_all()
        if former is not None:
            reset_connection(former)

    def take(self, handshake: TransferHandshake, deadline: ProbeDeadline) -> socket.socket | None:
        """Return the connection of ``handshake``; ``None`` if there is none before ``deadline``."""
        with self._changed:
            self._changed.wait_for(lambda: handshake in self._waiting or self._closed, deadline.left())
            return self._waiting.pop(handshake, None)

    def close(self) -> None:
        """Reset all waiting connections, and those that are added later."""
        with self._changed:
            self._closed = True
            left = [*self._waiting.values()]
            self._waiting.clear()
            self._changed.notify_all()
        for connection in left:
            reset_connection(connection)

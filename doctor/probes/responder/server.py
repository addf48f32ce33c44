"""Serve all connections of a responder in one thread, with limits on their number, age and inactivity."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from doctor.core.background import start_daemon
from doctor.core.clock import monotonic
from doctor.probes.responder.backlog import ConnectionBacklog
from doctor.probes.responder.responder_protocol import ProtocolViolation, ResponderProtocol, SilentProtocol
from doctor.probes.runtime.tcp_connect import affordable, reset_connection

MOST_CONNECTIONS = 256
"""Maximum of concurrent connections on all ports; further ones wait in the queue of the kernel."""

STRANGER_SECONDS = 4.0
"""Time limit for the greeting. A lost packet is sent again after 1 s, then 2 s (RFC 6298)."""

IDLE_SECONDS = 6.0
LIFE_SECONDS = 20.0

PAUSE = 0.1
"""Seconds between two checks for stale connections, and for which a socket accepts none if there are too many."""


@dataclass(eq=False)
class _ListeningSocket:
    """A listening socket and its protocol. ``paused_until``: no connection is accepted before; 0 if active."""

    socket: socket.socket
    protocol: Callable[[], ResponderProtocol | SilentProtocol]
    paused_until: float = 0.0


@dataclass(eq=False)
class _ServedConnection:
    """An accepted connection and the time of its last data."""

    socket: socket.socket
    protocol: ResponderProtocol | SilentProtocol
    opened: float = field(default_factory=monotonic)
    last_received: float = field(default_factory=monotonic)

    def is_stale(self, now: float) -> bool:
        patience = IDLE_SECONDS if self.protocol.greeted else STRANGER_SECONDS
        return now - self.last_received > patience or now - self.opened > LIFE_SECONDS


class Server:
    """Accept connections and run a protocol for each, in a daemon thread; transfers are moved to ``backlog``."""

    def __init__(self, backlog: ConnectionBacklog) -> None:
        self._backlog = backlog
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._listeners: list[_ListeningSocket] = []
        self._to_resume: deque[_ListeningSocket] = deque()
        self._connections: set[_ServedConnection] = set()
        self._most = affordable(MOST_CONNECTIONS)
        self._closed = False
        self._lock = threading.Lock()
        self._thread = start_daemon("doctor-responder", self._run)

    def serve(self, listener: socket.socket, protocol: Callable[[], ResponderProtocol | SilentProtocol]) -> bool:
        """Accept connections from ``listener``, which is closed with this server; ``False`` if it is closed already."""
        with self._lock:
            if self._closed:
                listener.close()
                return False
            entry = _ListeningSocket(listener, protocol)
            self._listeners.append(entry)
            self._to_resume.append(entry)
        self._wake()
        return True

    def close(self) -> None:
        """Close all sockets and wait for the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for entry in self._listeners:
                # Here and not in the thread: the ports are free however long that may take to notice.
                entry.socket.close()
        self._wake()
        self._thread.join(2.0)

    def _wake(self) -> None:
        with suppress(OSError):  # A full pipe wakes as well; a closed one has no thread any more.
            self._wake_sender.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._closed:
                busy = self._connections or any(entry.paused_until for entry in self._listeners)
                for key, _ in self._selector.select(PAUSE if busy else None):
                    self._dispatch(key.data)
                self._maintain(monotonic())
        finally:
            for connection in self._connections:
                connection.socket.close()
            self._selector.close()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _dispatch(self, source: object) -> None:
        if self._closed:
            return
        if isinstance(source, _ListeningSocket):
            self._accept(source)
        elif isinstance(source, _ServedConnection):
            self._answer(source)
        else:
            self._wake_receiver.recv(4096)

    def _maintain(self, now: float) -> None:
        """Register sockets that are new or no longer paused, and drop stale connections."""
        for entry in self._listeners:
            if entry.paused_until and now >= entry.paused_until:
                entry.paused_until = 0.0
                self._to_resume.append(entry)
        while self._to_resume:
            entry = self._to_resume.popleft()
            with suppress(OSError, ValueError):  # It may have been closed meanwhile.
                self._selector.register(entry.socket, selectors.EVENT_READ, entry)
        for connection in [one for one in self._connections if one.is_stale(now)]:
            self._drop(connection)

    def _accept(self, entry: _ListeningSocket) -> None:
        if len(self._connections) >= self._most:
            self._pause(entry)
            return
        try:
            accepted, _ = entry.socket.accept()
        except BlockingIOError:
            return
        except OSError:
            self._pause(entry)
            return
        connection = _ServedConnection(accepted, entry.protocol())
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        except OSError:  # It was reset already, or the kernel watches no more descriptors.
            reset_connection(accepted)
            return
        self._connections.add(connection)

    def _pause(self, entry: _ListeningSocket) -> None:
        """Stop accepting for a while: too many connections, or no file descriptors left."""
        with suppress(OSError, ValueError, KeyError):
            self._selector.unregister(entry.socket)
        entry.paused_until = monotonic() + PAUSE

    def _answer(self, connection: _ServedConnection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
            if not data:
                self._drop(connection, at_once=False)
                return
            answer = connection.protocol.receive(data)
            connection.last_received = monotonic()
        except BlockingIOError:
            return
        except (OSError, ProtocolViolation):
            self._drop(connection)
            return
        if connection.protocol.handshake is not None:
            self._forget(connection)
            self._backlog.add(connection.protocol.handshake, connection.socket)
        else:
            self._send(connection, answer)

    def _send(self, connection: _ServedConnection, answer: bytes) -> None:
        """Send an answer; a caller that does not read the few short answers is dropped."""
        try:
            sent = connection.socket.send(answer) if answer else 0
        except OSError:
            sent = -1
        if sent < len(answer):
            self._drop(connection)

    def _forget(self, connection: _ServedConnection) -> None:
        self._connections.discard(connection)
        with suppress(OSError, ValueError, KeyError):
            self._selector.unregister(connection.socket)

    def _drop(self, connection: _ServedConnection, *, at_once: bool = True) -> None:
        self._forget(connection)
        if at_once:
            reset_connection(connection.socket)
        else:
            connection.socket.close()

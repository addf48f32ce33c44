"""One thread that serves all connections of a responder, with limits on their number, age and silence."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from doctor.probes.responder.backlog import ConnectionBacklog
from doctor.probes.responder.responder_protocol import ProtocolViolation, ResponderProtocol, SilentProtocol
from doctor.probes.runtime.tcp_connect import affordable, reset_connection

MOST_CONNECTIONS = 256
"""At the same time, on all ports together; others wait in the kernel's backlog."""

STRANGER_SECONDS = 4.0
"""Until who has connected has to have said the word. A lost packet is sent again after 1 s, then 2 s (RFC 6298)."""

IDLE_SECONDS = 6.0
LIFE_SECONDS = 20.0

PAUSE = 0.1
"""Seconds between two looks at the age of connections; also those without taking any, where there are too many."""


@dataclass(eq=False)
class _ListeningSocket:
    """A listening socket, and who answers there. ``shut_until``: no connection is taken before; 0 where it is open."""

    socket: socket.socket
    talk: Callable[[], ResponderProtocol | SilentProtocol]
    shut_until: float = 0.0


@dataclass(eq=False)
class _ServedConnection:
    """An accepted connection, and when it was last heard of."""

    socket: socket.socket
    talk: ResponderProtocol | SilentProtocol
    opened: float = field(default_factory=time.monotonic)
    last_received: float = field(default_factory=time.monotonic)

    def is_stale(self, now: float) -> bool:
        patience = IDLE_SECONDS if self.talk.greeted else STRANGER_SECONDS
        return now - self.last_received > patience or now - self.opened > LIFE_SECONDS


class Server:
    """Takes connections and lets a conversation answer each, in a daemon thread. Who wants to transfer bytes is sent
    to ``guests``."""

    def __init__(self, backlog: ConnectionBacklog) -> None:
        self._backlog = backlog
        self._selector = selectors.DefaultSelector()
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._doors: list[_ListeningSocket] = []
        self._to_open: deque[_ListeningSocket] = deque()
        self._connections: set[_ServedConnection] = set()
        self._most = affordable(MOST_CONNECTIONS)
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="doctor-responder", daemon=True)
        self._thread.start()

    def serve(self, listener: socket.socket, talk: Callable[[], ResponderProtocol | SilentProtocol]) -> bool:
        """Take connections from ``listener``, which is closed with this server; ``False`` where that has happened."""
        with self._lock:
            if self._closed:
                listener.close()
                return False
            door = _ListeningSocket(listener, talk)
            self._doors.append(door)
            self._to_open.append(door)
        self._wake()
        return True

    def close(self) -> None:
        """Close all sockets, and wait for the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for door in self._doors:
                # Here and not in the thread: the ports are free however long that may take to notice.
                door.socket.close()
        self._wake()
        self._thread.join(2.0)

    def _wake(self) -> None:
        with suppress(OSError):  # A full pipe wakes as well; a closed one has no thread any more.
            self._mouth.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._closed:
                busy = self._connections or any(door.shut_until for door in self._doors)
                for key, _ in self._selector.select(PAUSE if busy else None):
                    self._attend(key.data)
                self._tend(time.monotonic())
        finally:
            for connection in self._connections:
                connection.socket.close()
            self._selector.close()
            self._ear.close()
            self._mouth.close()

    def _attend(self, whom: object) -> None:
        if self._closed:
            return
        if isinstance(whom, _ListeningSocket):
            self._accept(whom)
        elif isinstance(whom, _ServedConnection):
            self._answer(whom)
        else:
            self._ear.recv(4096)

    def _tend(self, now: float) -> None:
        """Open doors that are new or were shut for a while, and drop connections that went stale."""
        for door in self._doors:
            if door.shut_until and now >= door.shut_until:
                door.shut_until = 0.0
                self._to_open.append(door)
        while self._to_open:
            door = self._to_open.popleft()
            with suppress(OSError, ValueError):  # It may have been closed meanwhile.
                self._selector.register(door.socket, selectors.EVENT_READ, door)
        for connection in [one for one in self._connections if one.is_stale(now)]:
            self._drop(connection)

    def _accept(self, door: _ListeningSocket) -> None:
        if len(self._connections) >= self._most:
            self._shut(door)
            return
        try:
            accepted, _ = door.socket.accept()
        except BlockingIOError:
            return
        except OSError:
            self._shut(door)
            return
        connection = _ServedConnection(accepted, door.talk())
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        except OSError:  # It was reset already, or the kernel watches no more descriptors.
            reset_connection(accepted)
            return
        self._connections.add(connection)

    def _shut(self, door: _ListeningSocket) -> None:
        """No more from there for a while: too many connections, or no file descriptors left."""
        with suppress(OSError, ValueError, KeyError):
            self._selector.unregister(door.socket)
        door.shut_until = time.monotonic() + PAUSE

    def _answer(self, connection: _ServedConnection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
            if not data:
                self._drop(connection, at_once=False)
                return
            answer = connection.talk.receive(data)
            connection.last_received = time.monotonic()
        except BlockingIOError:
            return
        except (OSError, ProtocolViolation):
            self._drop(connection)
            return
        if connection.talk.visit is not None:
            self._forget(connection)
            self._backlog.bring(connection.talk.visit, connection.socket)
        else:
            self._send(connection, answer)

    def _send(self, connection: _ServedConnection, answer: bytes) -> None:
        """Answers are few and short: whoever lets them pile up does not read them."""
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

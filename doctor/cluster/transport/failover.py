"""Stores over several connections, so that the loss of one does not separate the ranks.

A connection has one of two loss policies. A *required* one raises :class:`StoreLost`, and values are read from it
alone, because it holds all that this process has written. Any other is optional: its calls return ``None`` once it is
lost, ``on_lost`` is called, and it is reopened a few times if it can be. The coordinator of a gather requires its store
and has the shared folder for ranks that cannot reach that store; a watchdog requires nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from doctor.cluster.transport.store import KeyValueStore, Mailbox, Marks, StoreBackend, StoreLost, UntrustedStore
from doctor.core.background import BackgroundCall

T = TypeVar("T")

PATIENCE = 3.0
"""Seconds for one call, after which a connection counts as lost. A hang has to be diagnosed within fifteen."""
AGAIN, TRIES = 30.0, 4
"""Seconds until a lost connection is reopened, doubled each time, and the number of attempts: each of them may leave a
blocked thread behind."""
CONNECTING = 2.0
"""Seconds that a preferred connection has to open before the next one is used instead."""
CHUNK = 200
"""Keys that are read in one call."""


def _ignore(lost: StoreLost) -> None:
    """Do nothing."""


class StoreConnection:
    """One connection to the other ranks, which may be lost and reopened.

    ``opens`` returns its backend; ``admission_prefix`` is the key prefix under which new ranks request admission.
    """

    is_required = False

    def __init__(
        self, admission_prefix: str, opens: Callable[[], StoreBackend], on_lost: Callable[[StoreLost], None] = _ignore
    ) -> None:
        self.admission_prefix = admission_prefix
        self._opens = opens
        self._on_lost = on_lost
        self._opening: BackgroundCall[StoreBackend] | None = None
        self._store: KeyValueStore | None = None
        self._tries = 0
        self._due = 0.0

    @classmethod
    def over(
        cls, store: KeyValueStore, *, required: bool = False, on_lost: Callable[[StoreLost], None] = _ignore
    ) -> StoreConnection:
        """Return the connection of an open store, which is not reopened."""
        connection = cls("", lambda: store.backend, on_lost)
        connection._store, connection._tries, connection.is_required = store, TRIES, required
        return connection

    @property
    def description(self) -> str:
        """Description of its store; empty while it is not open."""
        return self._store.description if self._store is not None else ""

    @property
    def is_alive(self) -> bool:
        """Whether it can be used."""
        return self._store is not None

    @property
    def is_opening(self) -> bool:
        """Whether it is being opened."""
        return self._opening is not None

    def step(self, now: float) -> None:
        """Continue or start opening it if that is due."""
        if self._opening is not None and self._opening.is_done:
            self._finish_opening(self._opening, now)
            self._opening = None
        elif self._opening is None and self._store is None and now >= self._due and self._tries < TRIES:
            self._tries += 1
            self._opening = BackgroundCall(self._opens)

    def _finish_opening(self, opened: BackgroundCall[StoreBackend], now: float) -> None:
        try:
            self._store = KeyValueStore(opened.result(), PATIENCE)
        except (OSError, RuntimeError, ValueError, ImportError):  # refused, not a TCPStore, or torch is missing
            self._lose(now)

    def _lose(self, now: float) -> None:
        if self._store is not None:
            self._store.close()  # its thread ends as soon as it can
        self._store = None
        self._due = now + AGAIN * 2 ** max(0, self._tries - 1)

    def use(self, work: Callable[[KeyValueStore], T]) -> T | None:
        """Run ``work`` with the store and return its result; ``None`` if it is not open or is lost.

        Raises:
            StoreLost: the connection is required.
        """
        if self._store is None:
            return None
        try:
            return work(self._store)
        except StoreLost as lost:
            if self.is_required:
                raise
            self._lose(time.monotonic())
            if isinstance(lost, UntrustedStore):
                self._tries = TRIES
            self._on_lost(lost)
            return None

    def set(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``."""
        self.use(lambda store: store.set(name, data))

    def get(self, name: str) -> bytes | None:
        """Return the value of ``name``."""
        return self.use(lambda store: store.get(name))

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool | None:
        """Write ``new`` if the value is ``old``; return whether it was written."""
        return self.use(lambda store: store.exchange(name, old, new))

    def append(self, name: str, data: bytes) -> None:
        """Append an entry to a mailbox."""
        self.use(lambda store: store.append(name, data))

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those of the names that have one."""
        found: dict[str, bytes] = {}
        for at in range(0, len(names), CHUNK):
            found |= self.use(lambda store, some=names[at : at + CHUNK]: store.call(_get_each(some))) or {}  # type: ignore[misc]
        return found

    def mailbox(self, name: str) -> Mailbox:
        """Return a reader of the mailbox ``name``; it reads all entries again after a reconnect."""
        return Mailbox(name, self.fetch)

    def fetch(self, name: str, marks: Marks) -> list[bytes]:
        """Return the entries of a mailbox beyond ``marks``."""
        return self.use(lambda store: store.fetch(name, marks)) or []

    def clear(self, name: str) -> None:
        """Remove all keys below ``name``."""
        self.use(lambda store: store.clear(name))

    def close(self) -> None:
        """Release the connection, and do not open it again."""
        self._tries = TRIES
        self._opening = None
        if self._store is not None:
            self._store.close()
        self._store = None


def _get_each(names: Sequence[str]) -> Callable[[StoreBackend], dict[str, bytes]]:
    return lambda backend: {name: data for name in names if (data := backend.get(name)) is not None}


class FailoverStore:
    """All store connections of a process, the preferred one first.

    Names are relative to the ``namespace``. Writes go to every open connection, because other ranks may have lost one
    of them. Without :meth:`step` all are read; with it, the preferred one on each step and the others less often.
    ``are_authentic``: messages are signed, so they come from ranks of this job.
    """

    def __init__(self, connections: Sequence[StoreConnection], *, are_authentic: bool = False) -> None:
        self.all = tuple(connections)
        self.are_authentic = are_authentic
        self.namespace = ""
        self.reading = self.alive
        self._began = time.monotonic()
        self._others_due = 0.0

    def step(self, now: float, pause: float) -> None:
        """Begin a polling step; ``pause`` is the seconds between reads of the other connections."""
        for connection in self.all:
            connection.step(now)
        living = self.usable(now)
        self.reading = living[:1]
        if now >= self._others_due:
            self._others_due = now + pause
            self.reading = living

    def usable(self, now: float) -> tuple[StoreConnection, ...]:
        """Return the open connections, briefly waiting for a preferred one that is being opened."""
        may_open = now < self._began + CONNECTING
        opening = (at for at, connection in enumerate(self.all) if connection.is_opening and may_open)
        return tuple(connection for connection in self.all[: next(opening, len(self.all))] if connection.is_alive)

    @property
    def alive(self) -> tuple[StoreConnection, ...]:
        """The connections that can be written to."""
        return tuple(connection for connection in self.all if connection.is_alive)

    @property
    def description(self) -> str:
        """Description of the open connections, for a sentence."""
        return " and ".join(connection.description for connection in self.alive)

    @property
    def survives_coordinator(self) -> bool:
        """Whether the preferred connection outlives the coordinator; see :class:`StoreBackend`."""
        return self.all[0].use(lambda store: store.survives_coordinator) or False

    def read_all(self) -> None:
        """Read every connection on this step."""
        self.reading = self.alive

    def set(self, name: str, data: bytes) -> None:
        """Write to every connection."""
        for connection in self.alive:
            connection.set(self._key(name), data)

    def set_on_best(self, name: str, data: bytes) -> None:
        """Write to the preferred connection alone, for values that are renewed often."""
        for connection in self.alive[:1]:
            connection.set(self._key(name), data)

    def append(self, name: str, data: bytes) -> None:
        """Append an entry to a mailbox on every connection, where readers of several find it several times."""
        for connection in self.alive:
            connection.append(self._key(name), data)

    def get(self, name: str) -> bytes | None:
        """Return the value of a name from the first connection that has one, or from the required one alone."""
        found = (connection.get(self._key(name)) for connection in _deciding(self.reading))
        return next((data for data in found if data is not None), None)

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` where the value is ``old``; return whether no other process was first on any connection.

        If a connection is required, it decides, and the others follow.
        """
        deciding = _deciding(self.alive)
        won = False not in [connection.exchange(self._key(name), old, new) for connection in deciding]
        for connection in self.alive if won else ():
            if connection not in deciding:
                connection.set(self._key(name), new)
        return won

    def get_many(self, names: Iterable[str], connections: Sequence[StoreConnection]) -> dict[str, tuple[bytes, ...]]:
        """Return the values of each name on these connections; names without a value are omitted."""
        full = {self._key(name): name for name in names}
        found: dict[str, tuple[bytes, ...]] = {}
        for connection in connections:
            for name, data in connection.get_many([*full]).items():
                found[full[name]] = (*found.get(full[name], ()), data)
        return found

    def mailbox(self, name: str) -> Mailbox:
        """Return a reader of a mailbox on the connections that are read."""
        return Mailbox(self._key(name), self.fetch)

    def fetch(self, key: str, marks: Marks) -> list[bytes]:
        """Return the entries of a mailbox beyond ``marks``, from each connection that is read on this step."""
        return [data for connection in self.reading for data in connection.fetch(key, marks)]

    def clear(self, name: str) -> None:
        """Remove all keys below ``name`` on every connection."""
        for connection in self.alive:
            connection.clear(self._key(name))

    def clear_run(self, emptied: Iterable[str]) -> None:
        """Remove the keys of this run.

        A TCPStore cannot delete keys: values under the names ``emptied``, which are most of the data, are emptied.
        """
        full = [self._key(name) for name in emptied]
        for connection in self.alive:
            connection.clear(self.namespace)
            connection.clear(connection.admission_prefix)
            for name in connection.get_many(full):
                connection.set(name, b"")

    def acknowledge(self, verdict: str, mailbox: str, data: bytes) -> bool:
        """Append to ``mailbox`` wherever ``verdict`` is set; return whether keys were removed.

        The rank that decided clears the store once all others have acknowledged or its deadline has passed. An entry
        that was appended after that has created the folders again, and no other rank would remove them.
        """
        removed = False
        for connection in self.alive:
            if connection.get(self._key(verdict)) is None:
                continue
            connection.append(self._key(mailbox), data)
            if connection.get(self._key(verdict)) is None:
                connection.clear(self.namespace)
                removed = True
        return removed

    def close(self) -> None:
        """Release all connections."""
        for connection in self.all:
            connection.close()

    def _key(self, name: str) -> str:
        return f"{self.namespace}/{name}" if self.namespace else name


def _deciding(connections: Sequence[StoreConnection]) -> Sequence[StoreConnection]:
    return [connection for connection in connections if connection.is_required] or connections


Store = KeyValueStore | FailoverStore

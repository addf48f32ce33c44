"""Store connections of the watchdog, with failover from the TCPStore to a shared folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from doctor.cluster.transport.store import KeyValueStore, Mailbox, StoreBackend, StoreLost, UntrustedStore
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


class StoreConnection:
    """One connection to the other ranks, which may be lost and reopened.

    ``admission_prefix`` is the key prefix under which new ranks request admission. ``refused`` is called once if the
    store is not safe to use. Calls return ``None`` if the connection is not open, or is lost during the call.
    """

    def __init__(
        self,
        admission_prefix: str,
        opens: Callable[[], StoreBackend],
        refused: Callable[[UntrustedStore], None] = lambda why: None,
    ) -> None:
        self.admission_prefix = admission_prefix
        self.description = ""
        self._opens = opens
        self._refused = refused
        self._opening: BackgroundCall[StoreBackend] | None = None
        self._store: KeyValueStore | None = None
        self._tries = 0
        self._due = 0.0

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
            backend = opened.result()
        except (OSError, RuntimeError, ValueError, ImportError):  # refused, not a TCPStore, or torch is missing
            self._lose(now)
        else:
            self._store, self.description = KeyValueStore(backend, PATIENCE), backend.description

    def _lose(self, now: float) -> None:
        if self._store is not None:
            self._store.close()  # its thread ends as soon as it can
        self._store = None
        self._due = now + AGAIN * 2 ** max(0, self._tries - 1)

    def use(self, work: Callable[[KeyValueStore], T]) -> T | None:
        """Run ``work`` with the store and return its result."""
        if self._store is None:
            return None
        try:
            return work(self._store)
        except UntrustedStore as refused:
            self._lose(time.monotonic())
            self._tries = TRIES
            self._refused(refused)
            return None
        except StoreLost:
            self._lose(time.monotonic())
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
        self.use(lambda store: store.mailbox(name).append(data))

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those of the names that have one."""
        found: dict[str, bytes] = {}
        for at in range(0, len(names), CHUNK):
            found |= self.use(lambda store, some=names[at : at + CHUNK]: store.call(_get_each(some))) or {}  # type: ignore[misc]
        return found

    def reader(self, name: str) -> ConnectionReader:
        """Return a reader of the mailbox ``name``."""
        return ConnectionReader(self, name)

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


class ConnectionReader:
    """Reads each entry of a mailbox once, and all of them again after a reconnect."""

    def __init__(self, connection: StoreConnection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._known: tuple[KeyValueStore, Mailbox] | None = None

    def fresh(self) -> list[bytes]:
        """Return the entries that this reader has not returned yet."""
        return self._connection.use(self._look) or []

    def _look(self, store: KeyValueStore) -> list[bytes]:
        if self._known is None or self._known[0] is not store:
            self._known = (store, store.mailbox(self._name))
        return self._known[1].fresh()


class FailoverStore:
    """All store connections of a rank, the preferred one first.

    Names are relative to the ``namespace`` of this run. Writes go to every open connection, because other ranks may
    have lost one of them. The preferred connection is read on each step, the others less often. ``are_authentic``:
    messages are signed, so they come from ranks of this job.
    """

    def __init__(self, connections: Sequence[StoreConnection], *, are_authentic: bool = False) -> None:
        self.all = tuple(connections)
        self.are_authentic = are_authentic
        self.namespace = ""
        self.reading: tuple[StoreConnection, ...] = ()
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
        opening = (
            namespace
            for namespace, connection in enumerate(self.all)
            if connection.is_opening and now < self._began + CONNECTING
        )
        return tuple(connection for connection in self.all[: next(opening, len(self.all))] if connection.is_alive)

    @property
    def alive(self) -> tuple[StoreConnection, ...]:
        """The connections that can be written to."""
        return tuple(connection for connection in self.all if connection.is_alive)

    @property
    def description(self) -> str:
        """Description of the open connections, for a sentence."""
        return " and ".join(connection.description for connection in self.alive)

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
        """Append an entry to a mailbox on every connection."""
        for connection in self.alive:
            connection.append(self._key(name), data)

    def get(self, name: str) -> bytes | None:
        """Return the value of a name from the first connection that has one."""
        found = (connection.get(self._key(name)) for connection in self.reading)
        return next((data for data in found if data is not None), None)

    def claim(self, name: str, data: bytes) -> bool:
        """Write unless a value exists; return whether no other process was first on any connection."""
        return False not in [connection.exchange(self._key(name), None, data) for connection in self.alive]

    def get_many(self, names: Iterable[str], connections: Sequence[StoreConnection]) -> dict[str, tuple[bytes, ...]]:
        """Return the values of each name on these connections; names without a value are omitted."""
        full = {self._key(name): name for name in names}
        found: dict[str, tuple[bytes, ...]] = {}
        for connection in connections:
            for name, data in connection.get_many([*full]).items():
                found[full[name]] = (*found.get(full[name], ()), data)
        return found

    def reader(self, name: str) -> FailoverReader:
        """Return a reader of a mailbox on all connections."""
        return FailoverReader(self, self._key(name))

    def clear(self, names: Iterable[str]) -> None:
        """Remove the keys of this run.

        A TCPStore cannot delete keys: values under these ``names``, which are most of the data, are emptied.
        """
        full = [self._key(name) for name in names]
        for connection in self.alive:
            connection.clear(self.namespace)
            connection.clear(connection.admission_prefix)
            for name in connection.get_many(full):
                connection.set(name, b"")

    def acknowledge(self, ruling: str, box: str, data: bytes) -> bool:
        """Append to ``box`` wherever ``ruling`` is set; return whether keys were removed.

        The rank that decided clears the store once all others have acknowledged or its deadline has passed. An entry
        that was appended after that has created the folders again, and no other rank would remove them.
        """
        removed = False
        for connection in self.alive:
            if connection.get(self._key(ruling)) is None:
                continue
            connection.append(self._key(box), data)
            if connection.get(self._key(ruling)) is None:
                connection.clear(self.namespace)
                removed = True
        return removed

    def close(self) -> None:
        """Release all connections."""
        for connection in self.all:
            connection.close()

    def _key(self, name: str) -> str:
        return f"{self.namespace}/{name}"


class FailoverReader:
    """Reads each mailbox entry once per connection, so twice if two connections hold it."""

    def __init__(self, connections: FailoverStore, name: str) -> None:
        self._connections = connections
        self._name = name
        self._readers: dict[StoreConnection, ConnectionReader] = {}

    def fresh(self) -> list[bytes]:
        """Return new entries of the connections that are read on this step."""
        readers = [
            self._readers.setdefault(connection, connection.reader(self._name))
            for connection in self._connections.reading
        ]
        return [data for reader in readers for data in reader.fresh()]

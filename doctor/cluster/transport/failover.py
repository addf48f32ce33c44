"""Stores over several connections, so that the loss of one does not separate the ranks.

A store has one of two loss policies. A required one (:class:`KeyValueStore`) raises :class:`StoreLost`, and values are
read from it alone, because it holds all that this process has written. An optional one (:class:`StoreConnection`)
returns ``None``, and is reopened a few times if it can be. The coordinator of a gather requires its store and has the
shared folder for ranks that cannot reach that store; a watchdog requires nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from doctor.cluster.transport.store import KeyValueStore, Mailbox, Marks, StoreBackend, StoreLost, UntrustedStore
from doctor.core.background import BackgroundCall
from doctor.core.clock import monotonic

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


class StoreConnection(KeyValueStore):
    """An optional connection to the other ranks, which may be lost and reopened.

    ``opens`` returns its backend; ``admission_prefix`` is the key prefix under which new ranks request admission.
    ``on_lost`` is called when it is lost.
    """

    is_alive = False
    """Whether it can be used."""

    def __init__(
        self,
        admission_prefix: str,
        opens: Callable[[], StoreBackend],
        on_lost: Callable[[StoreLost], None] | None = None,
    ) -> None:
        self.admission_prefix = admission_prefix
        self.patience = PATIENCE
        self._opens = opens
        self._on_lost = on_lost
        self._opening: BackgroundCall[StoreBackend] | None = None
        self._tries = 0
        self._due = 0.0

    @classmethod
    def over(cls, backend: StoreBackend, patience: float, on_lost: Callable[[StoreLost], None]) -> StoreConnection:
        """Return a connection that is open, and is not reopened."""
        connection = cls("", lambda: backend, on_lost)
        connection.patience, connection._tries = patience, TRIES
        connection._use(backend)
        return connection

    @property
    def is_opening(self) -> bool:
        """Whether it is being opened."""
        return self._opening is not None

    def step(self, now: float) -> None:
        """Continue or start opening it if that is due."""
        if self._opening is not None and self._opening.is_done:
            try:
                self._use(self._opening.result())
            except (OSError, RuntimeError, ValueError, ImportError):  # refused, not a TCPStore, or torch is missing
                self._lose(now)
            self._opening = None
        elif self._opening is None and not self.is_alive and now >= self._due and self._tries < TRIES:
            self._tries += 1
            self._opening = BackgroundCall(self._opens)

    def _use(self, backend: StoreBackend) -> None:
        super().__init__(backend, self.patience)
        self.is_alive = True

    def _lose(self, now: float) -> None:
        was_alive, self.is_alive = self.is_alive, False
        if was_alive:
            super().close()  # its thread ends as soon as it can
        self._due = now + AGAIN * 2 ** max(0, self._tries - 1)

    def use(self, work: Callable[[StoreBackend], T], otherwise: T) -> T:
        """Run ``work`` with the backend; return ``otherwise`` if it is not open or is lost."""
        if not self.is_alive:
            return otherwise
        try:
            return self.call(work)
        except StoreLost as lost:
            self._lose(monotonic())
            if isinstance(lost, UntrustedStore):
                self._tries = TRIES
            if self._on_lost is not None:
                self._on_lost(lost)
            return otherwise

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those of the names that have one."""
        found: dict[str, bytes] = {}
        for at in range(0, len(names), CHUNK):
            some: dict[str, bytes] = self.use(partial(_get_each, names[at : at + CHUNK]), {})
            found |= some
        return found

    def close(self) -> None:
        """Release the connection, and do not open it again."""
        self._tries = TRIES
        self._opening = None
        was_alive, self.is_alive = self.is_alive, False  # a call meanwhile would start another thread
        if was_alive:
            super().close()


def _get_each(names: Sequence[str], backend: StoreBackend) -> dict[str, bytes]:
    return {name: data for name in names if (data := backend.get(name)) is not None}


class FailoverStore:
    """All store connections of a process: the ``required`` store, if there is one, and optional ones.

    The first connection is preferred. Names are relative to the ``namespace``. Writes go to every open connection,
    because other ranks may have lost one of them. Without :meth:`step` all are read; with it, the preferred one on each
    step and the others less often. ``are_authentic``: messages are signed, so they come from ranks of this job.
    """

    def __init__(
        self,
        connections: Sequence[StoreConnection],
        required: KeyValueStore | None = None,
        *,
        are_authentic: bool = False,
    ) -> None:
        self.all = tuple(connections)
        self.are_authentic = are_authentic
        self._required = required
        self.namespace = ""
        self.reading = self.alive
        self._began = monotonic()
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
    def _stores(self) -> tuple[KeyValueStore, ...]:
        return self.alive if self._required is None else (self._required, *self.alive)

    @property
    def description(self) -> str:
        """Description of the open connections, for a sentence."""
        return " and ".join(store.description for store in self._stores)

    @property
    def survives_coordinator(self) -> bool:
        """Whether the required store outlives the coordinator."""
        return self._required is not None and self._required.survives_coordinator

    def read_all(self) -> None:
        """Read every connection on this step."""
        self.reading = self.alive

    def set(self, name: str, data: bytes) -> None:
        """Write to every connection."""
        for store in self._stores:
            store.set(self._key(name), data)

    def set_on_best(self, name: str, data: bytes) -> None:
        """Write to the preferred connection alone, for values that are renewed often."""
        for connection in self.alive[:1]:
            connection.set(self._key(name), data)

    def append(self, name: str, data: bytes) -> None:
        """Append an entry to a mailbox on every connection, where readers of several find it several times."""
        for store in self._stores:
            store.append(self._key(name), data)

    def get(self, name: str) -> bytes | None:
        """Return the value of a name in the required store, or in the first connection that has one."""
        if self._required is not None:
            return self._required.get(self._key(name))
        found = (connection.get(self._key(name)) for connection in self.reading)
        return next((data for data in found if data is not None), None)

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` where the value is ``old``; return whether no other process was first on any connection.

        The required store decides if there is one, and the others follow.
        """
        if self._required is None:
            lost = [not one.exchange(self._key(name), old, new) and one.is_alive for one in self.alive]
            return not any(lost)
        won = self._required.exchange(self._key(name), old, new)
        if won:
            self.set(name, new)
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
        required = () if self._required is None else (self._required,)
        return [data for store in (*required, *self.reading) for data in store.fetch(key, marks)]

    def clear(self, name: str) -> None:
        """Remove all keys below ``name`` on every connection."""
        for store in self._stores:
            store.clear(self._key(name))

    def clear_run(self, emptied: Iterable[str]) -> None:
        """Remove the keys of this run; a TCPStore cannot, so the largest values, those ``emptied``, become empty."""
        full = [self._key(name) for name in emptied]
        for connection in self.alive:
            connection.clear(self.namespace)
            connection.clear(connection.admission_prefix)
            for name in connection.get_many(full):
                connection.set(name, b"")

    def close(self) -> None:
        """Release all connections."""
        for store in (*self._stores, *self.all):
            store.close()

    def _key(self, name: str) -> str:
        return f"{self.namespace}/{name}" if self.namespace else name


Store = KeyValueStore | FailoverStore

"""The lines to the other ranks: the store, and the folder where that one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from doctor.cluster.transport.store import KeyValueStore, Mailbox, StoreBackend, StoreLost, UntrustedStore
from doctor.core.background import BackgroundCall

T = TypeVar("T")

PATIENCE = 3.0
"""Seconds for one call, after which a line is taken for lost. A hang is to be judged within fifteen."""
AGAIN, TRIES = 30.0, 4
"""Seconds until a line that was lost is tried again, twice as many each time, and how often at all: each time may leave
a thread behind that waits for ever."""
CONNECTING = 2.0
"""Seconds that a better line has to come up before the next one is used in its place."""
CHUNK = 200
"""Names that are read in one call."""


class StoreConnection:
    """One way to the others, which may be lost and found again. ``bell``: the name under which newcomers ring.
    ``refused`` gets to know, once, why it is not safe to use, if it is not.

    Calls give ``None`` where the line is not alive, or is lost by them.
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
        """Go on opening it, where that is due."""
        if self._opening is not None and self._opening.is_done:
            self._finish_opening(self._opening, now)
            self._opening = None
        elif self._opening is None and self._store is None and now >= self._due and self._tries < TRIES:
            self._tries += 1
            self._opening = BackgroundCall(self._opens)

    def _finish_opening(self, opened: BackgroundCall[StoreBackend], now: float) -> None:
        try:
            backend = opened.result()
        except (OSError, RuntimeError, ValueError, ImportError):  # nobody listens, no store of torch, no torch
            self._lose(now)
        else:
            self._store, self.description = KeyValueStore(backend, PATIENCE), backend.description

    def _lose(self, now: float) -> None:
        if self._store is not None:
            self._store.close()  # its thread ends as soon as it can
        self._store = None
        self._due = now + AGAIN * 2 ** max(0, self._tries - 1)

    def use(self, work: Callable[[KeyValueStore], T]) -> T | None:
        """What ``work`` gives."""
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
        """What stands under ``name``."""
        return self.use(lambda store: store.get(name))

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool | None:
        """Write ``new`` where ``old`` stands; whether it did."""
        return self.use(lambda store: store.exchange(name, old, new))

    def append(self, name: str, data: bytes) -> None:
        """Add an entry to a box."""
        self.use(lambda store: store.mailbox(name).append(data))

    def get_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """What stands under those of the names under which anything does."""
        found: dict[str, bytes] = {}
        for at in range(0, len(names), CHUNK):
            found |= self.use(lambda store, some=names[at : at + CHUNK]: store.call(_get_each(some))) or {}  # type: ignore[misc]
        return found

    def reader(self, name: str) -> ConnectionReader:
        """A reader's own view of a box."""
        return ConnectionReader(self, name)

    def clear(self, name: str) -> None:
        """Remove everything below ``name``."""
        self.use(lambda store: store.clear(name))

    def close(self) -> None:
        """Give back what it holds, and open it no more."""
        self._tries = TRIES
        self._opening = None
        if self._store is not None:
            self._store.close()
        self._store = None


def _get_each(names: Sequence[str]) -> Callable[[StoreBackend], dict[str, bytes]]:
    return lambda backend: {name: data for name in names if (data := backend.get(name)) is not None}


class ConnectionReader:
    """Entries of a box, each read once; all of them again where the line was lost in between."""

    def __init__(self, connection: StoreConnection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._known: tuple[KeyValueStore, Mailbox] | None = None

    def fresh(self) -> list[bytes]:
        """Entries that this reader has not seen yet."""
        return self._connection.use(self._look) or []

    def _look(self, store: KeyValueStore) -> list[bytes]:
        if self._known is None or self._known[0] is not store:
            self._known = (store, store.mailbox(self._name))
        return self._known[1].fresh()


class FailoverStore:
    """All lines, the best first. Names are those within the ``place`` of this run.

    What is said goes to every line that is alive: others may have lost one of them. The best one is read at each beat,
    the others less often. ``are_authentic``: what comes by them is from ranks of this job, as it is signed.
    """

    def __init__(self, connections: Sequence[StoreConnection], *, are_authentic: bool = False) -> None:
        self.all = tuple(connections)
        self.are_authentic = are_authentic
        self.namespace = ""
        self.reading: tuple[StoreConnection, ...] = ()
        self._began = time.monotonic()
        self._others_due = 0.0

    def step(self, now: float, pause: float) -> None:
        """Begin a beat. ``pause``: seconds between looks at the lines that are not the best."""
        for connection in self.all:
            connection.step(now)
        living = self.usable(now)
        self.reading = living[:1]
        if now >= self._others_due:
            self._others_due = now + pause
            self.reading = living

    def usable(self, now: float) -> tuple[StoreConnection, ...]:
        """Those that are alive. One that is being opened is waited for a moment, and those after it with it."""
        opening = (
            namespace
            for namespace, connection in enumerate(self.all)
            if connection.is_opening and now < self._began + CONNECTING
        )
        return tuple(connection for connection in self.all[: next(opening, len(self.all))] if connection.is_alive)

    @property
    def alive(self) -> tuple[StoreConnection, ...]:
        """Those that can be written to."""
        return tuple(connection for connection in self.all if connection.is_alive)

    @property
    def description(self) -> str:
        """What carries them, for a sentence."""
        return " and ".join(connection.description for connection in self.alive)

    def read_all(self) -> None:
        """In this beat all of them are read."""
        self.reading = self.alive

    def set(self, name: str, data: bytes) -> None:
        """Write on every line."""
        for connection in self.alive:
            connection.set(self._key(name), data)

    def set_on_best(self, name: str, data: bytes) -> None:
        """Write on the best line alone: what is renewed again and again."""
        for connection in self.alive[:1]:
            connection.set(self._key(name), data)

    def append(self, name: str, data: bytes) -> None:
        """Add an entry to a box on every line."""
        for connection in self.alive:
            connection.append(self._key(name), data)

    def get(self, name: str) -> bytes | None:
        """What stands under a name on the first line that has it."""
        found = (connection.get(self._key(name)) for connection in self.reading)
        return next((data for data in found if data is not None), None)

    def claim(self, name: str, data: bytes) -> bool:
        """Write where nothing stands yet; whether nobody was quicker on any line."""
        return False not in [connection.exchange(self._key(name), None, data) for connection in self.alive]

    def get_many(self, names: Iterable[str], connections: Sequence[StoreConnection]) -> dict[str, tuple[bytes, ...]]:
        """What stands under each of these names on these lines; names under which nothing does are left out."""
        full = {self._key(name): name for name in names}
        found: dict[str, tuple[bytes, ...]] = {}
        for connection in connections:
            for name, data in connection.get_many([*full]).items():
                found[full[name]] = (*found.get(full[name], ()), data)
        return found

    def reader(self, name: str) -> FailoverReader:
        """A reader's own view of a box, on all lines."""
        return FailoverReader(self, self._key(name))

    def clear(self, names: Iterable[str]) -> None:
        """Remove what this run left. A store forgets nothing; what stands there under these ``names``, which is most of
        it, becomes empty."""
        full = [self._key(name) for name in names]
        for connection in self.alive:
            connection.clear(self.namespace)
            connection.clear(connection.admission_prefix)
            for name in connection.get_many(full):
                connection.set(name, b"")

    def acknowledge(self, ruling: str, box: str, data: bytes) -> bool:
        """Add an entry to ``box`` on every line where ``ruling`` is set; whether what this run left had to be removed.

        The rank that ruled clears the board once all others have acknowledged or its patience ends. An entry that was
        added after that has made the folders anew, and nobody else would remove them.
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
        """Give back what they hold."""
        for connection in self.all:
            connection.close()

    def _key(self, name: str) -> str:
        return f"{self.namespace}/{name}"


class FailoverReader:
    """Entries of a box on all lines, each read once a line: what was said on two of them comes twice."""

    def __init__(self, connections: FailoverStore, name: str) -> None:
        self._connections = connections
        self._name = name
        self._readers: dict[StoreConnection, ConnectionReader] = {}

    def fresh(self) -> list[bytes]:
        """Entries that this reader has not seen, on the lines that are read in this beat."""
        readers = [
            self._readers.setdefault(connection, connection.reader(self._name))
            for connection in self._connections.reading
        ]
        return [data for reader in readers for data in reader.fresh()]

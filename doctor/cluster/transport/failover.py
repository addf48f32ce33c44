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
        self, bell: str, opens: Callable[[], StoreBackend], refused: Callable[[UntrustedStore], None] = lambda why: None
    ) -> None:
        self.bell = bell
        self.words = ""
        self._opens = opens
        self._refused = refused
        self._soon: BackgroundCall[StoreBackend] | None = None
        self._board: KeyValueStore | None = None
        self._tries = 0
        self._due = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether it can be used."""
        return self._board is not None

    @property
    def is_coming(self) -> bool:
        """Whether it is being opened."""
        return self._soon is not None

    def step(self, now: float) -> None:
        """Go on opening it, where that is due."""
        if self._soon is not None and self._soon.is_done:
            self._take(self._soon, now)
            self._soon = None
        elif self._soon is None and self._board is None and now >= self._due and self._tries < TRIES:
            self._tries += 1
            self._soon = BackgroundCall(self._opens)

    def _take(self, opened: BackgroundCall[StoreBackend], now: float) -> None:
        try:
            carrier = opened.result()
        except (OSError, RuntimeError, ValueError, ImportError):  # nobody listens, no store of torch, no torch
            self._lose(now)
        else:
            self._board, self.words = KeyValueStore(carrier, PATIENCE), carrier.words

    def _lose(self, now: float) -> None:
        if self._board is not None:
            self._board.close()  # its thread ends as soon as it can
        self._board = None
        self._due = now + AGAIN * 2 ** max(0, self._tries - 1)

    def use(self, work: Callable[[KeyValueStore], T]) -> T | None:
        """What ``work`` gives."""
        if self._board is None:
            return None
        try:
            return work(self._board)
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
        self.use(lambda board: board.set(name, data))

    def get(self, name: str) -> bytes | None:
        """What stands under ``name``."""
        return self.use(lambda board: board.get(name))

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool | None:
        """Write ``new`` where ``old`` stands; whether it did."""
        return self.use(lambda board: board.exchange(name, old, new))

    def append(self, name: str, data: bytes) -> None:
        """Add an entry to a box."""
        self.use(lambda board: board.box(name).append(data))

    def several(self, names: Sequence[str]) -> dict[str, bytes]:
        """What stands under those of the names under which anything does."""
        found: dict[str, bytes] = {}
        for at in range(0, len(names), CHUNK):
            found |= self.use(lambda board, some=names[at : at + CHUNK]: board.call(_reads(some))) or {}  # type: ignore[misc]
        return found

    def reader(self, name: str) -> ConnectionReader:
        """A reader's own view of a box."""
        return ConnectionReader(self, name)

    def clear(self, name: str) -> None:
        """Remove everything below ``name``."""
        self.use(lambda board: board.clear(name))

    def close(self) -> None:
        """Give back what it holds, and open it no more."""
        self._tries = TRIES
        self._soon = None
        if self._board is not None:
            self._board.close()
        self._board = None


def _reads(names: Sequence[str]) -> Callable[[StoreBackend], dict[str, bytes]]:
    return lambda carrier: {name: data for name in names if (data := carrier.get(name)) is not None}


class ConnectionReader:
    """Entries of a box, each read once; all of them again where the line was lost in between."""

    def __init__(self, line: StoreConnection, name: str) -> None:
        self._line = line
        self._name = name
        self._known: tuple[KeyValueStore, Mailbox] | None = None

    def fresh(self) -> list[bytes]:
        """Entries that this reader has not seen yet."""
        return self._line.use(self._look) or []

    def _look(self, board: KeyValueStore) -> list[bytes]:
        if self._known is None or self._known[0] is not board:
            self._known = (board, board.box(self._name))
        return self._known[1].fresh()


class FailoverStore:
    """All lines, the best first. Names are those within the ``place`` of this run.

    What is said goes to every line that is alive: others may have lost one of them. The best one is read at each beat,
    the others less often. ``are_authentic``: what comes by them is from ranks of this job, as it is signed.
    """

    def __init__(self, lines: Sequence[StoreConnection], *, are_authentic: bool = False) -> None:
        self.all = tuple(lines)
        self.are_authentic = are_authentic
        self.place = ""
        self.reading: tuple[StoreConnection, ...] = ()
        self._began = time.monotonic()
        self._others_due = 0.0

    def step(self, now: float, pause: float) -> None:
        """Begin a beat. ``pause``: seconds between looks at the lines that are not the best."""
        for line in self.all:
            line.step(now)
        living = self.usable(now)
        self.reading = living[:1]
        if now >= self._others_due:
            self._others_due = now + pause
            self.reading = living

    def usable(self, now: float) -> tuple[StoreConnection, ...]:
        """Those that are alive. One that is being opened is waited for a moment, and those after it with it."""
        coming = (place for place, line in enumerate(self.all) if line.is_coming and now < self._began + CONNECTING)
        return tuple(line for line in self.all[: next(coming, len(self.all))] if line.is_alive)

    @property
    def alive(self) -> tuple[StoreConnection, ...]:
        """Those that can be written to."""
        return tuple(line for line in self.all if line.is_alive)

    @property
    def words(self) -> str:
        """What carries them, for a sentence."""
        return " and ".join(line.words for line in self.alive)

    def read_all(self) -> None:
        """In this beat all of them are read."""
        self.reading = self.alive

    def set(self, name: str, data: bytes) -> None:
        """Write on every line."""
        for line in self.alive:
            line.set(self._at_place(name), data)

    def set_on_best(self, name: str, data: bytes) -> None:
        """Write on the best line alone: what is renewed again and again."""
        for line in self.alive[:1]:
            line.set(self._at_place(name), data)

    def append(self, name: str, data: bytes) -> None:
        """Add an entry to a box on every line."""
        for line in self.alive:
            line.append(self._at_place(name), data)

    def get(self, name: str) -> bytes | None:
        """What stands under a name on the first line that has it."""
        found = (line.get(self._at_place(name)) for line in self.reading)
        return next((data for data in found if data is not None), None)

    def claim(self, name: str, data: bytes) -> bool:
        """Write where nothing stands yet; whether nobody was quicker on any line."""
        return False not in [line.exchange(self._at_place(name), None, data) for line in self.alive]

    def several(self, names: Iterable[str], lines: Sequence[StoreConnection]) -> dict[str, tuple[bytes, ...]]:
        """What stands under each of these names on these lines; names under which nothing does are left out."""
        full = {self._at_place(name): name for name in names}
        found: dict[str, tuple[bytes, ...]] = {}
        for line in lines:
            for name, data in line.several([*full]).items():
                found[full[name]] = (*found.get(full[name], ()), data)
        return found

    def reader(self, name: str) -> FailoverReader:
        """A reader's own view of a box, on all lines."""
        return FailoverReader(self, self._at_place(name))

    def clear(self, names: Iterable[str]) -> None:
        """Remove what this run left. A store forgets nothing; what stands there under these ``names``, which is most of
        it, becomes empty."""
        full = [self._at_place(name) for name in names]
        for line in self.alive:
            line.clear(self.place)
            line.clear(line.bell)
            for name in line.several(full):
                line.set(name, b"")

    def acknowledge(self, ruling: str, box: str, data: bytes) -> bool:
        """Add an entry to ``box`` on every line where ``ruling`` is set; whether what this run left had to be removed.

        The rank that ruled clears the board once all others have acknowledged or its patience ends. An entry that was
        added after that has made the folders anew, and nobody else would remove them.
        """
        removed = False
        for line in self.alive:
            if line.get(self._at_place(ruling)) is None:
                continue
            line.append(self._at_place(box), data)
            if line.get(self._at_place(ruling)) is None:
                line.clear(self.place)
                removed = True
        return removed

    def close(self) -> None:
        """Give back what they hold."""
        for line in self.all:
            line.close()

    def _at_place(self, name: str) -> str:
        return f"{self.place}/{name}"


class FailoverReader:
    """Entries of a box on all lines, each read once a line: what was said on two of them comes twice."""

    def __init__(self, lines: FailoverStore, name: str) -> None:
        self._lines = lines
        self._name = name
        self._readers: dict[StoreConnection, ConnectionReader] = {}

    def fresh(self) -> list[bytes]:
        """Entries that this reader has not seen, on the lines that are read in this beat."""
        readers = [self._readers.setdefault(line, line.reader(self._name)) for line in self._lines.reading]
        return [data for reader in readers for data in reader.fresh()]

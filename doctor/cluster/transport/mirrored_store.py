"""One board carried by two: those who can't reach the store leave their messages in the shared folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from doctor.cluster.transport.store import KeyValueStore, StoreBackend, StoreLost

T = TypeVar("T")


class MirroredBackend:
    """A carrier that writes to both and reads from either; see :class:`doctor.cluster.transport.store.StoreBackend`.

    The ``second`` may be lost on the way, which ``tell`` gets to know; the gathering goes on by the first.
    """

    survives_coordinator = False

    def __init__(self, first: StoreBackend, second: KeyValueStore, write_line: Callable[[str], None]) -> None:
        self.description = f"{first.description} and {second.description}"
        self._first = first
        self._second: KeyValueStore | None = second
        self._write_line = write_line

    def set(self, name: str, data: bytes) -> None:
        """To both."""
        self._first.set(name, data)
        self._also(lambda second: second.set(name, data))

    def get(self, name: str) -> bytes | None:
        """From the first, which all of this process's own words went to."""
        return self._first.get(name)

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """By the first."""
        return self._first.exchange(name, old, new)

    def append(self, name: str, data: bytes) -> None:
        """To the first: boxes are read from both."""
        self._first.append(name, data)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """``mark`` is a pair of marks."""
        own, others = mark if isinstance(mark, tuple) else (None, None)
        entries, own = self._first.fetch(name, own)
        found = self._also(lambda second: second.call(lambda backend: backend.fetch(name, others)))
        more, others = found or ([], others)
        return [*entries, *more], (own, others)

    def clear(self, name: str) -> None:
        """In both."""
        self._first.clear(name)
        self._also(lambda second: second.clear(name))

    def close(self) -> None:
        """Both."""
        self._first.close()
        self._also(lambda second: second.close())

    def _also(self, work: Callable[[KeyValueStore], T]) -> T | None:
        try:
            return work(self._second) if self._second is not None else None
        except StoreLost:
            self._second = None
            self._write_line("the shared folder is lost: ranks that do not reach the store are not heard any more")
            return None


def mirror(first: KeyValueStore, second: KeyValueStore, write_line: Callable[[str], None]) -> KeyValueStore:
    """The ``first`` board, with what others leave on the ``second``; ``tell`` gets to know when that one is lost."""
    # The second has to give up first: the first is not lost with it.
    return KeyValueStore(
        MirroredBackend(first.backend, KeyValueStore(second.backend, first.patience / 3), write_line), first.patience
    )

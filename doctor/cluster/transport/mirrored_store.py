"""Mirrors the store to a shared folder, for ranks that cannot reach the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from doctor.cluster.transport.store import KeyValueStore, StoreBackend, StoreLost

T = TypeVar("T")


class MirroredBackend:
    """Store backend that writes to two stores and reads mailboxes from both.

    See :class:`doctor.cluster.transport.store.StoreBackend`. If the ``second`` store is lost, ``write_line`` reports
    that and the gather continues with the first.
    """

    survives_coordinator = False

    def __init__(self, first: StoreBackend, second: KeyValueStore, write_line: Callable[[str], None]) -> None:
        self.description = f"{first.description} and {second.description}"
        self._first = first
        self._second: KeyValueStore | None = second
        self._write_line = write_line

    def set(self, name: str, data: bytes) -> None:
        """Write to both stores."""
        self._first.set(name, data)
        self._also(lambda second: second.set(name, data))

    def get(self, name: str) -> bytes | None:
        """Read from the first store, which holds everything that this process has written."""
        return self._first.get(name)

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Exchange in the first store."""
        return self._first.exchange(name, old, new)

    def append(self, name: str, data: bytes) -> None:
        """Append to the first store: mailboxes are read from both."""
        self._first.append(name, data)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """Return new entries of both stores; ``mark`` is a pair of marks."""
        own, others = mark if isinstance(mark, tuple) else (None, None)
        entries, own = self._first.fetch(name, own)
        found = self._also(lambda second: second.call(lambda backend: backend.fetch(name, others)))
        more, others = found or ([], others)
        return [*entries, *more], (own, others)

    def clear(self, name: str) -> None:
        """Clear both stores."""
        self._first.clear(name)
        self._also(lambda second: second.clear(name))

    def close(self) -> None:
        """Close both stores."""
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
    """Return the ``first`` store mirrored to the ``second``; ``write_line`` reports its loss."""
    # The second store has to time out first, or the first one would be lost with it.
    return KeyValueStore(
        MirroredBackend(first.backend, KeyValueStore(second.backend, first.patience / 3), write_line), first.patience
    )

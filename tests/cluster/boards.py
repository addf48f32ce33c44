"""Boards for tests: a folder of their own, and one store of torch for all of them."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.store import KeyValueStore
from doctor.cluster.transport.tcp_store import C10dStore, TCPStoreBackend, host_store, join_store, listen

NewBoard = Callable[[], KeyValueStore]
"""A board of its own for each process of a gathering; all of them show the same."""

STORE_SECONDS = 20.0


@functools.cache
def _port() -> int:
    """Of the one store of this test run."""
    listener = listen(0)
    port: int = listener.getsockname()[1]
    _open.append(host_store(listener, STORE_SECONDS))
    return port


_opening = threading.Lock()
_open: list[C10dStore] = []
"""The store and the connections to it. They are used again by test after test: torch looks up the name of either end of
each connection, which takes seconds where a name server does not answer at once."""


def folder_boards(directory: Path, key: str = "key") -> NewBoard:
    """Boards in ``directory``."""
    return lambda: KeyValueStore(FileStoreBackend(directory, key))


def store_boards(key: str) -> NewBoard:
    """Boards in the store, each with a connection of its own. ``key`` keeps tests apart."""
    pytest.importorskip("torch", reason="the store is torch's")
    with _opening:
        port, numbers = _port(), itertools.count(1)

    def board() -> KeyValueStore:
        with _opening:
            number = next(numbers)
            while number >= len(_open):
                _open.append(join_store("127.0.0.1", port, STORE_SECONDS))
        return KeyValueStore(
            TCPStoreBackend(_open[number], key, f"the store at 127.0.0.1:{port}", survives_coordinator=True)
        )

    return board


@contextmanager
def without_rights() -> Iterator[None]:
    """Not as root, whom no file mode stops; whoever else runs the tests stays who they are."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)

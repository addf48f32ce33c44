"""From the training's process group to a board of one's own.

Only the address of its store is taken over. The job's connection is not touched: a read that waits holds a lock on it.
Of the other stores none serves: a HashStore ends with its process, and a FileStore is a log with one lock, which a rank
that is stopped would hold against the job itself. There the folder carries the board.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from doctor.cluster.rendezvous.process_identity import RUN_MARKS, run_key
from doctor.cluster.transport.failover import StoreConnection
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.signing import RejectedMessages, Secret, SignedBackend
from doctor.cluster.transport.store import StoreBackend, UntrustedStore
from doctor.cluster.transport.tcp_store import C10dStore, TCPStoreBackend, join_store
from doctor.core.files.own_folder import OwnFolder

KNOCK = 5.0
"""Seconds for a listener to accept. torch's client would go on trying where nobody listens, and complain each time."""
JOIN = 60.0
"""Seconds for a client to be served: it looks up the names of both ends first, ten seconds each where a name server is
silent."""
KEY = "runs"


class StoreAddress(NamedTuple):
    """Where a store is served."""

    host: str
    port: int


def find_store() -> StoreAddress | None:
    """Where the store of the default process group is served; ``None`` without a process group, or where its store is
    no TCPStore. Reads attributes alone; torch is not imported."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return StoreAddress(store.host, store.port) if isinstance(store, TCPStore) else None
    except (ImportError, AttributeError, LookupError, RuntimeError, ValueError):  # private names of torch
        return None


def open_connections(
    address: StoreAddress | None,
    directory: Path | OwnFolder,
    meeting: int,
    derived: str,
    refused: Callable[[UntrustedStore], None] = lambda why: None,
    secret: Secret | None = None,
    rejected: RejectedMessages | None = None,
) -> list[StoreConnection]:
    """The ways to the other ranks, the best one first. ``meeting``: how many this process has had before, which is the
    same on all ranks; no two share their bells. ``derived``: see :func:`derived_run_id`. ``refused`` gets to know why
    the folder is not safe to use, if it is not. ``secret``: the key of the job; ``rejected`` counts what is not
    authentic."""

    def signed(carrier: StoreBackend) -> StoreBackend:
        return SignedBackend(carrier, KEY, secret, rejected or RejectedMessages())

    folder = StoreConnection(f"bell-{derived}", lambda: signed(FileStoreBackend(directory, KEY)), refused)
    if address is None:
        return [folder]
    return [StoreConnection(f"bell-{meeting}", lambda: signed(_connect(address))), folder]


def remove_if_empty(directory: Path | OwnFolder) -> None:
    """Remove the folder of the board from ``directory``, where no other run has anything in it."""
    FileStoreBackend(directory, KEY).tidy()


class PolledStore:
    """A store whose end is seen before it is asked: torch's client writes a warning and a stack of C++ for each call
    that fails. ``canary``: a connection that says nothing, and ends with the process that serves the store."""

    def __init__(self, store: C10dStore, canary: socket.socket) -> None:
        self._store = store
        self._canary = canary
        weakref.finalize(self, canary.close)

    def __getattr__(self, name: str) -> Any:
        """What the store has of that name.

        Raises:
            OSError: it has ended.
        """
        with contextlib.suppress(BlockingIOError):
            if not self._canary.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("its process has ended")
        return getattr(self._store, name)


def _connect(address: StoreAddress) -> StoreBackend:
    canary = socket.create_connection(address, KNOCK)
    try:
        canary.setblocking(False)
        store = cast("C10dStore", PolledStore(join_store(address.host, address.port, JOIN), canary))
    except BaseException:
        canary.close()
        raise
    return TCPStoreBackend(store, KEY, f"the store at {address.host}:{address.port}", survives_coordinator=False)


def derived_run_id(address: StoreAddress | None, meeting: int, environ: Mapping[str, str]) -> str:
    """A name for the run that all of its ranks derive alike, without a word between them."""
    # The ranks that Lightning starts itself have variables that the first one lacks, so which launcher runs them is
    # no part of the key; its marks are, and they are the same in all processes.
    mark = next((name for name in RUN_MARKS if name in environ), "")
    port = address.port if address else environ.get("MASTER_PORT", "")
    parts = [run_key(environ, mark), str(port), meeting]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

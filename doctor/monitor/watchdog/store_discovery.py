"""Finds the store of the default process group and opens connections of our own to it.

Only its address is used. The job's own connection is left alone: a blocked read holds a lock on it. Other kinds of
stores are not used: a HashStore ends with its process, and a FileStore is a log with one lock, which a stopped rank
would hold against the job itself. The folder is used instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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
from doctor.cluster.transport.store import StoreBackend, StoreLost
from doctor.cluster.transport.tcp_store import C10dStore, TCPStoreBackend, join_store
from doctor.core.files.own_folder import OwnFolder

CONNECT_TIMEOUT = 5.0
"""Seconds for a listener to accept. torch's client would retry without a listener, and log a warning each time."""
JOIN_TIMEOUT = 60.0
"""Seconds for a client to be served: it resolves the names of both ends first, ten seconds each if a name server is
silent."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun if the store of its agent is the one of the default process group (``env://``)."""
KEY = "runs"
"""Prefix of all keys of watchdogs in a store."""


class StoreAddress(NamedTuple):
    """Address of a TCPStore."""

    host: str
    port: int


def find_store() -> StoreAddress | None:
    """Return the address of the default process group's store; before there is a group, of torchrun's.

    ``None`` without either, or if it is not a TCPStore. Only reads attributes; does not import torch.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    if not distributed.is_initialized():
        return agent_store(os.environ)
    try:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return StoreAddress(store.host, store.port) if isinstance(store, TCPStore) else None
    except (ImportError, AttributeError, LookupError, RuntimeError, ValueError):  # private names of torch
        return None


def agent_store(environ: Mapping[str, str]) -> StoreAddress | None:
    """Return the address of the store that torchrun's agent serves, which becomes that of the default process group."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if environ.get(AGENT_STORE) != "True" or not host or not port.isdecimal():
        return None
    return StoreAddress(host, int(port))


def open_connections(
    address: StoreAddress | None,
    directory: Path | OwnFolder,
    run_number: int | str,
    derived: str,
    on_lost: Callable[[StoreLost], None] = lambda lost: None,
    secret: Secret | None = None,
    rejected: RejectedMessages | None = None,
) -> list[StoreConnection]:
    """Return the connections to the other ranks, the preferred one first.

    ``run_number``: number of earlier runs of this process, equal on all ranks, so that no two runs share admission
    keys. ``derived``: see :func:`derived_run_id`. ``on_lost`` is called if the folder is lost or not safe to use.
    ``secret``: the key of the job; ``rejected`` counts unauthentic messages.
    """

    def signed(backend: StoreBackend) -> StoreBackend:
        return SignedBackend(backend, KEY, secret, rejected or RejectedMessages())

    folder = StoreConnection(f"bell-{derived}", lambda: signed(FileStoreBackend(directory, KEY)), on_lost)
    if address is None:
        return [folder]
    return [StoreConnection(f"bell-{run_number}", lambda: signed(connect(address))), folder]


class PolledStore:
    """A store whose end is detected before it is used.

    torch's client logs a warning and a C++ stack for each call that fails. ``liveness_socket``: an idle connection that
    closes with the process that serves the store.
    """

    def __init__(self, store: C10dStore, liveness_socket: socket.socket) -> None:
        self._store = store
        self._liveness_socket = liveness_socket
        weakref.finalize(self, liveness_socket.close)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the store.

        Raises:
            OSError: the serving process has ended.
        """
        with contextlib.suppress(BlockingIOError):
            if not self._liveness_socket.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("its process has exited")
        return getattr(self._store, name)


def connect(address: StoreAddress) -> StoreBackend:
    """Return a connection of our own to a store.

    Raises:
        OSError: it does not respond.
    """
    liveness_socket = socket.create_connection(address, CONNECT_TIMEOUT)
    try:
        liveness_socket.setblocking(False)
        store = cast("C10dStore", PolledStore(join_store(address.host, address.port, JOIN_TIMEOUT), liveness_socket))
    except BaseException:
        liveness_socket.close()
        raise
    return TCPStoreBackend(store, KEY, f"the store at {address.host}:{address.port}", survives_coordinator=False)


def derived_run_id(address: StoreAddress | None, run_number: int | str, environ: Mapping[str, str]) -> str:
    """Return a run id that all ranks derive identically without communication."""
    # The ranks that Lightning starts itself have variables that the first one lacks, so the launcher's name is not
    # part of the key; its marker variables are, and they are equal in all processes.
    mark = next((name for name in RUN_MARKS if name in environ), "")
    port = address.port if address else environ.get("MASTER_PORT", "")
    parts = [run_key(environ, mark), str(port), run_number]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

"""A board in torch's c10d key-value store: the one of torchrun's agent, or one that a rank of the job hosts.

torch is imported here and nowhere else in this room.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
from typing import Protocol, cast

BACKLOG = 4096
"""Connections that may wait while the store starts; the kernel takes no more than net.core.somaxconn."""

_TOKEN = 16


class C10dStore(Protocol):
    """What is used of torch.distributed.Store. ``append`` is there since torch 2.0, and not in its type stubs."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key; blocks until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def add(self, key: str, amount: int) -> int:
        """Count."""

    def append(self, key: str, value: str) -> None:
        """Append to a key's value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several keys."""


class TCPStoreBackend:
    """A carrier; see :class:`doctor.cluster.transport.store.StoreBackend`. Keys bear a prefix of their own: a store
    of torchrun's agent serves the job too. A box is an index of tokens, and an entry for each: the entry is there
    before its token is."""

    def __init__(self, store: C10dStore, key: str, description: str, *, survives_coordinator: bool) -> None:
        self.description = description
        self.survives_coordinator = survives_coordinator
        self._store: C10dStore | None = store
        self._prefix = f"rankdoctor/{key}/"

    @property
    def _open(self) -> C10dStore:
        if self._store is None:
            raise OSError("it was closed")
        return self._store

    def set(self, name: str, data: bytes) -> None:
        """Write a key."""
        self._open.set(self._prefix + name, data)

    def get(self, name: str) -> bytes | None:
        """The value of a key. Asked for first: reading one that is not there would block."""
        key = self._prefix + name
        return bytes(self._open.get(key)) if self._open.check([key]) else None

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write a key where ``old`` stands. The count of turns makes the first one the only one."""
        if self.get(name) != old:
            return False
        turn = "first" if old is None else old.hex()
        if self._open.add(f"{self._prefix}turns/{name}/{turn}", 1) != 1:
            return False
        self.set(name, new)
        return True

    def append(self, name: str, data: bytes) -> None:
        """Add an entry: first itself, then its token."""
        token = secrets.token_hex(_TOKEN // 2)
        self.set(f"{name}/{token}", data)
        self._open.append(self._prefix + name, token)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """``mark`` is the number of tokens that were read."""
        known = mark if isinstance(mark, int) else 0
        index = (self.get(name) or b"").decode("ascii", "replace")
        tokens = [index[at : at + _TOKEN] for at in range(known * _TOKEN, len(index), _TOKEN)]
        keys = self._existing([f"{self._prefix}{name}/{token}" for token in tokens])
        return [bytes(value) for value in self._open.multi_get(keys)] if keys else [], known + len(tokens)

    def _existing(self, keys: list[str]) -> list[str]:
        """Reading a key that is not there would block; an index that is damaged names some."""
        return keys if not keys or self._open.check(keys) else [key for key in keys if self._open.check([key])]

    def clear(self, name: str) -> None:
        """A store ends with its host: nothing is left behind."""

    def close(self) -> None:
        """Let go of the connection, and of the port where this process hosts the store."""
        self._store = None


def listen(port: int) -> socket.socket:
    """A socket that listens on ``port`` of every address, at once: those who come early wait in its backlog.

    Raises:
        OSError: the port is taken or may not be bound.
    """
    with contextlib.suppress(OSError):
        return _listen(socket.AF_INET6, "::", port)
    return _listen(socket.AF_INET, "0.0.0.0", port)  # noqa: S104 - the others come from other hosts


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def host_store(listener: socket.socket, seconds: float) -> C10dStore:
    """A store on a socket that listens already; torch takes the socket over and closes it with the store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    # The client half of the host goes over loopback: whatever MASTER_ADDR leads to is not its concern.
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return cast(C10dStore, store)


def join_store(address: str, port: int, seconds: float) -> C10dStore:
    """A client of the store at ``address``, which is an IP address: one look-up of a name less."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    seconds_each = datetime.timedelta(seconds=seconds)
    store = TCPStore(address, port, is_master=False, timeout=seconds_each, wait_for_workers=False)
    return cast(C10dStore, store)

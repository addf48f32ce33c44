"""Key-value store in torch's TCPStore: that of torchrun's agent, or one that a rank hosts.

torch is imported here and nowhere else in this package.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
from typing import Protocol, cast

BACKLOG = 4096
"""Pending connections while the store starts; the kernel limits them to net.core.somaxconn."""

_TOKEN = 16


class C10dStore(Protocol):
    """The methods of torch.distributed.Store in use. ``append`` exists since 2.0 and is missing in its type stubs."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key; blocks until it exists."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""

    def append(self, key: str, value: str) -> None:
        """Append to a key's value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several keys."""


class TCPStoreBackend:
    """Store backend in a TCPStore; see :class:`doctor.cluster.transport.store.StoreBackend`.

    Keys have a prefix of their own: the store of torchrun's agent serves the job too. A mailbox is an index of tokens
    with an entry for each: an entry is written before its token.
    """

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
        """Return the value of a key; checked first, because reading a missing key blocks."""
        key = self._prefix + name
        return bytes(self._open.get(key)) if self._open.check([key]) else None

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` if the value is ``old``: the first process to count up the turn writes."""
        if self.get(name) != old:
            return False
        turn = "first" if old is None else old.hex()
        if self._open.add(f"{self._prefix}turns/{name}/{turn}", 1) != 1:
            return False
        self.set(name, new)
        return True

    def append(self, name: str, data: bytes) -> None:
        """Write the entry, then append its token to the index."""
        token = secrets.token_hex(_TOKEN // 2)
        self.set(f"{name}/{token}", data)
        self._open.append(self._prefix + name, token)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """Return new entries; ``mark`` is the number of tokens that were read."""
        known = mark if isinstance(mark, int) else 0
        index = (self.get(name) or b"").decode("ascii", "replace")
        tokens = [index[at : at + _TOKEN] for at in range(known * _TOKEN, len(index), _TOKEN)]
        keys = [f"{self._prefix}{name}/{token}" for token in tokens]
        if keys and not self._open.check(keys):  # reading a key that a damaged index names would block
            keys = [key for key in keys if self._open.check([key])]
        return [bytes(value) for value in self._open.multi_get(keys)] if keys else [], known + len(tokens)

    def clear(self, name: str) -> None:
        """Do nothing: a TCPStore ends with the process that hosts it."""

    def close(self) -> None:
        """Release the connection, and the port if this process hosts the store."""
        self._store = None


def listen(port: int) -> socket.socket:
    """Return a socket that listens on ``port`` of every address.

    It listens at once: ranks that connect early wait in its backlog.

    Raises:
        OSError: the port is in use or may not be bound.
    """
    with contextlib.suppress(OSError, ValueError):  # no IPv6
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=BACKLOG)


def host_store(listener: socket.socket, seconds: float) -> C10dStore:
    """Return a store on a listening socket, which torch takes over and closes with the store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    # The host's own client connects over loopback, whatever MASTER_ADDR resolves to.
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
    """Return a client of the store at an IP address, which saves a name lookup."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    seconds_each = datetime.timedelta(seconds=seconds)
    store = TCPStore(address, port, is_master=False, timeout=seconds_each, wait_for_workers=False)
    return cast(C10dStore, store)

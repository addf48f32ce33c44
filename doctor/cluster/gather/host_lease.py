"""Elects one process per host and detects two processes of a host with the same rank.

The facts of a host are collected once, and one of its processes answers probes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket

from doctor.collectors.host.host_identity import Identity


class HostLease:
    """Lease on a task that one process of the run performs on this host.

    ``granted``: no other process holds it. It is an abstract socket: the kernel lets one process of a network namespace
    bind a name, and frees it when that process ends, however it ends. Nothing remains on disk. On systems without such
    sockets every lease is granted: host facts are collected more than once, which takes time but changes no result.
    """

    def __init__(self, key: str, host: Identity, what: str) -> None:
        self._socket: socket.socket | None = None
        self._rivals = 0
        self.granted = True
        digest = hashlib.sha256(repr((os.getuid(), key, host, what)).encode()).hexdigest()[:32]
        address = f"\0rankdoctor-{digest}"
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and self._socket is not None:
                self.granted = False
                with contextlib.suppress(OSError):
                    self._socket.sendto(b"me too", address)  # its holder counts it
            self.close()

    def rivals(self) -> int:
        """Return the number of other processes that have requested it so far."""
        with contextlib.suppress(OSError):
            while self._socket is not None and self._socket.recv(16):
                self._rivals += 1
        return self._rivals

    def close(self) -> None:
        """Release the lease."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

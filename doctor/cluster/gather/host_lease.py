"""Which process speaks for its host, and whether two processes of a host claim one rank.

The facts of a host are read once, and one process answers probes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket

from doctor.collectors.host.host_identity import Identity


class HostLease:
    """To be the one process of the run that does something on this host. ``granted``: nobody else has the claim.

    It is an abstract socket: the kernel lets one process bind a name, in this network namespace, and frees it when
    that process ends however it ends. Nothing is left on a disk. Where there are no such sockets all claims are
    granted: host facts are read more than once, which costs time and no truth.
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
                self._notify_holder(self._socket, address)
            self.close()

    @staticmethod
    def _notify_holder(sender: socket.socket, address: str) -> None:
        with contextlib.suppress(OSError):
            sender.sendto(b"me too", address)

    def rivals(self) -> int:
        """How many others have claimed it so far."""
        with contextlib.suppress(OSError):
            while self._socket is not None and self._socket.recv(16):
                self._rivals += 1
        return self._rivals

    def close(self) -> None:
        """Give the claim back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

"""Listen on every address of this host and answer the probes of other hosts; no input is executed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from doctor.core.clock import time
from doctor.probes.responder.backlog import ConnectionBacklog
from doctor.probes.responder.responder_protocol import ResponderProtocol, SilentProtocol
from doctor.probes.responder.server import Server
from doctor.probes.responder.wire_format import new_word

BACKLOG = 256
"""Length of the queue of the kernel: all hosts connect at the same time."""


class Responder:
    """Answer callers that know its ``word`` on ``port``, from a daemon thread, until closed.

    ``clock``: time of this host in seconds since 1970. ``backlog``: accepted connections that wait for a transfer.
    Raises ``OSError`` if no port or no thread is available.
    """

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self.word = new_word()
        self.backlog = ConnectionBacklog()
        listener = _listen(0)
        self.port = int(listener.getsockname()[1])
        try:
            self._server = Server(self.backlog)
        except RuntimeError as error:
            listener.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        self._server.serve(listener, lambda: ResponderProtocol(self.word, clock))

    def hold(self, port: int) -> bool:
        """Listen on a second ``port`` without answering; return ``False`` if the port is not available."""
        try:
            listener = _listen(port)
        except (OSError, OverflowError):
            return False
        return self._server.serve(listener, SilentProtocol)

    def close(self) -> None:
        """Close all sockets; the ports are free when this returns."""
        self._server.close()
        self.backlog.close()


def _listen(port: int) -> socket.socket:
    """Return a listening socket for both families, or for IPv4 if the kernel has no IPv6."""
    try:
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    except (OSError, ValueError):
        listener = socket.create_server(("", port), backlog=BACKLOG)
    listener.setblocking(False)
    return listener

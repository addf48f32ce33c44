"""Listens on every address of this host and answers the probes of other hosts; nothing that comes in is executed."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from doctor.probes.responder.backlog import ConnectionBacklog
from doctor.probes.responder.responder_protocol import ResponderProtocol, SilentProtocol
from doctor.probes.responder.server import Server
from doctor.probes.responder.wire_format import new_word

BACKLOG = 256
"""Connections that the kernel keeps ready: all hosts come at once."""


class Responder:
    """Answers who knows its ``word`` on ``port``, from a daemon thread, until it is closed.

    ``clock``: the time of this host, seconds since 1970. ``backlog``: accepted connections that wait for a
    transfer. Raises ``OSError`` if no port or no thread is available.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
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
        """Listen on ``port`` besides, saying nothing; ``False`` where that port can't be had."""
        try:
            listener = _listen(port)
        except (OSError, OverflowError):
            return False
        return self._server.serve(listener, SilentProtocol)

    def close(self) -> None:
        """Close all that is open; the ports are free again when this returns."""
        self._server.close()
        self.backlog.close()


def _listen(port: int) -> socket.socket:
    """A listening socket for both families, or for IPv4 alone where the kernel has no IPv6."""
    try:
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    except (OSError, ValueError):
        listener = socket.create_server(("", port), backlog=BACKLOG)
    listener.setblocking(False)
    return listener

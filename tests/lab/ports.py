"""Ports of this machine on which nobody listens, and which nobody else is given."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

RANGE = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections (net.ipv4.ip_local_port_range)."""
_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port that stays bound until this process ends, so that no other test is given it.

    A server that sets SO_REUSEADDR, as the store of torch and those of the standard library do, can listen on it all
    the same: what holds it has set the option, too, and does not listen. It was set after ``bind``, which therefore
    fails if the port belongs to anybody (socket(7)). A connection is refused while nobody listens.
    """
    while True:
        port, held = random.SystemRandom().choice(RANGE), socket.socket()
        with suppress(OSError):
            held.bind(("", port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _HELD.append(held)
            return port
        held.close()


def free_ports() -> Iterator[int]:
    """As many as are asked for."""
    while True:
        yield free_port()

"""Bytes that arrive at the TCP connection a thread receives from, while it makes no progress.

A server that sends a few bytes before each timeout keeps its reader from ever failing, and from ever being done. The
kernel counts what arrives (``tcpi_bytes_received`` of ``struct tcp_info``, include/uapi/linux/tcp.h).
"""

from __future__ import annotations

import os
import socket
import struct

import msgspec

from doctor.core.clock import monotonic
from doctor.core.facts.telemetry import TRICKLES
from doctor.monitor.telemetry.stacks.blocking_call import receives_from

LEAST_SECONDS, MOST_BYTES = 5.0, 1000.0
"""Seconds over which bytes are counted, and bytes a second up to which they are negligible."""
_TCP_INFO, _BYTES_RECEIVED = 11, 128
"""The option of tcp(7), and the offset of the counter, 64 bits."""


class _Count(msgspec.Struct, frozen=True):
    link: str
    received: int
    at: float


class Trickle:
    """The bytes that the connection of one thread receives in one pause, from one look to the next."""

    def __init__(self) -> None:
        self._first: _Count | None = None

    def look(self, native_id: int) -> _Count | None:
        """Count what the connection has received; begin anew if it is another one than before."""
        now = _count(native_id)
        if now is not None and (self._first is None or self._first.link != now.link):
            self._first = now
        return now

    def words(self, native_id: int) -> str:
        """Return ``, which has sent 16 bytes in 8 s``; empty without such a connection, for none and for many bytes."""
        now, first = self.look(native_id), self._first
        if now is None or first is None or now.at - first.at < LEAST_SECONDS:
            return ""
        received, seconds = now.received - first.received, now.at - first.at
        return f"{TRICKLES}{received} bytes in {seconds:.0f} s" if 0 < received <= MOST_BYTES * seconds else ""


def _count(native_id: int) -> _Count | None:
    found = receives_from(native_id)
    if found is None:
        return None
    descriptor, link = found
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED + 8)
    except OSError:  # closed meanwhile, or not of TCP
        return None
    if len(info) < _BYTES_RECEIVED + 8:
        return None
    return _Count(link, struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0], monotonic())

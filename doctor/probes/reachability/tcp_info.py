"""Read the state of a TCP connection in the kernel: ``struct tcp_info`` of include/uapi/linux/tcp.h."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_UNKNOWN = 0xFFFFFFFF
_LOADED, _RETRANSMITTED, _SENT, _ROUND_TRIP, _DUPLICATES = 68, 100, 136, 148, 216
"""Offsets of tcpi_rtt, tcpi_total_retrans, tcpi_segs_out, tcpi_min_rtt (Linux 4.6) and tcpi_dsack_dups (4.19)."""


class TcpInfo(NamedTuple):
    """Counters of a connection.

    ``round_trip``: the shortest, in seconds; the first, of the handshake, involves no process, so a busy processor does
    not lengthen it. ``retransmitted``: segments sent again, less those that the peer reports as duplicates. ``loaded``:
    the last smoothed round trip, in seconds, with time in queues.
    """

    round_trip: float | None
    sent: int
    retransmitted: int
    loaded: float | None = None


def read_tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Return the state of ``connection``, or ``None`` if this system does not provide it."""
    try:
        record = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except (OSError, AttributeError):
        return None
    if len(record) < _ROUND_TRIP + 4:
        return None
    shortest = _number(record, _ROUND_TRIP)
    again = _number(record, _RETRANSMITTED) - _number(record, _DUPLICATES)
    loaded = _number(record, _LOADED) / 1e6
    return TcpInfo(shortest / 1e6 if shortest != _UNKNOWN else None, _number(record, _SENT), max(0, again), loaded)


def _number(record: bytes, offset: int) -> int:
    return int(struct.unpack_from("=I", record, offset)[0]) if len(record) >= offset + 4 else 0

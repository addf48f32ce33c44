"""Bytes that flow over one TCP connection for a moment: the sender's side and the receiver's."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from doctor.probes.bandwidth.transfer_wire import REPORT_BYTES, TransferReport
from doctor.probes.runtime.cpu_starvation import RunQueueDelay
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import ConnectionCut, receive_exactly

MOST_BYTES = 64 << 20
"""One way between two hosts: a fiftieth of a second at 25 Gb/s, which is long beside the round trips of a network."""

MOST_SECONDS = 0.25
"""One way, from the first byte on: 10 Mb/s carry 300 KB, some 200 packets."""

WARM_BYTES = 16 << 20
WARM_SECONDS = 0.1
"""What does not count, whichever is over first: TCP finds its pace in some ten round trips, and a token bucket that was
full lets a burst pass."""

FIRST_SECONDS = 1.0
"""Until the first byte: a packet that was lost is sent again after 0.2 s, 0.4 s, 0.8 s."""

FAREWELL_SECONDS = 0.5
"""For a report to arrive; one that is lost is sent again after 0.2 s."""

PIECE = 1 << 20
"""Bytes of one call: few enough to stay in a processor's cache, so many that the calls themselves cost nothing."""


class TransferLimit(NamedTuple):
    """How much may flow one way."""

    bytes: int = MOST_BYTES
    seconds: float = MOST_SECONDS


class ReceiveSample(NamedTuple):
    """``total`` bytes were there ``at`` seconds after the first of them came."""

    at: float
    total: int


def send(connection: socket.socket, amount: TransferLimit, limit: ProbeDeadline) -> TransferReport:
    """Send until the receiver has seen enough, and return what it saw; ``waited`` is of the one that waited longer.

    Raises:
        TimeoutError: no report within ``limit``.
        Cut: the receiver closed or reset the connection.
    """
    # Random: a tunnel that compresses would carry more of anything else.
    piece = memoryview(os.urandom(PIECE))
    flow = limit.within(FIRST_SECONDS + amount.seconds)
    waiting = RunQueueDelay()
    left = amount.bytes
    connection.setblocking(False)
    ready = select.poll()
    ready.register(connection, select.POLLIN | select.POLLOUT)
    try:
        while left and _wants_more(ready, flow):
            left -= connection.send(piece[:left])
    except OSError as error:
        raise ConnectionCut from error
    report = TransferReport.decode(
        receive_exactly(connection, REPORT_BYTES, limit.within(FIRST_SECONDS + amount.seconds))
    )
    return report._replace(waited=max(report.waited, waiting.share()))


def _wants_more(ready: select.poll, flow: ProbeDeadline) -> bool:
    """Wait until more can be sent; ``False`` where a report comes first, the connection ends, or ``flow`` is over."""
    events = ready.poll(flow.left() * 1000)
    return bool(events) and events[0][1] == select.POLLOUT


def receive(connection: socket.socket, amount: TransferLimit, limit: ProbeDeadline) -> TransferReport:
    """Take bytes until enough of them or the time is there, tell the sender what came, and return it.

    Raises:
        Cut: the sender closed or reset the connection.
    """
    waiting = RunQueueDelay()
    arrivals, seconds = _arrivals(connection, amount, limit)
    report = report_of(arrivals, seconds)._replace(waited=waiting.share())
    try:
        connection.settimeout(max(0.01, limit.left()))
        connection.sendall(report.encode())
        _await_end(connection, limit.within(FAREWELL_SECONDS))
    except OSError as error:
        raise ConnectionCut from error
    return report


def _await_end(connection: socket.socket, limit: ProbeDeadline) -> None:
    """Until the sender, which has read the report, resets the connection: who resets it first might lose that on the
    way. Nothing more is taken meanwhile."""
    ended = select.poll()
    ended.register(connection, select.POLLRDHUP)
    ended.poll(limit.left() * 1000)


def _arrivals(
    connection: socket.socket, amount: TransferLimit, limit: ProbeDeadline
) -> tuple[list[ReceiveSample], float]:
    """What came when, and the seconds from the first byte until all was there or the time was over."""
    buffer = bytearray(PIECE)
    arrivals: list[ReceiveSample] = []
    total, began = 0, 0.0
    flow = limit.within(FIRST_SECONDS)
    try:
        while total < amount.bytes:
            connection.settimeout(max(0.001, flow.left()))
            size = connection.recv_into(buffer)
            now = time.perf_counter()
            if not size:
                raise ConnectionCut
            if not arrivals:
                began, flow = now, limit.within(amount.seconds)
            total += size
            arrivals.append(ReceiveSample(now - began, total))
            if flow.is_over:
                break
    except TimeoutError:
        return arrivals, time.perf_counter() - began if arrivals else 0.0
    except OSError as error:
        raise ConnectionCut from error
    return arrivals, arrivals[-1].at


def report_of(arrivals: Sequence[ReceiveSample], seconds: float) -> TransferReport:
    """What ``arrivals`` come to, of which the last are ``seconds`` after the first: until then all counts, also that
    nothing came. The first of them do not count, unless that would leave nothing."""
    if not arrivals:
        return TransferReport(0, 0, 0.0, 0.0)
    last = arrivals[-1].total
    warm = next((one for one in arrivals if one.at >= WARM_SECONDS or one.total >= WARM_BYTES), arrivals[0])
    if warm.at >= seconds:
        warm = arrivals[0]
    return TransferReport(last, last - warm.total, seconds, seconds - warm.at)

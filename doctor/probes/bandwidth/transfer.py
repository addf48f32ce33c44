"""Transfer bytes over one TCP connection for a moment: the sides of the sender and of the receiver."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

from doctor.core.clock import perf_counter
from doctor.probes.bandwidth.transfer_wire import REPORT_BYTES, TransferReport
from doctor.probes.runtime.cpu_starvation import RunQueueDelay
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import ConnectionCut, receive_exactly

MOST_BYTES = 64 << 20
"""One way between two hosts: 20 ms at 25 Gb/s, long compared with the round trips of a network."""

MOST_SECONDS = 0.25
"""One way, from the first byte on: 10 Mb/s carry 300 KB, some 200 packets."""

WARM_BYTES = 16 << 20
WARM_SECONDS = 0.1
"""Beginning that does not count, whichever limit comes first: TCP finds its rate in some ten round trips, and a full
token bucket lets a burst pass."""

FIRST_SECONDS = 1.0
"""Until the first byte: a lost packet is sent again after 0.2 s, 0.4 s, 0.8 s."""

FAREWELL_SECONDS = 0.5
"""For a report to arrive; a lost one is sent again after 0.2 s."""

PIECE = 1 << 20
"""Bytes of one call: few enough for the cache of a processor, enough to make the cost of the calls negligible."""


class TransferLimit(NamedTuple):
    """Maximum of one way."""

    bytes: int = MOST_BYTES
    seconds: float = MOST_SECONDS


class ReceiveSample(NamedTuple):
    """``total`` bytes had arrived ``at`` seconds after the first of them."""

    at: float
    total: int


def send(connection: socket.socket, amount: TransferLimit, limit: ProbeDeadline) -> TransferReport:
    """Send until the receiver has enough, and return its report; ``waited`` is that of the slower side.

    Raises the errors of :func:`doctor.probes.runtime.tcp_connect.receive_exactly`.
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
        while left:
            events = ready.poll(flow.left() * 1000)
            if not events or events[0][1] != select.POLLOUT:
                break  # a report, the end of the connection, or the end of the time
            left -= connection.send(piece[:left])
    except OSError as error:
        raise ConnectionCut from error
    answer = receive_exactly(connection, REPORT_BYTES, limit.within(FIRST_SECONDS + amount.seconds))
    report = TransferReport.decode(answer)
    return report._replace(waited=max(report.waited, waiting.share()))


def receive(connection: socket.socket, amount: TransferLimit, limit: ProbeDeadline) -> TransferReport:
    """Receive until enough bytes or the time limit, send the report to the sender, and return it.

    Raises:
        ConnectionCut: the sender closed or reset the connection.
    """
    waiting = RunQueueDelay()
    arrivals, seconds = _arrivals(connection, amount, limit)
    report = report_of(arrivals, seconds)._replace(waited=waiting.share())
    try:
        connection.settimeout(max(0.01, limit.left()))
        connection.sendall(report.encode())
        # The sender, which has read the report, resets the connection: a reset here might discard it.
        ended = select.poll()
        ended.register(connection, select.POLLRDHUP)
        ended.poll(limit.left(FAREWELL_SECONDS) * 1000)
    except OSError as error:
        raise ConnectionCut from error
    return report


def _arrivals(
    connection: socket.socket, amount: TransferLimit, limit: ProbeDeadline
) -> tuple[list[ReceiveSample], float]:
    """Return the samples, and the seconds from the first byte until all had arrived or the time was over."""
    buffer = bytearray(PIECE)
    arrivals: list[ReceiveSample] = []
    total, began = 0, 0.0
    flow = limit.within(FIRST_SECONDS)
    try:
        while total < amount.bytes:
            connection.settimeout(max(0.001, flow.left()))
            size = connection.recv_into(buffer)
            now = perf_counter()
            if not size:
                raise ConnectionCut
            if not arrivals:
                began, flow = now, limit.within(amount.seconds)
            total += size
            arrivals.append(ReceiveSample(now - began, total))
            if flow.is_over:
                break
    except TimeoutError:
        return arrivals, perf_counter() - began if arrivals else 0.0
    except OSError as error:
        raise ConnectionCut from error
    return arrivals, arrivals[-1].at


def report_of(arrivals: Sequence[ReceiveSample], seconds: float) -> TransferReport:
    """Return the report of ``arrivals``, which ended ``seconds`` after the first.

    Time without arrivals counts. The beginning does not, unless that would leave nothing.
    """
    if not arrivals:
        return TransferReport(0, 0, 0.0, 0.0)
    last = arrivals[-1].total
    warm = next((one for one in arrivals if one.at >= WARM_SECONDS or one.total >= WARM_BYTES), arrivals[0])
    if warm.at >= seconds:
        warm = arrivals[0]
    return TransferReport(last, last - warm.total, seconds, seconds - warm.at)

"""Open TCP connections within a deadline and classify the outcome."""

from __future__ import annotations

import errno
import resource
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

from doctor.core.clock import monotonic, sleep
from doctor.core.facts.probe_results import ReachOutcome
from doctor.probes.runtime.deadline import ProbeDeadline

TRIES = 3
TRY_SECONDS = 1.6
"""Seconds of one attempt: the first packet and one more a second later (RFC 6298). Three attempts are six packets: if 5
% get lost each way, one connection in a million looks silent; the kernel reports a host that is off after 3 s."""

SILENT_SECONDS = 1.5
"""A shorter time without an answer is inconclusive: one lost packet costs a second."""

_OUTCOMES: dict[int | None, ReachOutcome] = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "stranger",  # The handshake was completed, and then cut off.
    errno.ENETUNREACH: "unroutable",
    errno.EHOSTUNREACH: "unroutable",
    errno.ENETDOWN: "unroutable",
    errno.EHOSTDOWN: "unroutable",
    errno.EADDRNOTAVAIL: "unroutable",
    errno.EAFNOSUPPORT: "unroutable",
    errno.EACCES: "unroutable",  # A route of type prohibit.
    errno.EINVAL: "unroutable",  # A route of type blackhole.
}

_AT_ONCE = struct.pack("ii", 1, 0)
"""Value of SO_LINGER: linger for 0 s."""


class ConnectResult(NamedTuple):
    """``outcome`` is ``None`` if nothing was learned: no time or no file descriptor. ``seconds``: of all attempts."""

    outcome: ReachOutcome | None
    connection: socket.socket | None
    seconds: float


def connect_tcp(
    address: str, port: int, deadline: ProbeDeadline, *, segment: int | None = None, source: str | None = None
) -> ConnectResult:
    """Connect to a numeric ``address``, again if no answer arrives.

    ``segment``: maximum bytes of data in a packet; ``source``: local address, if the kernel is not to choose.
    """
    started = monotonic()
    outcome: ReachOutcome | None = None
    for _ in range(TRIES):
        if deadline.is_over:
            break
        outcome, connection = _connect(address, port, deadline.left(TRY_SECONDS), segment, source)
        if outcome is not None and outcome != "silent":
            return ConnectResult(outcome, connection, monotonic() - started)
    seconds = monotonic() - started
    return ConnectResult(outcome if seconds >= SILENT_SECONDS else None, None, seconds)


def _connect(
    address: str, port: int, seconds: float, segment: int | None, source: str | None
) -> tuple[ReachOutcome | None, socket.socket | None]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return "unroutable", None
        sleep(min(0.2, seconds))
        return None, None
    try:
        connection.settimeout(max(0.01, seconds))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if segment is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        if source is not None:
            connection.bind((source, 0))
        connection.connect((address, port))
        return "open", connection
    except TimeoutError:
        connection.close()
        return "silent", None
    except (OSError, OverflowError) as error:
        connection.close()
        return _OUTCOMES.get(getattr(error, "errno", None)), None


def affordable(most: int) -> int:
    """Return ``most``, or a quarter of the open-file limit of this process if that is less.

    Probing uses one quarter, answering another, and the rest is for the process itself.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 4))


def reset_connection(connection: socket.socket) -> None:
    """Close with a reset: undelivered data is not sent again for minutes, and neither side keeps the port."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    connection.close()


class ConnectionCut(Exception):
    """The connection ended before the answer."""


def send_and_receive(connection: socket.socket, question: bytes, size: int, deadline: ProbeDeadline) -> bytes:
    """Send ``question`` and return an answer of ``size`` bytes; raises as :func:`receive_exactly`."""
    try:
        connection.settimeout(max(0.01, deadline.left()))
        connection.sendall(question)
    except TimeoutError:
        raise
    except OSError as error:
        raise ConnectionCut from error
    return receive_exactly(connection, size, deadline)


def receive_exactly(connection: socket.socket, size: int, deadline: ProbeDeadline) -> bytes:
    """Return the next ``size`` bytes.

    Raises:
        TimeoutError: not in time.
        ConnectionCut: the peer closed or reset the connection.
    """
    try:
        answer = b""
        while len(answer) < size:
            if deadline.is_over:
                raise TimeoutError
            connection.settimeout(max(0.01, deadline.left()))
            piece = connection.recv(size - len(answer))
            if not piece:
                raise ConnectionCut
            answer += piece
        return answer
    except TimeoutError:
        raise
    except OSError as error:
        raise ConnectionCut from error

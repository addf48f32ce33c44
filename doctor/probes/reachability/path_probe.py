"""Probe one path between hosts: identity of the peer, round trip, clock, arrival of large packets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from socket import socket
from typing import NamedTuple

from doctor.core.clock import perf_counter, sleep
from doctor.core.facts.probe_results import ReachOutcome
from doctor.probes.reachability.tcp_info import TcpInfo, read_tcp_info
from doctor.probes.responder.wire_format import LENGTH, SEGMENT, TIMES, WELCOME_BYTES, greeting, welcome
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import (
    SILENT_SECONDS,
    ConnectionCut,
    connect_tcp,
    reset_connection,
    send_and_receive,
)

GREETING_SECONDS = 3.0
"""Time limit of the welcome: enough for two lost packets, or for a busy process to be scheduled."""

ECHOES = 8
ECHO_SECONDS = 2.5
"""For all echoes together; 8 of 100 ms fit."""

ECHO_GAP = 0.01
"""Seconds between echoes, so that not all meet the load at the beginning."""

BURST_SECONDS = 2.0
"""For one burst. A link of 1 Mb/s carries 128 KB in 1.05 s, and four losses in a row are recovered in 1.4 s."""

SMALL_BURST_SECONDS = 1.2

BURSTS_AT_ONCE = 8
"""So that the bursts of all hosts do not overflow the buffer of a switch."""


class ClockSample(NamedTuple):
    """The clock of a peer: seconds that it is ahead, and the round trip of the measurement."""

    ahead: float
    round_trip: float


@dataclass
class PathResult:
    """Results of one path. ``outcome`` is ``None`` if nothing was learned; ``seconds``: until it was open."""

    outcome: ReachOutcome | None = None
    seconds: float | None = None
    round_trip: float | None = None
    moment: ClockSample | None = None
    full_size_arrived: bool | None = None
    info: TcpInfo | None = None


class PathProbe:
    """Probes paths with one ``clock`` and a common limit on concurrent bursts."""

    def __init__(self, deadline: ProbeDeadline, clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._clock = clock
        self._turn = threading.BoundedSemaphore(BURSTS_AT_ONCE)

    def reach(self, address: str, port: int, word: str, source: str | None = None) -> PathResult:
        """Connect and greet only. ``source``: local address, if the kernel is not to choose."""
        path, connection = self._open(address, port, word, source=source)
        if connection is not None:
            reset_connection(connection)
        return path

    def measure(self, address: str, port: int, word: str, burst: int) -> PathResult:
        """Connect, greet, and measure; ``burst`` in bytes."""
        path, connection = self._open(address, port, word)
        if connection is None:
            return path
        moments: list[ClockSample] = []
        limit = self._deadline.within(ECHO_SECONDS)
        with suppress(TimeoutError, ConnectionCut):
            while len(moments) < ECHOES and not limit.is_over:
                moments.append(self._echo(connection, limit))
                sleep(ECHO_GAP)
        path.moment = min(moments, key=lambda moment: moment.round_trip, default=None)
        if moments and burst:
            path.full_size_arrived = self._full_size(connection, address, port, word, burst)
        info = read_tcp_info(connection)
        reset_connection(connection)
        # That of the kernel too: a busy processor lengthens the others.
        trips = [moment.round_trip for moment in moments]
        if info is not None and info.round_trip is not None:
            trips.append(info.round_trip)
        path.round_trip = min(trips, default=None)
        # What vanished with the large packets counts there and not as loss.
        path.info = None if path.full_size_arrived is False else info
        return path

    def arrives(
        self, address: str, port: int, word: str, burst: int, segment: int | None, source: str | None = None
    ) -> bool | None:
        """Return whether a burst arrives on a connection of its own; ``None`` without time or connection for it.

        ``segment``: bytes of data per packet; ``None``: as large as TCP makes them.
        """
        seconds = SMALL_BURST_SECONDS if segment else BURST_SECONDS
        _, connection = self._open(address, port, word, segment, source)
        if connection is None:
            return None
        arrived = self._burst(connection, burst, seconds) if self._deadline.left() >= seconds else None
        reset_connection(connection)
        return arrived

    def _open(
        self, address: str, port: int, word: str, segment: int | None = None, source: str | None = None
    ) -> tuple[PathResult, socket | None]:
        outcome, connection, seconds = connect_tcp(address, port, self._deadline, segment=segment, source=source)
        if connection is None:
            return PathResult(outcome, seconds), None
        patience = self._deadline.left(GREETING_SECONDS)
        try:
            answer = send_and_receive(connection, greeting(word), WELCOME_BYTES, ProbeDeadline(patience))
        except TimeoutError:
            outcome = "unanswered" if patience >= SILENT_SECONDS else None
        except ConnectionCut:
            outcome = "stranger"
        else:
            if answer == welcome(word):
                return PathResult("open", seconds), connection
            outcome = "stranger"
        reset_connection(connection)
        return PathResult(outcome, seconds), None

    def _echo(self, connection: socket, limit: ProbeDeadline) -> ClockSample:
        """Return a sample by the clock filter of NTP (RFC 5905, section 8): the offset from four times, and the round
        trip."""
        sent, began = self._clock(), perf_counter()
        answer = send_and_receive(connection, LENGTH.pack(0), TIMES.size, limit)
        trip = perf_counter() - began
        arrived, answered = TIMES.unpack(answer)
        returned = self._clock()
        ahead = ((arrived - sent) + (answered - returned)) / 2
        return ClockSample(ahead, max(0.0, trip - max(0.0, answered - arrived)))

    def _full_size(self, connection: socket, address: str, port: int, word: str, burst: int) -> bool | None:
        """Return whether a burst of large packets arrives.

        ``False`` only if it does not, then the same in small packets does, and a second one in large packets does not:
        a stopped peer or a lossy path is another fault.
        """
        if not self._turn.acquire(timeout=self._deadline.left()):
            return None
        try:
            arrived = self._burst(connection, burst, BURST_SECONDS)
            if arrived is not False:
                return arrived
            if not self.arrives(address, port, word, burst, SEGMENT):
                return None
            return self.arrives(address, port, word, burst, None)
        finally:
            self._turn.release()

    def _burst(self, connection: socket, size: int, seconds: float) -> bool | None:
        """Return whether it arrives in time; ``None`` if the connection was cut."""
        # Random bytes: a tunnel that compresses would make small packets of anything else.
        question = LENGTH.pack(size) + os.urandom(size)
        try:
            send_and_receive(connection, question, TIMES.size, self._deadline.within(seconds))
        except TimeoutError:
            return False
        except ConnectionCut:
            return None
        return True

"""Run the rounds of one host: one partner per round, with a transfer each way."""

from __future__ import annotations

from collections.abc import Callable
from socket import socket
from typing import NamedTuple

import msgspec

from doctor.collectors.network.master_address import address_elsewhere, own_addresses
from doctor.core.clock import monotonic, sleep
from doctor.core.facts import Transfer
from doctor.core.facts.probe_results import TransferOutcome
from doctor.probes.bandwidth.schedule import TransferPairing, TransferSchedule
from doctor.probes.bandwidth.transfer import TransferLimit, receive, send
from doctor.probes.bandwidth.transfer_wire import TransferHandshake, TransferReport, transfer_greeting, transfer_welcome
from doctor.probes.reachability.tcp_info import read_tcp_info
from doctor.probes.responder.backlog import ConnectionBacklog
from doctor.probes.responder.wire_format import WELCOME_BYTES
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import ConnectionCut, connect_tcp, reset_connection, send_and_receive

RESOLVE_SECONDS = 1.0

PACE = 0.35
"""Minimum seconds between the beginnings of two rounds: rounds without faults take no time, so a host that is slow at
times would be measured in its good moments alone."""

LEAST_SECONDS = 0.2
"""Time that must be left of a round, besides that of the bytes, for a transfer to begin."""


class _Flow(NamedTuple):
    outcome: TransferOutcome
    report: TransferReport | None = None
    sent: int | None = None
    again: int | None = None
    loaded: float | None = None


class TransferWorker:
    """Runs the rounds of a ``schedule``; callers are in ``backlog``.

    Round *n* ends *n* times ``round_seconds`` after the beginning, whatever the others do: a host that waited in vain
    reaches its next partner before that one gives up.
    """

    def __init__(self, schedule: TransferSchedule, backlog: ConnectionBacklog, deadline: ProbeDeadline) -> None:
        self._schedule = schedule
        self._backlog = backlog
        self._deadline = deadline
        self._amount = TransferLimit(schedule.bytes, schedule.seconds)

    def run(self) -> tuple[Transfer, ...]:
        """Run all rounds, and return how the data of this host arrived."""
        first, each, began = self._schedule.first, self._schedule.round_seconds, monotonic()
        ends = [self._deadline.within((pairing.round - first + 1) * each) for pairing in self._schedule.meetings]
        found = []
        for pairing, end in zip(self._schedule.meetings, ends, strict=True):
            sleep(max(0.0, began + (pairing.round - first) * PACE - monotonic()))
            found.append(self._run_pairing(pairing, end))
        return tuple(found)

    def _run_pairing(self, pairing: TransferPairing, end: ProbeDeadline) -> Transfer:
        """Transfer both ways, that of the caller first."""
        if pairing.calls and pairing.address is None:
            address = address_elsewhere(pairing.peer, end.left(RESOLVE_SECONDS), own_addresses())
            pairing = msgspec.structs.replace(pairing, address=address)
        transfer = self._call if pairing.calls else self._await
        flows = {sends: transfer(pairing, end, sends=sends) for sends in (pairing.calls, not pairing.calls)}
        flow, report = flows[True], flows[True].report
        return Transfer(
            pairing.peer,
            flow.outcome,
            report.bandwidth if report else None,
            round=pairing.round,
            pairs=pairing.pairs,
            confirms=self._schedule.confirms,
            address=pairing.address,
            bytes=report.size if report else 0,
            seconds=report.seconds if report else 0.0,
            segments_sent=flow.sent,
            segments_retransmitted=flow.again,
            round_trip=flow.loaded,
            waited=report.waited if report else 0.0,
        )

    def _call(self, pairing: TransferPairing, end: ProbeDeadline, *, sends: bool) -> _Flow:
        """Connect, wait until the other host has reached this round, and transfer; ``sends``: from here."""
        address = pairing.address
        connection = connect_tcp(address, pairing.port, end, source=pairing.source).connection if address else None
        if connection is None:
            return _Flow("unreached")
        handshake = TransferHandshake(self._schedule.survey, pairing.round, self._schedule.place, sends)
        greeting = transfer_greeting(pairing.word) + handshake.encode()

        def begin(connection: socket) -> bool:
            return send_and_receive(connection, greeting, WELCOME_BYTES, end) == transfer_welcome(pairing.word)

        return self._flow(connection, begin, sends, end)

    def _await(self, pairing: TransferPairing, end: ProbeDeadline, *, sends: bool) -> _Flow:
        """Take the connection of the caller, and transfer; ``sends``: from here."""
        handshake = TransferHandshake(self._schedule.survey, pairing.round, pairing.place, not sends)
        connection = self._backlog.take(handshake, end)
        if connection is None:
            return _Flow("late")

        def begin(connection: socket) -> bool:
            if end.left() < LEAST_SECONDS + self._amount.seconds:
                return False
            send_and_receive(connection, transfer_welcome(self._schedule.word), 0, end)
            return True

        return self._flow(connection, begin, sends, end)

    def _flow(self, connection: socket, begin: Callable[[socket], bool], sends: bool, end: ProbeDeadline) -> _Flow:
        """Transfer once both hosts are ready, which ``begin`` ensures."""
        try:
            if not begin(connection):
                return _Flow("late")
            if not sends:
                return _Flow("done", receive(connection, self._amount, end))
            report = send(connection, self._amount, end)
            info = read_tcp_info(connection)
            return _Flow("done", report, *(info[1:] if info else ()))
        except TimeoutError:
            return _Flow("late")
        except ConnectionCut:
            return _Flow("cut")
        finally:
            reset_connection(connection)

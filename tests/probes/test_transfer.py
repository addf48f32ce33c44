"""Bytes between two threads of this machine: what is measured, what ends a transfer, and how hosts meet."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from doctor.analysis.fabric.localization.localizer import rounds
from doctor.core.facts import Transfer
from doctor.probes.bandwidth import transfer_plan
from doctor.probes.bandwidth.stage import TransfersStage
from doctor.probes.bandwidth.transfer import (
    FIRST_SECONDS,
    WARM_BYTES,
    WARM_SECONDS,
    ReceiveSample,
    TransferLimit,
    receive,
    report_of,
    send,
)
from doctor.probes.bandwidth.transfer_plan import cost_of_rounds, transfer_schedules
from doctor.probes.bandwidth.transfer_wire import TransferHandshake, TransferReport, transfer_greeting
from doctor.probes.bandwidth.transfer_worker import TransferWorker
from doctor.probes.base import ProbeParticipant
from doctor.probes.reachability.assignments import Agent
from doctor.probes.reachability.connection_plan import ProbeNode, nodes_of
from doctor.probes.responder.backlog import ConnectionBacklog
from doctor.probes.responder.listener import Responder
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import ConnectionCut, connect_tcp
from doctor.testing import healthy
from tests.lab.speed import patience

HERE = "127.0.0.1"
MIB = 1 << 20


@contextmanager
def joined() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    with socket.create_server((HERE, 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def moved(amount: TransferLimit, source: socket.socket, target: socket.socket) -> tuple[TransferReport, TransferReport]:
    """What the sender was told, and what the receiver saw."""
    with ThreadPoolExecutor(1) as thread:
        seen = thread.submit(receive, target, amount, ProbeDeadline(5))
        told = send(source, amount, ProbeDeadline(5))
        source.close()
        return told, seen.result(patience(5))


def test_both_ends_know_what_arrived() -> None:
    with joined() as (one, other):
        told, seen = moved(TransferLimit(24 * MIB, 5.0), one, other)
    assert told == seen._replace(waited=told.waited)
    assert 0 <= seen.waited <= told.waited <= patience(1)
    assert told.size == 24 * MIB
    assert 0 < told.steady_size < told.size - WARM_BYTES + 2 * MIB
    assert 0 < told.steady_seconds < told.seconds < 5
    assert told.bandwidth > 20e6


def test_time_ends_it_where_bytes_are_few() -> None:
    """A way that carries 1.25 MB/s, 10 Mb/s, as a receiver sees it."""
    with joined() as (one, other), ThreadPoolExecutor(1) as thread:
        seen = thread.submit(receive, other, TransferLimit(seconds=0.4), ProbeDeadline(5))
        began = time.monotonic()
        while not seen.done() and time.monotonic() - began < 3:
            one.sendall(bytes(12_500))
            time.sleep(0.01)
            if time.monotonic() - began > 0.5:
                one.close()
                break
        report = seen.result(patience(5))
    assert report.seconds == pytest.approx(0.4, abs=0.05)
    # A busy machine sleeps too long, and never too short.
    assert 0.3e6 < report.bandwidth < 1.4e6


def arriving(rate: float, seconds: float, burst: int = 0, step: float = 0.001) -> list[ReceiveSample]:
    """``burst`` bytes at once, then ``rate`` bytes a second."""
    return [ReceiveSample(turn * step, int(burst + rate * turn * step)) for turn in range(int(seconds / step) + 1)]


def test_the_burst_of_a_token_bucket_does_not_count() -> None:
    report = report_of(arriving(1.25e6, 0.4, burst=8 * MIB), 0.4)
    assert report.bandwidth == pytest.approx(1.25e6, rel=0.02)
    assert report.steady_seconds == pytest.approx(0.4 - WARM_SECONDS, abs=0.01)


def test_a_stall_counts() -> None:
    assert report_of(arriving(10e6, 0.2), 0.4).bandwidth == pytest.approx(10e6 / 3, rel=0.05)


def test_nothing_and_next_to_nothing() -> None:
    assert report_of([], 0.0).bandwidth == 0.0
    assert report_of([ReceiveSample(0.0, 1448)], 0.4) == TransferReport(1448, 0, 0.4, 0.4)
    short = report_of([ReceiveSample(0.0, 1000), ReceiveSample(0.01, WARM_BYTES + 1000)], 0.01)
    assert short.bandwidth == pytest.approx(WARM_BYTES / 0.01)


def test_no_byte_comes() -> None:
    with joined() as (_, other):
        report = receive(other, TransferLimit(), ProbeDeadline(FIRST_SECONDS / 4))
        assert (report.bandwidth, report.size) == (0.0, 0)


def test_the_sender_waits_for_no_report_that_does_not_come() -> None:
    with joined() as (one, _), pytest.raises(TimeoutError):
        send(one, TransferLimit(MIB, 0.1), ProbeDeadline(0.3))


def test_a_connection_that_ends_is_told_from_one_that_is_slow() -> None:
    with joined() as (one, other):
        other.close()
        with pytest.raises(ConnectionCut):
            send(one, TransferLimit(), ProbeDeadline(5))
    with joined() as (one, other):
        one.close()
        with pytest.raises(ConnectionCut):
            receive(other, TransferLimit(), ProbeDeadline(5))


def test_a_connection_waits_until_it_is_taken() -> None:
    backlog = ConnectionBacklog()
    with joined() as (one, other):
        threading.Timer(0.05, backlog.add, (TransferHandshake(1, 0, 2, True), other)).start()
        assert backlog.take(TransferHandshake(1, 0, 3, True), ProbeDeadline(0.01)) is None
        assert backlog.take(TransferHandshake(1, 0, 2, True), ProbeDeadline(5)) is other
        backlog.add(TransferHandshake(1, 1, 2, True), other)
        backlog.close()
        assert is_reset(one)
        assert backlog.take(TransferHandshake(1, 1, 2, True), ProbeDeadline(5)) is None


def is_reset(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def responders() -> Iterator[list[Responder]]:
    both = [Responder(), Responder()]
    yield both
    for one in both:
        one.close()


def stations(responders: list[Responder]) -> list[ProbeNode]:
    """Hosts of one address; the ports tell them apart."""
    job = healthy(len(responders), 1).job()
    agents = [Agent(rank, rank, one.port, one.word) for rank, one in enumerate(responders)]
    found = nodes_of(job, agents)
    return [one._replace(dials=tuple(dial._replace(address=HERE) for dial in one.dials[:1])) for one in found]


def travelled(responders: list[Responder], *, only: tuple[int, ...] = (0, 1)) -> dict[int, tuple[Transfer, ...]]:
    """What those hosts found that set out."""
    routes = transfer_schedules(stations(responders), rounds(len(responders)))
    with ThreadPoolExecutor(len(only)) as threads:
        under_way = {
            place: threads.submit(TransferWorker(routes[place], responders[place].backlog, ProbeDeadline(10)).run)
            for place in only
        }
        return {place: one.result(patience(15)) for place, one in under_way.items()}


def test_two_hosts_meet_and_measure_both_ways(responders: list[Responder]) -> None:
    found = travelled(responders)
    for place, peer in ((0, "node1"), (1, "node0")):
        (sample,) = found[place]
        assert (sample.peer, sample.outcome, sample.round, sample.pairs) == (peer, "done", 0, 1)
        assert sample.bandwidth > 20e6
        assert sample.segments_sent > 100
        assert sample.segments_retransmitted <= 0.01 * sample.segments_sent  # a busy machine acknowledges late
        assert 0 < sample.round_trip < 0.5


def test_a_partner_that_does_not_come_costs_one_round(
    responders: list[Responder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_plan, "ROUND_SECONDS", 0.7)
    for place in (0, 1):
        (sample,) = travelled(responders, only=(place,))[place]
        assert (sample.outcome, sample.bandwidth) == ("late", None)


def test_a_partner_whose_port_is_closed(responders: list[Responder]) -> None:
    responders[1].close()
    (sample,) = travelled(responders, only=(0,))[0]
    assert sample.outcome == "unreached"


def test_who_does_not_know_the_word_is_sent_away(responders: list[Responder]) -> None:
    connection = connect_tcp(HERE, responders[0].port, ProbeDeadline(5)).connection
    assert connection is not None
    with connection:
        connection.sendall(transfer_greeting("guess") + TransferHandshake(1, 0, 1, True).encode())
        assert is_reset(connection)


def test_who_knows_the_word_waits(responders: list[Responder]) -> None:
    with socket.create_connection((HERE, responders[0].port)) as caller:
        caller.sendall(transfer_greeting(responders[0].word) + TransferHandshake(7, 0, 1, True).encode())
        assert responders[0].backlog.take(TransferHandshake(7, 0, 1, True), ProbeDeadline(5)) is not None


def test_who_says_more_than_a_visit_is_sent_away(responders: list[Responder]) -> None:
    with socket.create_connection((HERE, responders[0].port)) as caller:
        caller.sendall(transfer_greeting(responders[0].word) + 2 * TransferHandshake(7, 0, 1, True).encode())
        assert is_reset(caller)


def test_what_it_costs_is_said() -> None:
    assert cost_of_rounds(rounds(8))[1] == (
        "bandwidth: 8 hosts in 7 rounds, 4 pairs at once, at most 67 MB each way a pair, 3.8 GB in all and 18 s"
    )
    assert cost_of_rounds([[(0, 3)]], confirms=True)[1].startswith("bandwidth (repeated): 2 hosts in")


def test_one_host_plans_nothing() -> None:
    job = healthy(1, 4).job()
    posts = [ProbeParticipant(str(rank.number), rank, 0, rank.number == 0, 4000, "word") for rank in job.ranks]
    assert TransfersStage().plan(job, posts) is None


def test_many_hosts_stay_within_their_seconds() -> None:
    assert len(rounds(1024)) <= 12
    assert cost_of_rounds(rounds(1024))[0] <= TransfersStage().most_seconds

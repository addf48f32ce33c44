"""NCCL's RAS service asked by an attaching process: what it reports, whom it belongs to, and peers that are none."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from doctor.analysis.attach_outcome import rank_stacks
from doctor.analysis.attached_job import attached_job
from doctor.attach import host_reading
from doctor.attach.host_reading import HostTargets, read_targets
from doctor.attach.processes import Process
from doctor.attach.sampler import SamplingOptions
from doctor.attach.sources import nccl_ras
from doctor.attach.sources.nccl_ras import RasAddress, RasReader, RasReport, RasService, find_service, ras_address
from doctor.core.errors import UnusableError
from doctor.core.facts import AttachedProcess, Event
from doctor.core.finding import Severity
from tests.attach.attached import at, inside, members, process
from tests.attach.ras_server import json_report, ras_server
from tests.attach.test_attached_job import SLEEP, findings, judged
from tests.lab.speed import patience

DATA = Path(__file__).parents[1] / "data" / "ras"
PIDS = [1000, 1001, 1002, 1003]
BEHIND = json_report([42, 42, 41, 42], pids=PIDS)
SYNC = inside("all_reduce")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "BETWEEN", 0.05)


def reported(
    address: RasAddress | None, *, pids: tuple[int, ...] = (1000,), size: int | None = 4, seconds: float = 10.0
) -> RasReport:
    return RasReader(RasService(address), pids, size, patience(seconds)).result()


def test_a_rank_behind_in_two_reports_is_named_with_what_it_launched() -> None:
    with ras_server(BEHIND) as server:
        report = reported(server.address)
        assert server.commands == ["client protocol 2", "timeout 2", "set format json", "verbose status"] * 2
    (event,) = report.events
    assert (event.kind, event.rank, event.value("stuck"), report.notes) == ("ras.counts_differ", 2, "yes", ())


def test_counts_that_go_on_are_of_a_healthy_job() -> None:
    with ras_server(lambda number, _: json_report([50 + number, 50], pids=PIDS).encode()) as server:
        (event,) = reported(server.address).events
    assert event.value("stuck") == "no"


def test_a_service_before_2_28_reports_in_text() -> None:
    text = (DATA / "stalled.txt").read_text()
    with ras_server(lambda _, chosen: text.encode() if chosen == "text" else b"", has_json=False) as server:
        report = reported(server.address, size=8)
    kinds = {event.kind for event in report.events}
    assert {"ras.rank_dead", "ras.async_error", "ras.counts_differ"} <= kinds


def test_a_healthy_job_is_said_to_be_one() -> None:
    with ras_server(json_report([7] * 4, pids=PIDS)) as server:
        report = reported(server.address)
    healthy = "reports no lost process, no error and no rank that is behind"
    assert report == RasReport((), (f"NCCL RAS at {server.address.text} {healthy}",))


@pytest.mark.parametrize(
    ("answer", "size", "note"),
    [
        (json_report([1, 1], pids=[7, 8]), 4, "reports another job: it lists none of the ranks of this host"),
        ((DATA / "stalled.txt").read_text(), 4, "reports another job: it has 8 GPUs, and this job 4 ranks"),
        ("HTTP/1.1 400 Bad Request\r\n\r\n", 4, "is not NCCL RAS"),
        ("{" * 100_000, 4, "is not NCCL RAS"),
        ("", 4, "is not NCCL RAS"),
    ],
)
def test_reports_of_others_are_not_used(answer: str, size: int, note: str) -> None:
    with ras_server(answer) as server:
        report = reported(server.address, size=size)
    assert not report.events
    assert note in report.notes[0]


def _endless(connection: socket.socket) -> None:
    connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
    while True:
        connection.sendall(b"x" * (1 << 16))


def _silent(connection: socket.socket) -> None:
    connection.recv(100)
    time.sleep(30)


def _drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"S")
        time.sleep(0.05)


def _another(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    time.sleep(30)


def _long_line(connection: socket.socket) -> None:
    connection.sendall(b"SERVER PROTOCOL " + b"2" * 100_000)
    time.sleep(30)


@pytest.fixture
def peer() -> Iterator[Callable[[Callable[[socket.socket], None]], RasAddress]]:
    """Starts a peer that does this with every connection."""
    listeners: list[socket.socket] = []

    def start(behavior: Callable[[socket.socket], None]) -> RasAddress:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve(connection: socket.socket) -> None:
            try:
                behavior(connection)
            except OSError:
                connection.close()

        def accept() -> None:
            try:
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        return RasAddress(*listener.getsockname())

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    ("behavior", "note"),
    [
        (_endless, "its report has more than 8 MiB"),
        (_silent, "does not respond"),
        (_drip, "does not respond"),
        (_another, "it is not NCCL RAS"),
        (_long_line, "it is not NCCL RAS"),
    ],
)
def test_a_hostile_peer_costs_at_most_the_deadline(peer, behavior, note: str) -> None:  # type: ignore[no-untyped-def]
    begun = time.monotonic()
    report = reported(peer(behavior), seconds=0.3)
    assert time.monotonic() - begun < patience(3)
    assert note in report.notes[0]


def test_a_report_that_takes_long_to_parse_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "PARSE_SECONDS", 0.2)
    lines = "NCCL version 2.28 compiled with CUDA\n\nJob summary\n===========\n" + "\n" * (nccl_ras.LARGEST - 1000)
    with ras_server(lines) as server:
        report = reported(server.address)
    assert report.notes == (f"the report of NCCL RAS at {server.address.text} takes too long to parse",)


def test_a_first_report_is_kept_if_the_second_does_not_come() -> None:
    def report(number: int, _: str) -> bytes:
        time.sleep(0 if number == 1 else patience(1))
        return BEHIND.encode()

    with ras_server(report) as server:
        (event,) = reported(server.address, seconds=0.4).events
    assert event.value("stuck") == "unknown"


def _rank(**variables: str) -> Process:
    network = os.readlink("/proc/self/ns/net")
    return Process(1000, 1, 10.0, os.geteuid(), environ={"RANK": "0", **variables}, network=network)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_service_of_the_ranks_is_found_where_it_listens(host: str) -> None:
    try:
        server = ras_server(BEHIND, host)
        with server as here:
            port = here.address.port
            assert find_service([_rank(NCCL_RAS_ADDR=f"localhost:{port}")]).address == RasAddress(host, port)
            foreign = msgspec.structs.replace(_rank(NCCL_RAS_ADDR=f"localhost:{port}"), user=12345)
            assert find_service([foreign]).note == f"NCCL RAS was not queried: another user listens on port {port}"
    except OSError:
        pytest.skip(f"no {host} here")


@pytest.mark.parametrize(
    ("address", "note"),
    [
        ("10.1.2.3:28028", "NCCL_RAS_ADDR is 10.1.2.3:28028 (--nccl-ras queries it)"),
        ("eth0:28028", "NCCL_RAS_ADDR is eth0:28028 ("),
        ("127.0.0.1.evil.example:80", "NCCL_RAS_ADDR is 127.0.0.1.evil.example:80 ("),
        ("localhost:99999999", "NCCL_RAS_ADDR of a rank is not a valid address"),
        ("user@localhost:1", "NCCL_RAS_ADDR of a rank is not a valid address"),
        ("localhost:1", "NCCL RAS does not listen on port 1 (NCCL before 2.24"),
    ],
)
def test_an_address_of_the_environment_is_opened_only_on_this_host(address: str, note: str) -> None:
    service = find_service([_rank(NCCL_RAS_ADDR=address)])
    assert service.address is None
    assert note in service.note
    assert reported(service.address).events == ()


def test_ranks_of_another_network_namespace_have_another_localhost() -> None:
    inside_container = msgspec.structs.replace(_rank(), network="net:[1]")
    assert "in another network namespace" in find_service([inside_container]).note


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node1", RasAddress("node1")),
        ("node1:1", RasAddress("node1", 1)),
        ("[::1]:5", RasAddress("::1", 5)),
        ("10.0.0.1", RasAddress("10.0.0.1")),
    ],
)
def test_addresses(text: str, address: RasAddress) -> None:
    assert ras_address(text) == address


@pytest.mark.parametrize("text", ["", ":5", "node1:http", "http://node1", "node1/x", "me@node1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UnusableError):
        ras_address(text)


# In a job.


def _events(report: str) -> tuple[Event, ...]:
    with ras_server(report) as server:
        return reported(server.address).events


def _ranks(*stacks: tuple[object, ...]) -> list[AttachedProcess]:
    return [process(rank, stack) for rank, stack in enumerate(stacks)]  # type: ignore[arg-type]


def test_the_rank_with_fewer_launches_is_the_one_that_the_others_wait_for() -> None:
    found = members(*_ranks(SYNC, SYNC, SYNC, SYNC), ras=_events(BEHIND))
    (finding,) = judged(found).result("RUN001").findings  # type: ignore[union-attr]
    assert (finding.ranks, finding.severity) == ((2,), Severity.ERROR)
    assert finding.summary == ("Rank 2 has launched fewer collectives than the others (launched 41 of 42 AllReduce)")
    assert finding.evidence["where"]["2"].endswith("NCCL RAS: launched 41 of 42 AllReduce")


def test_counts_agree_with_a_rank_that_stands_elsewhere() -> None:
    found = members(*_ranks(SYNC, SYNC, SLEEP, SYNC), ras=_events(BEHIND))
    (finding,) = judged(found).result("RUN001").findings  # type: ignore[union-attr]
    assert finding.summary.startswith("Rank 2 is stuck at train.py:58 (step)")
    assert "NCCL RAS: launched 41 of 42 AllReduce" in finding.evidence["where"]["2"]


def test_a_rank_that_moves_or_computes_is_not_behind() -> None:
    slow = [process(rank, SYNC) for rank in (0, 1, 3)]
    for moves in (process(2, (at(40),), (at(41),)), process(2, (at(40),), cpu=1.0)):
        assert {severity for *_, severity in findings(members(*slow, moves, ras=_events(BEHIND)))} <= {Severity.INFO}


def test_without_stacks_counts_name_the_rank() -> None:
    refused = [process(rank, stack_source="", refused="ptrace is not permitted") for rank in range(4)]
    assert findings(members(*refused, ras=_events(BEHIND))) == [("RUN001", (2,), Severity.ERROR)]


def test_most_ranks_behind_are_no_culprits() -> None:
    events = _events(json_report([42, 41, 41, 41], pids=PIDS))
    assert not [one for one in findings(members(*_ranks(*[SYNC] * 4), ras=events)) if one[1] == (1, 2, 3)]


def test_a_rank_of_another_host_that_ras_has_lost_is_named() -> None:
    here = [process(rank, SYNC, local_rank=rank, local_world_size=2) for rank in range(2)]
    for dead, check in ((True, "RUN004"), (False, "RUN001")):
        found = members(*here, ras=_events(json_report([5] * 4, pids=PIDS, lost={3: dead})))
        assert (check, (3,), Severity.ERROR) in findings(found), dead
        assert "1 host attached" in rank_stacks(found, attached_job(found)).job


def test_an_error_of_nccl_is_shown_beside_the_rank() -> None:
    events = _events(json_report([5] * 4, pids=PIDS, errors={1: 6}))
    (finding,) = judged(members(*_ranks(SYNC, SYNC, SYNC, SLEEP), ras=events)).result("RUN001").findings  # type: ignore[union-attr]
    assert finding.ranks == (3,)
    assert "NCCL RAS: Remote process error" in finding.evidence["where"]["1"]


def test_the_host_of_rank_0_asks_if_ranks_use_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reading, "sample", lambda targets, _: tuple(targets))
    with ras_server(json_report([1] * 8, pids=[*PIDS, *range(4)])) as server:
        options = SamplingOptions(seconds=patience(10), nccl_ras=server.address.text)
        for rank, alone, asked in ((0, False, True), (4, False, False), (4, True, True)):
            one = process(rank, SYNC, pid=1000, world=8)
            notes = read_targets(HostTargets(None, (one,)), options, alone=alone).notes
            assert bool(notes) is asked
        assert read_targets(HostTargets(None, (one,)), SamplingOptions()).notes == ()

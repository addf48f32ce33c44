"""One agent alone, against peers on this machine that are well, silent, rude or somebody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from doctor.collectors.base import Machine
from doctor.collectors.network.routes import read_interface_errors
from doctor.facts import ReachFacts
from doctor.probes.reachability.assignments import Assignment, LightProbeResult, MasterTarget, ProbeTarget
from doctor.probes.reachability.dns_lookups import peer_name_of
from doctor.probes.reachability.light_probe import probe_light, try_master_port
from doctor.probes.reachability.tcp_info import read_tcp_info
from doctor.probes.responder.listener import Responder
from doctor.probes.responder.wire_format import WELCOME_BYTES, greeting
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.tcp_connect import ConnectionCut, connect_tcp, send_and_receive
from doctor.probes.runtime.thread_pool import start_side_by_side, wait_for
from tests.lab.ports import free_port
from tests.lab.speed import NEVER

HERE = "127.0.0.1"


def target(port: int, word: str = "word", address: str | None = HERE, peer: str = "peer") -> ProbeTarget:
    return ProbeTarget(peer, address, port, word)


def measured(*targets: ProbeTarget, seconds: float = 8.0, **changes: object) -> LightProbeResult:
    assignment = Assignment(0, "here", targets, reference="peer", burst=36000)
    return probe_light(msgspec.structs.replace(assignment, **changes), seconds=seconds)


def outcome(found: LightProbeResult) -> str | None:
    return next((attempt.outcome for attempt in found.reach.attempts), None)


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server of one thread; ``answer`` gets each connection."""
    with socket.create_server((HERE, 0)) as server:

        def run() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with suppress(OSError):
                        answer(connection)

        threading.Thread(target=run, daemon=True).start()
        yield server.getsockname()[1]
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def test_a_peer_that_is_well() -> None:
    with closing(Responder(lambda: time.time() + 7)) as peer:
        found = measured(target(peer.port, peer.word))
    [sample] = found.paths.samples
    assert outcome(found) == "open"
    assert sample.full_size_arrived
    assert 0 < sample.round_trip < 0.1
    assert found.paths.segments_sent > 10
    assert found.clock.offset == pytest.approx(-7, abs=0.05)
    assert 0 <= found.clock.uncertainty < 0.05
    assert msgspec.json.decode(msgspec.json.encode(found), type=LightProbeResult) == found


def test_the_reference_names_itself() -> None:
    found = measured(reference=None)
    assert (found.clock.reference, found.clock.offset, found.reach) == ("here", 0.0, ReachFacts())


def test_nobody_listens() -> None:
    port = free_port()
    found = measured(target(port))
    assert outcome(found) == "stranger", "this host itself has refused"
    assert found.clock is None
    assert found.paths.samples[0].round_trip is None
    assert found.paths.segments_sent is None


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"),
        lambda connection: connection.sendall(connection.recv(4096)),
    ],
    ids=["hangs up", "speaks first", "echoes"],
)
def test_somebody_else_answers(answer: Callable[[socket.socket], None]) -> None:
    with serving(answer) as port:
        assert outcome(measured(target(port))) == "stranger"


def test_another_responder_answers() -> None:
    with closing(Responder()) as peer:
        assert outcome(measured(target(peer.port, "another word"))) == "stranger"


def test_a_program_that_never_answers() -> None:
    held: list[socket.socket] = []
    with serving(held.append) as port:
        found = measured(target(port))
        assert outcome(found) == "unanswered"
        assert outcome(measured(target(port), seconds=1.0)) is None, "too little time to say so"


def test_a_program_that_stops_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The greeting is answered, nothing else is: open, and no word on the rest."""
    from doctor.probes.responder.wire_format import welcome

    held: list[socket.socket] = []

    def answer(connection: socket.socket) -> None:
        held.append(connection)
        connection.recv(4096)
        connection.sendall(welcome("word"))

    with serving(answer) as port:
        found = measured(target(port))
    [sample] = found.paths.samples
    assert (outcome(found), sample.full_size_arrived, found.clock) == ("open", None, None)


def test_an_address_that_the_peer_has_no_more() -> None:
    found = measured(target(9, address=None, peer="no-such-host.invalid"), seconds=5)
    assert outcome(found) in ("unresolved", None)


@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.0, 2.0])
def test_keeps_its_time_where_nobody_answers(seconds: float) -> None:
    """192.0.2.0/24 is for documentation (RFC 5737): nobody has it."""
    found = measured(*(target(9, address=f"192.0.2.{number}") for number in range(1, 40)), seconds=seconds)
    assert {attempt.outcome for attempt in found.reach.attempts} <= {"silent", "unroutable", "refused", "stranger"}


def test_text_that_is_no_address() -> None:
    found = measured(target(9, address="no address"), target(9, address="::zz"), seconds=3)
    assert {attempt.outcome for attempt in found.reach.attempts} <= {"unroutable"}


def test_the_master_is_held_while_probing() -> None:
    port = free_port()
    with closing(Responder()) as own:
        task = Assignment(0, "here", master=MasterTarget(HERE, port, "here", held=True), hold_port=port)
        found = probe_light(task, own)
    [attempt] = found.reach.attempts
    assert (attempt.purpose, attempt.outcome, attempt.peer, attempt.port) == ("master", "open", "here", port)


def test_a_refusal_counts_only_where_somebody_is_to_listen() -> None:
    port = free_port()
    assert try_master_port(HERE, port, ProbeDeadline(5), patient=False)[0] is None
    assert try_master_port(HERE, port, ProbeDeadline(0.5), patient=True)[0] == "refused"
    late = threading.Timer(0.5, lambda: servers.append(socket.create_server((HERE, port))))
    servers: list[socket.socket] = []
    late.start()
    assert try_master_port(HERE, port, ProbeDeadline(5), patient=True)[0] == "open"
    servers[0].close()


def test_a_name_of_the_master_that_is_none() -> None:
    task = Assignment(0, "here", master=MasterTarget("no-such-host.invalid", 29500, "node0", held=True))
    attempts = probe_light(task, seconds=4).reach.attempts
    assert {attempt.outcome for attempt in attempts} <= {"unresolved"}


def test_what_the_kernel_knows_of_a_connection() -> None:
    with closing(Responder()) as peer:
        connection = connect_tcp(HERE, peer.port, ProbeDeadline(5)).connection
        send_and_receive(connection, greeting(peer.word), WELCOME_BYTES, ProbeDeadline(5))
        info = read_tcp_info(connection)
        connection.close()
    assert 0 < info.round_trip < 0.05
    assert (info.sent >= 2, info.retransmitted) == (True, 0)
    with socket.socket(socket.AF_UNIX) as other:
        assert read_tcp_info(other) is None


def test_small_packets_on_request() -> None:
    with closing(Responder()) as peer:
        connection = connect_tcp(HERE, peer.port, ProbeDeadline(5), segment=536).connection
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 536
        connection.close()


def test_an_answer_that_is_cut_off() -> None:
    with serving(lambda connection: (connection.sendall(b"ab"), connection.close())) as port:
        connection = connect_tcp(HERE, port, ProbeDeadline(5)).connection
        with pytest.raises(ConnectionCut):
            send_and_receive(connection, b"", 3, ProbeDeadline(5))
        connection.close()


def test_tasks_side_by_side_are_few_at_a_time_and_end_in_time() -> None:
    running, most, done = [], [], []

    def task() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        done.append(1)

    deadline = ProbeDeadline(5)
    wait_for(start_side_by_side([task] * 12, 4, deadline), deadline)
    assert (max(most), len(done)) == (4, 12)
    short = ProbeDeadline(0.3)
    wait_for(start_side_by_side([lambda: time.sleep(NEVER)] * 3, 2, short), short)


def test_errors_of_the_interfaces_in_use_alone(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "{}: 10 2 {} 0 0 0 0 0 10 2 {} 0 0 0 0 0\n"
    head = "Inter-|   Receive\n face |bytes packets errs\n"
    (tmp_path / "net" / "dev").write_text(
        head + "".join(row.format(*one) for one in [("eth0", 3, 4), ("  ib0", 1, 0), ("eth1", 50, 60)])
    )
    machine = Machine(proc=tmp_path)
    assert read_interface_errors(machine, ["eth0", "ib0"]) == 8
    assert read_interface_errors(machine, ["eth7"]) is None
    assert read_interface_errors(Machine(proc=tmp_path / "none"), ["eth0"]) is None


def test_how_the_store_sees_an_address() -> None:
    assert peer_name_of("10.0.0.1") in ("::ffff:10.0.0.1", "10.0.0.1")
    assert peer_name_of("fd00::1") == "fd00::1"

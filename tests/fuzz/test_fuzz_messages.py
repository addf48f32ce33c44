"""Any bytes in the place of a message: they are unreadable or ignored, never anything else, and never take much memory.

``python -m tests.fuzz.test_fuzz_messages SECONDS`` goes on with new examples for so long.
"""

from __future__ import annotations

import socket
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor.cluster.gather.coordinator import Coordinator
from doctor.cluster.gather.probe_schedule import ProbeOptions, ProbeSchedule, full_stages
from doctor.cluster.gather.protocol import GatherClosed, GatherVerdict, MemberFacts, ProbeResult, ProbeTask
from doctor.cluster.membership.protocol import HeartbeatMessage, JoinRequest, LeaderAnnouncement
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.codec import MalformedMessage, decode, encode, pack_member, unpack_capture
from doctor.cluster.transport.failover import FailoverStore
from doctor.cluster.transport.signing import SIGNED, RejectedMessages, Secret, SignedBackend
from doctor.cluster.transport.store import KeyValueStore
from doctor.collectors.base import Machine
from doctor.monitor.watchdog import protocol as between
from doctor.monitor.watchdog.admission import AdmissionLeader, AdmissionRequest, own_namespace
from doctor.monitor.watchdog.decision import Decision
from doctor.monitor.watchdog.local_peers.peer_observation import LocalPeerProbe
from doctor.monitor.watchdog.peer_table import PeerTable
from doctor.monitor.watchdog.rounds.collection_round import CollectionRound, RoundTimeouts
from doctor.probes.ablation.group_trials import GroupTrialOutcome, PrepareTrial
from doctor.probes.ablation.setting_variants import ExperimentRow
from doctor.probes.bandwidth.schedule import TransferPairing, TransferSchedule
from doctor.probes.collectives.group_steps import (
    AxisMembership,
    GroupsNotRun,
    JoinGroup,
    LoadTorch,
    OpenStore,
    TorchCapabilities,
)
from doctor.probes.reachability.assignments import Assignment, ProbeTarget
from doctor.probes.runtime import tcp_connect
from doctor.probes.storage import file_probe
from doctor.probes.storage.stage import StorageOrder
from doctor.testing import healthy
from tests.lab.sample import examples

MOST_MEMORY = 96 << 20
"""Bytes that reading one message may take: facts of one process take 16 MB at most, and are parsed."""
TOKEN = "0123456789abcdef"
MEMBER = healthy(1, 2).members[1]
PACKED = pack_member(MEMBER)
SECRET = Secret(b"k" * 16, "test")

VALID: list[msgspec.Struct] = [
    LeaderAnnouncement("abc", 0, 30.0),
    JoinRequest(TOKEN, 1, "node1"),
    MemberFacts(TOKEN, 1, "node1", PACKED, 0, 40_000, "word"),
    ProbeTask(1, "light", 5.0, b"order"),
    ProbeResult(TOKEN, 1, PACKED, 1, b"note"),
    GatherVerdict.of(1, [TOKEN]),
    GatherClosed("abc", GatherVerdict(0)),
    between.MemberList("abc-1", bytes.fromhex(TOKEN)),
    between.PeerProcess(1, 4711, 12.5, 4712, 64),
    between.RankPresence(1, came=True),
    between.PeerObservation(1, 0, "silent", "S"),
    between.RankResumed(1, 3.0),
    between.DecisionMessage(0, "stall", Decision(True, "words", ("RUN001",), (1,))),
    HeartbeatMessage(0, 3),
    GroupTrialOutcome(1.0, ""),
    TorchCapabilities(1, True, ("gloo",)),
]
ORDERS: dict[str, list[msgspec.Struct]] = {
    "light": [Assignment(0, "n", (ProbeTarget("m", "10.0.0.2", 40_000, "w"),), burst=9000)],
    "transfers": [
        TransferSchedule(1, 0, "w", (TransferPairing(0, 1, "m", "10.0.0.2", 40_000, "w", False),), 0, 0.01, 1024, 0.01)
    ],
    "storage": [StorageOrder("clear")],
    "groups": [
        LoadTorch(2),
        OpenStore(1.0),
        GroupsNotRun("why"),
        JoinGroup(("10.0.0.2",), 40_000, 0, 2, "gloo", "cpu", (AxisMembership("world", (0, 1), 8),), 0.1, 0.1),
    ],
    "why": [PrepareTrial(ExperimentRow("p2p-off"), False)],
    "devices": [],
}
NAMES = (
    *(f"abc/{name}" for name in ("hello", "card", "measured", "heard")),
    *("call", "last", "abc/verdict", "abc/leave", "abc/pulse", f"abc/plan/{TOKEN}"),
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=64)
    | st.text(max_size=64)
    | st.sampled_from([TOKEN, "abc", "../../etc", "why", "experiment", "Join", PACKED, zlib.compress(b"{}" * 99)])
)
fields = sorted({name for one in VALID for name in one.__struct_fields__} | {"type"})
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(fields) | st.text(max_size=9), inner),
    max_leaves=24,
)


@st.composite
def mutated(draw: Callable[[Any], Any], messages: list[msgspec.Struct]) -> bytes:
    """A message of ours with some bytes changed, removed or doubled, or with a field that holds another value."""
    message = draw(st.sampled_from(messages))
    if draw(st.booleans()):
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        plain[draw(st.sampled_from(sorted(plain)))] = draw(values)
        return msgspec.msgpack.encode(plain)
    data = bytearray(encode(message))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
        if not data:
            break
    return bytes(data)


def encoded(value: object) -> bytes:
    """As MessagePack, or nothing where that can't hold it."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeError, msgspec.MsgspecError):
        return b""


hostile = st.binary(max_size=300) | mutated(VALID) | values.map(encoded)
IS_TEST = __name__ != "__main__"
FEW = settings(
    max_examples=examples(120) if IS_TEST else 200,
    derandomize=IS_TEST,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
"""The same examples in each test; others in each round of :func:`main`."""


class Shelf:
    """A carrier in memory; what stands there is given."""

    description, survives_coordinator = "a shelf", True

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.boxes: dict[str, list[bytes]] = {}

    def set(self, name: str, data: bytes) -> None:
        self.values[name] = data

    def get(self, name: str) -> bytes | None:
        return self.values.get(name)

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        if self.values.get(name) != old:
            return False
        self.values[name] = new
        return True

    def append(self, name: str, data: bytes) -> None:
        self.boxes.setdefault(name, []).append(data)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        known = mark if isinstance(mark, int) else 0
        box = self.boxes.get(name, [])
        return box[known:], len(box)

    def clear(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


@given(hostile)
@FEW
def test_decoders(data: bytes) -> None:
    """A message of that kind, or unreadable."""
    for kind in {type(one) for one in VALID}:
        try:
            message = decode(data, kind)
        except MalformedMessage:
            continue
        assert isinstance(message, kind)
        encode(message)


@given(st.binary(max_size=300) | st.binary(max_size=300).map(zlib.compress) | values.map(lambda one: _as_capture(one)))
@FEW
def test_facts(data: bytes) -> None:
    """A capture, or unreadable."""
    try:
        capture = unpack_capture(data, "the card of rank 1")
    except MalformedMessage:
        return
    capture.job()


def _as_capture(value: object) -> bytes:
    """A capture of ours in which a part is another value."""
    document = msgspec.json.decode(zlib.decompress(PACKED))
    if isinstance(value, dict):
        document["ranks"][0]["facts"].update({str(key): one for key, one in value.items()})
        document.update({key: one for key, one in value.items() if key in ("absent", "hosts", "ranks", "world_size")})
    else:
        document["ranks"] = value
    try:
        return zlib.compress(msgspec.json.encode(document))
    except (UnicodeError, TypeError, ValueError, msgspec.MsgspecError):
        return b""


@given(st.lists(st.tuples(st.sampled_from(NAMES), hostile), max_size=12))
@FEW
def test_a_coordinator(entries: list[tuple[str, bytes]]) -> None:
    """It gives a job, whatever stands on its board."""
    shelf = Shelf()
    told: list[str] = []
    board = KeyValueStore(shelf)
    seat = ProcessIdentity(0, 2, "key", spans_hosts=False)
    keeper = Coordinator(board, seat, "abc", close_at=time.monotonic() - 1.0, write_line=told.append)
    keeper.open(JoinRequest("f" * 16, 0, "node0"))
    for name, data in entries:
        shelf.append(name, data)
        if name != "call":
            shelf.set(name, data)
    job = keeper.gather(lambda: MemberFacts("f" * 16, 0, "node0", pack_member(healthy(1, 2).members[0])), None)
    assert 0 in {rank.number for rank in job.ranks}
    board.close()


@given(st.lists(st.tuples(st.sampled_from(["call", "abc/hello", "abc/verdict"]), hostile), max_size=8))
@FEW
def test_signed_boards(entries: list[tuple[str, bytes]]) -> None:
    """What was not signed with the key is not there."""
    shelf, rejected = Shelf(), RejectedMessages()
    rejected.kept.add("call")
    signed = SignedBackend(shelf, "run", SECRET, rejected)
    signed.set("abc/leave", b"x")
    sealed = shelf.values["abc/leave"]
    mark: object = None
    for name, data in entries:
        for forged in (data, SIGNED + data, sealed[: len(SIGNED) + 32] + data, sealed):
            shelf.set(name, forged)
            shelf.append(name, forged)
            assert signed.get(name) is None
            assert not signed.exchange(name, forged, b"new")
            found, mark = signed.fetch(name, mark)
            assert found == []
    assert bool(rejected.count) == bool(entries)
    assert len(rejected.warning) < 200
    assert signed.get("abc/leave") == b"x"


@given(st.lists(hostile, min_size=1, max_size=8))
@FEW
def test_a_watchdog(entries: list[bytes]) -> None:
    """Each part of it goes on, whatever the others are said to have written."""
    own: Any = SimpleNamespace(member=MEMBER)
    board = KeyValueStore(Shelf())
    line: Any = _line(board)
    lines = FailoverStore((line,))
    lines.namespace, lines.reading = "abc", (line,)
    local_peers = LocalPeerProbe(0, "host", _NOWHERE)
    local_peers.announce(lines)
    collection = CollectionRound(
        "alarm-1",
        "stall",
        SimpleNamespace(rank=0, world_size=2, peer_store=lines, local_peers=local_peers),  # type: ignore[arg-type]
        RoundTimeouts(60.0, 60.0),
        lambda _: Decision(),
        now=time.monotonic(),
        observes=True,
    )
    peer_table = PeerTable(0, 2, own, lines, SimpleNamespace(read=lambda rank, run: None))  # type: ignore[arg-type]
    for data in entries:
        for name in ("alarm-1/ruling", "card/1", "rounds", "roll"):
            lines.set(name, data)
        line.set("bell/lead", data)
        line.append("abc/hello", data)
        for box in ("host-host", "alarm-1/here", "alarm-1/here-host", "alarm-1/seen"):
            lines.append(box, data)
        local_peers.read_announcements()
        collection.step(time.monotonic())
        peer_table.read((line,))
        peer_table.job_of_round(collection, "abc")
        AdmissionRequest(1, 2, own_namespace(1, "abc"), 0.0).step((line,), time.monotonic())
        AdmissionLeader(own_namespace(0, "abc"), 0, 2).step((line,))
    board.close()


def _line(board: KeyValueStore) -> Any:
    """A line that is open."""
    from doctor.cluster.transport.failover import StoreConnection

    line = StoreConnection.over(board.backend, 3.0, lambda lost: None)
    line.admission_prefix = "bell"
    return line


_NOWHERE = Path("/proc/self/nothing")


WITH_PAUSES = (
    "bandwidth.transfer_worker",
    "devices.device_worker",
    "reachability.path_probe",
    "reachability.light_probe",
    "ablation.device_trials",
    "runtime.tcp_connect",
)


@given(st.sampled_from(sorted(ORDERS)), st.data())
@FEW
def test_orders(stage: str, data: st.DataObject) -> None:
    """An order that is none comes to nothing; what is one does what our own table says."""
    orders = ORDERS[stage]
    order = data.draw((mutated(orders) if orders else st.nothing()) | st.binary(max_size=99) | values.map(encoded))
    survey = ProbeSchedule(
        0, tuple(full_stages(ProbeOptions("full", why=True))), _AROUND, leads_host=False, write_line=lambda _: None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _refuse)
        patch.setattr(tcp_connect, "TRIES", 1)
        for module in WITH_PAUSES:
            patch.setattr(f"doctor.probes.{module}.sleep", lambda seconds: None)
        patch.setattr(file_probe, "start_child", _refuse)
        patch.setattr("doctor.probes.runtime.torch_child.start_python", _refuse)
        patch.setattr("doctor.probes.reachability.light_probe.resolve", lambda *rest: ((), "no", 0.0))
        patch.setattr("doctor.probes.ablation.device_trials.LOOK_SECONDS", 0.0)
        try:
            survey.take_part(ProbeTask(1, stage, 0.05, order))
        except MalformedMessage:
            return
        finally:
            survey.close()


_AROUND = Machine(environ={"PATH": "/usr/bin", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})


def _refuse(*rest: object, **more: object) -> None:
    raise ConnectionRefusedError(111, "Connection refused")


def test_memory() -> None:
    """Lengths that a message claims, and facts that blow up."""
    huge = b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"
    bombs = [
        zlib.compress(b" " * (64 << 20)),
        zlib.compress(b"[" * (32 << 20)),
        zlib.compress(b'"' + b"x" * (15 << 20)),
    ]
    tracemalloc.start()
    try:
        for data in (*huge, *(b"\x82\xa5token" + one for one in huge), b"\x91" * (1 << 20)):
            for kind in {type(one) for one in VALID}:
                with pytest.raises(MalformedMessage):
                    decode(data, kind)
        for bomb in bombs:
            with pytest.raises(MalformedMessage):
                unpack_capture(bomb, "card")
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def main(seconds: float) -> None:
    """All of them again and again with new examples, until the time is up."""
    end, rounds = time.monotonic() + seconds, 0
    every = (test_decoders, test_facts, test_a_coordinator, test_signed_boards, test_a_watchdog, test_orders)
    while time.monotonic() < end:
        for one in every:
            if time.monotonic() < end:
                one()
                rounds += 1
    sys.stdout.write(f"{rounds} rounds of 200 examples, nothing found\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))

"""A participant that nobody asked: it writes to the board of a job as whoever it likes, in a process of its own.

``python -m tests.cluster.hostile WHERE KEY ROLE``: the board (``folder:DIR``, ``store:PORT``), the key of the run, and
what to do there. It says what it has done on stdout, a line each.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from doctor.cluster.gather.protocol import GatherVerdict, MemberFacts, ProbeTask, closed_marker
from doctor.cluster.membership.protocol import JoinRequest, LeaderAnnouncement
from doctor.cluster.transport.codec import MalformedMessage, decode, encode, pack_member
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.store import KeyValueStore, StoreLost
from doctor.cluster.transport.tcp_store import TCPStoreBackend, join_store
from doctor.testing import healthy
from tests.lab.speed import patience, slowness

LIMIT = patience(60.0)
NONCE = "badbadbadbadbad0"


def board_of(where: str, key: str) -> KeyValueStore:
    """The board, once it can be reached."""
    kind, _, place = where.partition(":")
    end = time.monotonic() + LIMIT
    while True:
        try:
            if kind == "folder":
                return KeyValueStore(FileStoreBackend(Path(place), key))
            store = join_store("127.0.0.1", int(place), 5.0)
            return KeyValueStore(TCPStoreBackend(store, key, "hostile", survives_coordinator=True))
        except (OSError, RuntimeError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def until(holds: Callable[[], Any]) -> Any:
    """What ``holds`` gives once it is true."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(StoreLost):
            if found := holds():
                return found
        time.sleep(0.02)
    raise TimeoutError


def say(line: str) -> None:
    """For the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def read(data: bytes | None, kind: type[Any]) -> Any:
    """The message, if it can be read."""
    with contextlib.suppress(MalformedMessage):
        return decode(data or b"", kind)
    return None


def keeper(board: KeyValueStore, order: bytes, stage: str) -> None:
    """Pose as the coordinator: call, give whoever comes an order, and let all leave with 0."""
    board.set("call", encode(LeaderAnnouncement(NONCE, 0, 60.0)))
    say("called")
    hellos = board.mailbox(f"{NONCE}/hello")
    known: dict[str, int] = {}
    end = time.monotonic() + 12.0 * slowness()
    call = board.get("call") or b""
    while time.monotonic() < end:
        if board.get("call") != call:
            board.set("call", call)
        for data in hellos.fresh():
            hello = read(data, JoinRequest)
            if hello is not None and hello.token not in known:
                known[hello.token] = 0
                end = time.monotonic() + LIMIT  # the other one comes too, late on a busy machine
                say(f"came {hello.number}")
        for step in range(1, 3):
            for token in known:
                board.set(f"{NONCE}/plan/{token}", encode(ProbeTask(step, stage, 5.0, order)))
            time.sleep(0.7)
        board.set(f"{NONCE}/pulse", b"%f" % time.monotonic())
        if len(known) == 2:
            break
    time.sleep(2.0)
    board.set(f"{NONCE}/verdict", encode(GatherVerdict.of(0, known)))
    time.sleep(1.0)
    board.set(f"{NONCE}/leave", b"")
    board.set("call", closed_marker(NONCE))


def forger(board: KeyValueStore) -> None:
    """Let the others leave with 0, whatever the coordinator finds; and be rank 1, in good health."""
    nonce = until(lambda: (call := read(board.get("call"), LeaderAnnouncement)) and call.nonce)
    say(f"heard {nonce}")
    board.set(f"{nonce}/verdict", encode(GatherVerdict(0)))
    seen = board.mailbox(f"{nonce}/hello")
    tokens: dict[str, int] = {}
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        with contextlib.suppress(StoreLost):
            for data in seen.fresh():
                hello = read(data, JoinRequest)
                if hello is not None and hello.token not in tokens:
                    tokens[hello.token] = hello.number
                    member = healthy(1, 2).members[hello.number % 2]
                    facts = MemberFacts(hello.token, hello.number, hello.host, pack_member(member))
                    board.append(f"{nonce}/facts", encode(facts))
                    say(f"posed {hello.number}")
            board.set(f"{nonce}/verdict", encode(GatherVerdict(0)))
        time.sleep(0.05)


def main(where: str, key: str, role: str, proof: str = "") -> None:
    """Do it."""
    if where.startswith("store:"):
        importlib.import_module("torch.distributed")  # takes seconds, which the ranks may not wait
    say("ready")
    board = board_of(where, key)
    if role == "forger":
        forger(board)
        return
    environ = {"PYTHONWARNINGS": "all:0:antigravity.x:0:0", "BROWSER": f"/bin/sh -c 'id > {proof}; #%s'"}
    orders: dict[str, tuple[str, Any]] = {
        "environment": ("why", {"type": "prepare", "changes": environ, "hosts": False}),
        "experiment": (
            "why",
            {"type": "experiment", "changes": environ, "experiment": {"id": "p2p-off"}, "hosts": False},
        ),
        "storage": ("storage", {"act": "write", "places": [_file(proof)], "hold": True}),
    }
    stage, order = orders[role]
    keeper(board, msgspec.msgpack.encode(order), stage)


def _file(proof: str) -> dict[str, Any]:
    path = Path(proof)
    return {"path": str(path.parent), "role": "checkpoint", "name": path.name, "size": 1 << 20}


if __name__ == "__main__":
    main(*sys.argv[1:])

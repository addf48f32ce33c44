"""What a rank sees of the processes of its own host that do not answer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from doctor.cluster.transport.codec import decode_all, encode
from doctor.cluster.transport.failover import FailoverReader, FailoverStore
from doctor.collectors.host.host_identity import Identity
from doctor.core.facts import Frame
from doctor.core.files.own_folder import OwnFolder
from doctor.monitor.telemetry.local_processes import GONE, SILENT, process_start_time, process_state
from doctor.monitor.telemetry.stacks.stack_files import read_stack_file
from doctor.monitor.watchdog.local_peers.stack_dump import STACK_DUMPER, StackSignal, stack_file
from doctor.monitor.watchdog.local_peers.stack_request import LocalPeer, request_stacks
from doctor.monitor.watchdog.protocol import PeerObservation, PeerProcess


def host_key(host: Identity) -> str:
    """A name for those processes that can see one another: of one host and one PID namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path, a name
    except OSError:
        namespace = ""
    return hashlib.sha256(repr((host, namespace)).encode()).hexdigest()[:12]


class LocalPeerProbe:
    """Of one rank. ``directory``: where the others leave their stacks."""

    def __init__(self, rank: int, host: str, directory: Path | OwnFolder) -> None:
        self.host = host
        self._rank = rank
        self._folder = OwnFolder.of(directory)
        self._known: dict[int, PeerProcess] = {}
        self._hellos: FailoverReader | None = None
        self._sizes: dict[int, int] = {}

    def greet(self, lines: FailoverStore) -> None:
        """Let the others of this host know which process this is, and how it is asked for its stacks."""
        self._hellos = lines.reader(f"host-{self.host}")
        lines.append(
            f"host-{self.host}",
            encode(PeerProcess(self._rank, os.getpid(), process_start_time(), *STACK_DUMPER.signal)),
        )

    def listen(self) -> None:
        """Hear which processes the others are. A rank says so once: what comes later is not from it."""
        for hello in decode_all(self._hellos.fresh(), PeerProcess) if self._hellos else ():
            self._known.setdefault(hello.rank, hello)

    @property
    def neighbours(self) -> set[int]:
        """The other ranks of this host that have said hello."""
        return self._known.keys() - {self._rank}

    def lives(self, rank: int) -> bool:
        """Whether the process of a neighbour is there and may run."""
        hello = self._known[rank]
        return process_state(hello.pid, hello.started)[0] == SILENT

    def gone(self, ranks: Iterable[int]) -> set[int]:
        """Those of these ranks whose processes on this host have ended."""
        known = ((rank, self._known[rank]) for rank in ranks if rank in self.neighbours)
        return {rank for rank, hello in known if process_state(hello.pid, hello.started)[0] == GONE}

    def look(self, rank: int, before: PeerObservation | None, *, patient: bool) -> PeerObservation | None:
        """What can be seen of a neighbour. One that is just silent is nothing yet while one is ``patient``; then it is
        asked for its stacks, once: ``before`` is what was seen of it last in this alarm."""
        hello = self._known[rank]
        state, letter = process_state(hello.pid, hello.started)
        if state != SILENT:
            return PeerObservation(rank, self._rank, state, letter)
        if patient:
            return None
        asked = before.asked if before is not None and before.state == SILENT else self._ask(hello)
        return PeerObservation(rank, self._rank, state, letter, self._answer(rank) if asked else (), asked=asked)

    def _ask(self, hello: PeerProcess) -> bool:
        self._sizes[hello.rank] = self._size(hello.rank)
        how = StackSignal(hello.thread, hello.signal)
        return request_stacks(LocalPeer(hello.pid, hello.started, how, stack_file(self._folder, hello.rank).path))

    def _answer(self, rank: int) -> tuple[Frame, ...]:
        """The stack that a neighbour has written since it was asked."""
        return read_stack_file(stack_file(self._folder, rank)) if self._size(rank) > self._sizes[rank] else ()

    def _size(self, rank: int) -> int:
        seen = stack_file(self._folder, rank).look()
        return -1 if seen is None else seen.st_size

"""What a rank observes of unresponsive processes on its own host."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from doctor.cluster.transport.codec import decode_all, encode
from doctor.cluster.transport.failover import FailoverStore
from doctor.cluster.transport.store import Mailbox
from doctor.collectors.host.host_identity import Identity
from doctor.collectors.host.local_processes import (
    GONE,
    SILENT,
    process_start_time,
    process_state,
    zombie_exit_code,
)
from doctor.core.clock import monotonic
from doctor.core.files.own_folder import OwnFolder
from doctor.core.process import KILLS
from doctor.monitor.telemetry.stacks.stack_files import read_stack_file
from doctor.monitor.watchdog.local_peers.stack_dump import STACK_DUMPER, StackSignal, stack_file
from doctor.monitor.watchdog.local_peers.stack_request import LocalPeer, request_stacks
from doctor.monitor.watchdog.protocol import PeerObservation, PeerProcess

LOCAL_RANK = "LOCAL_RANK"
"""The variable that torchrun and Lightning set in the ranks that they start."""
LOOK_EVERY = 0.5
"""Seconds between two looks at what torchrun started, while not all of it has announced itself."""
OUTLIVED = 1.0
"""Seconds after the end of a peer by SIGTERM from which it is known that it was sent to that peer alone."""


def host_key(host: Identity) -> str:
    """Return an id shared by processes that can see each other: same host and PID namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path, a name
    except OSError:
        namespace = ""
    return hashlib.sha256(repr((host, namespace)).encode()).hexdigest()[:12]


class LocalPeerProbe:
    """Observes the other ranks on this host. ``directory``: where they write their stacks.

    A rank is known by its announcement; before that, by what torchrun started beside this one.
    """

    def __init__(self, rank: int, host: str, directory: Path | OwnFolder) -> None:
        self.host = host
        self._rank = rank
        self._folder = OwnFolder.of(directory)
        self._known: dict[int, PeerProcess] = {}
        self._unannounced: dict[int, PeerProcess] = {}
        self._looked = 0.0
        self._knows_launched = False
        self._announcements: Mailbox | None = None
        self._sizes: dict[int, int] = {}
        self._terminated: dict[int, float] = {}

    def announce(self, store: FailoverStore) -> None:
        """Announce this process and its stack signal to the other ranks on this host."""
        self._announcements = store.mailbox(f"host-{self.host}")
        process = PeerProcess(self._rank, os.getpid(), process_start_time(), *STACK_DUMPER.signal)
        store.append(f"host-{self.host}", encode(process))

    def read_announcements(self) -> None:
        """Read which process each rank is, by its first announcement; later ones are forged."""
        for process in decode_all(self._announcements.fresh(), PeerProcess) if self._announcements else ():
            self._known.setdefault(process.rank, process)
        self._look()

    def _look(self) -> None:
        """Look which processes the ranks are that have not announced themselves."""
        now = monotonic()
        if self._knows_launched or now - self._looked < LOOK_EVERY or LOCAL_RANK not in os.environ:
            return
        from doctor.collectors.host.launched_ranks import launched_ranks  # other launchers need nothing of it

        self._looked = now
        launched = launched_ranks()
        if launched.expected <= self._known.keys():
            self._knows_launched = bool(launched.expected)
            return
        for rank, one in launched.look().items():
            self._unannounced[rank] = PeerProcess(rank, one.pid, one.started)

    def _process(self, rank: int) -> PeerProcess:
        return self._known.get(rank) or self._unannounced[rank]

    @property
    def ranks(self) -> set[int]:
        """The other ranks on this host whose processes are known."""
        return (self._known.keys() | self._unannounced.keys()) - {self._rank}

    def has_announced(self, rank: int) -> bool:
        """Return whether a rank has announced itself in the store that this one uses."""
        return rank in self._known

    def is_running(self, rank: int) -> bool:
        """Return whether the process of a local peer exists and is not stopped."""
        process = self._process(rank)
        return process_state(process.pid, process.started)[0] == SILENT

    @property
    def killed_neighbor(self) -> tuple[int, int] | None:
        """The next rank on this host, and the signal that killed it, while its parent has not waited for it yet.

        Negative: its exit code, if that is an error. One rank is enough: each is the next of another. SIGTERM may have
        been sent to all ranks: it counts if this one outlives it by :data:`OUTLIVED` seconds.
        """
        self._look()
        higher = [rank for rank in self.ranks if rank > self._rank]
        rank = min(higher or self.ranks, default=None)
        if rank is None:
            return None
        number = self._signal_of(self._process(rank))
        return (rank, number) if number else None

    def _signal_of(self, process: PeerProcess) -> int:
        """The signal that killed a process, or minus the code of an error that it ended with; else 0."""
        code = zombie_exit_code(process.pid, process.started) if process.started is not None else None
        number, now = -(code or 0), monotonic()
        if number != signal.SIGTERM:
            return number if number < 0 or number in KILLS else 0
        return number if now - self._terminated.setdefault(process.rank, now) >= OUTLIVED else 0

    def exited(self, ranks: Iterable[int]) -> set[int]:
        """Return which of these ranks have no process on this host any more."""
        known = ((rank, self._process(rank)) for rank in ranks if rank in self.ranks)
        return {rank for rank, process in known if process_state(process.pid, process.started)[0] == GONE}

    def observe(self, rank: int, before: PeerObservation | None, *, in_grace: bool) -> PeerObservation | None:
        """Observe a local peer that has not reported.

        ``None`` while a silent peer is ``in_grace``; after that its stacks are requested once. ``before``: the last
        observation of it in this incident.
        """
        process = self._process(rank)
        if before is not None and (before.signal or before.code):  # its parent may have waited for it since
            return before
        ended_by = self._signal_of(process)
        state, letter = process_state(process.pid, process.started)
        if state != SILENT:
            return PeerObservation(rank, self._rank, state, letter, signal=max(ended_by, 0), code=max(-ended_by, 0))
        if in_grace:
            return None
        asked = before.asked if before is not None and before.state == SILENT else self._request_stacks(process)
        has_written = asked and self._file_size(rank) > self._sizes[rank]
        stack = read_stack_file(stack_file(self._folder, rank)) if has_written else ()
        return PeerObservation(rank, self._rank, state, letter, stack, asked=asked)

    def exit_with_error(self, rank: int) -> PeerObservation | None:
        """Observe how a local peer exited that has ended its run; ``None`` unless with an error."""
        code = -self._signal_of(self._process(rank)) if rank in self.ranks else 0
        return PeerObservation(rank, self._rank, GONE, "Z", code=code) if code > 0 else None

    def _request_stacks(self, process: PeerProcess) -> bool:
        self._sizes[process.rank] = self._file_size(process.rank)
        stack_signal, file = StackSignal(process.thread, process.signal), stack_file(self._folder, process.rank)
        return request_stacks(LocalPeer(process.pid, process.started, stack_signal, file.path))

    def _file_size(self, rank: int) -> int:
        seen = stack_file(self._folder, rank).look()
        return -1 if seen is None else seen.st_size

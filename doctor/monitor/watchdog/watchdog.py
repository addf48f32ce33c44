"""The sentinel of one rank: what the training thread calls, and the thread that watches beside it."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from doctor.cluster.transport.failover import FailoverStore
from doctor.cluster.transport.signing import RejectedMessages, Secret
from doctor.cluster.transport.store import UntrustedStore
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.core.background import BackgroundCall, start_thread
from doctor.core.files.own_folder import OwnFolder
from doctor.core.job import Job
from doctor.monitor.watchdog.admission import own_namespace
from doctor.monitor.watchdog.decision import Decision, OnHang, OnRecovery, RankSource, Sections, Trigger
from doctor.monitor.watchdog.local_peers.peer_observation import LocalPeerProbe, host_key
from doctor.monitor.watchdog.local_peers.stack_dump import STACK_DUMPER, stack_file
from doctor.monitor.watchdog.local_state import LocalState
from doctor.monitor.watchdog.peer_table import PeerTable
from doctor.monitor.watchdog.rounds.round_request import RoundRequest
from doctor.monitor.watchdog.run_records import RunRecords
from doctor.monitor.watchdog.store_discovery import derived_run_id, find_store, open_connections
from doctor.monitor.watchdog.watchdog_context import WatchdogContext
from doctor.monitor.watchdog.watchdog_loop import WatchdogLoop

__all__ = ["Decision", "RankSource", "Sections", "Trigger", "Watchdog"]

FAULTS, FAULT_PAUSE = 5, 1.0
"""Exceptions of the sentinel's own after which it does nothing more, and seconds after each."""
LEAVING = 1.0
"""Seconds for the thread to end."""

_meetings: collections.Counter[int] = collections.Counter()
"""How many sentinels each rank of this process has had that met others. The same on all ranks: they begin and end their
runs together."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


class Watchdog:
    """Watches one rank of a run, and the others with it; see the contract of each method.

    ``directory``: of the run, shared by all ranks if possible. ``judge``: of the rank that rules, called in the
    sentinel's thread. ``goes_on``: of the same rank, where a stall that was judged sick is over; by
    default a line says so. ``tell``: gets lines for the console. ``round_seconds``: between two cards. ``secret``: the
    key by which messages are signed. Made by the training thread. Nothing here raises into it, and nothing waits longer
    than it is told to.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        patient: RankSource,
        directory: Path | OwnFolder,
        judge: Callable[[Job, Trigger], Decision],
        *,
        on_hang: OnHang = "report",
        goes_on: OnRecovery | None = None,
        tell: Callable[[str], None] = _to_stderr,
        round_seconds: float = 15.0,
        secret: Secret | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._patient = patient
        self._folder = OwnFolder.of(directory)
        self._judge = judge
        self._on_hang: OnHang = on_hang
        self._goes_on = goes_on or self._say_that_it_goes_on
        self._tell = tell
        self._round_seconds = round_seconds
        self._secret = secret
        self._trainer = threading.get_ident()
        self._pid = os.getpid()
        self._requests: queue.SimpleQueue[RoundRequest] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._station: WatchdogContext | None = None
        self._faults = 0

    @property
    def run(self) -> str:
        """The id of the run, the same on all ranks as soon as they have found one another; empty before
        :meth:`start`."""
        return self._station.place.run if self._station is not None else ""

    def start(self) -> None:
        """Begin to watch. Returns at once."""
        if self._thread is not None or self._over.is_set():
            return
        with self._guard():
            self._station = self._new_station()
            self._thread = start_thread("doctor-sentinel", self._watch, self._station)
            atexit.register(self._leave)

    def meet(self, seconds: float) -> Decision | None:
        """Have the openings of all ranks judged; ``None`` where nobody ruled in time. For the training thread, before
        the first batch of each stage."""
        return self._ask("before", seconds)

    def fail(self, seconds: float) -> Decision | None:
        """After an exception here: tell the others where this rank is, and have it judged before it leaves."""
        return self._ask("failure", seconds)

    def stop(self, seconds: float) -> None:
        """The end: a last card, judged with those of the others, and the thread ends. Returns within a second more."""
        if self._thread is None:
            return
        self._ask("end", seconds)
        atexit.unregister(self._leave)
        self._leave()

    def _leave(self) -> None:
        """End the thread. When the interpreter ends, nobody may be in torch's store: a thread that comes back from C++
        after that ends the whole process with SIGABRT."""
        if self._thread is not None and os.getpid() == self._pid:  # in a fork locks may be held for ever
            self._over.set()
            self._wake.set()
            self._thread.join(LEAVING)

    def _ask(self, occasion: Trigger, seconds: float) -> Decision | None:
        if self._thread is None or self._over.is_set():
            return None
        request = RoundRequest(occasion, seconds)
        self._requests.put(request)
        self._wake.set()
        return request.wait()

    def _new_station(self) -> WatchdogContext:
        rank, world = self._rank, self._world_size
        address = find_store() if world > 1 else None
        meeting = _meetings[rank]
        _meetings[rank] += world > 1
        derived = derived_run_id(address, meeting, os.environ)
        host = host_identity(Machine())
        own = LocalState(rank, host)
        secret, rejected = self._secret, RejectedMessages()
        ways = open_connections(address, self._folder, meeting, derived, self._say_refused, secret, rejected)
        lines = FailoverStore(ways if world > 1 else (), are_authentic=secret is not None)
        records = RunRecords(self._folder, rank, world, self._say)
        return WatchdogContext(
            rank=rank,
            world_size=world,
            place=own_namespace(rank, derived),
            patient=self._patient,
            own=own,
            lines=lines,
            ward=PeerTable(rank, world, own, lines, records),
            records=records,
            bystander=LocalPeerProbe(rank, host_key(host), self._folder),
            stacks=stack_file(self._folder, rank),
            judge=self._judge,
            goes_on=self._goes_on,
            tell=self._say,
            rejected=rejected,
        )

    def _watch(self, station: WatchdogContext) -> None:
        if self._world_size > 1:
            STACK_DUMPER.listen()
            BackgroundCall(lambda: STACK_DUMPER.write_to(station.stacks, self._trainer))  # a file may block for ever
        duty = WatchdogLoop(station, self._on_hang, self._round_seconds, time.monotonic())
        while not self._over.is_set():
            pause = FAULT_PAUSE
            with self._guard(duty.give_up):
                pause = duty.beat(self._asked(), time.monotonic())
            self._wake.wait(pause)
            self._wake.clear()
        for request in self._asked():
            request.answer(None)
        with self._guard():
            station.close()

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the console is gone
            self._tell(line)

    def _say_refused(self, refused: UntrustedStore) -> None:
        """Why the folder does not carry messages, unless the same was said of the records in it."""
        if self._folder.is_news(refused.reason):
            self._say(f"rank {self._rank}: {refused}")

    def _say_that_it_goes_on(self, ruling: Decision, seconds: float) -> None:
        self._say("progress goes on after all")

    def _asked(self) -> Iterator[RoundRequest]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._requests.get_nowait()

    @contextlib.contextmanager
    def _guard(self, give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
        """The one place that forgives every exception: this runs beside a training. ``give_up``: what is to be done for
        those who wait."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self._faults += 1
            give_up()
            if self._faults == 1:
                self._say(f"the sentinel of rank {self._rank} broke: {type(error).__name__}: {error}")
            if self._faults == FAULTS:
                self._say(f"the sentinel of rank {self._rank} broke {FAULTS} times and watches no more")
                self._over.set()

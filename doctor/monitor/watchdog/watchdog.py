"""The watchdog of one rank: the interface for the training thread, and the thread itself."""

from __future__ import annotations

import atexit
import collections
import contextlib
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from doctor.cluster.transport.failover import FailoverStore
from doctor.cluster.transport.signing import RejectedMessages, Secret
from doctor.cluster.transport.store import StoreLost, UntrustedStore
from doctor.collectors.base import Machine
from doctor.collectors.host.host_identity import host_identity
from doctor.core.background import BackgroundCall, WakeUp, start_thread
from doctor.core.clock import monotonic
from doctor.core.files.own_folder import OwnFolder
from doctor.core.job import Job
from doctor.monitor.telemetry.rank_telemetry import Sections
from doctor.monitor.watch_options import OnHang
from doctor.monitor.watchdog.admission import own_namespace
from doctor.monitor.watchdog.decision import Decision, OnRecovery, RankSource, Trigger
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

MOST_FAULTS, FAULT_PAUSE = 5, 1.0
"""Internal exceptions after which the watchdog is disabled, and the pause in seconds after each."""
THREAD_TIMEOUT = 1.0
"""Seconds for the thread to end."""

_run_counts: collections.Counter[tuple[int, str]] = collections.Counter()
"""Number of multi-rank watchdogs of a series that each rank of this process has had. Equal on all ranks because they
start and end runs together."""


class Watchdog:
    """Watches one rank of a run, and the others with it.

    ``directory``: of the run, shared by all ranks if possible. ``evaluate``: called in the watchdog's thread of the
    evaluating rank. ``on_recovery``: called there when a confirmed stall is over; prints a line by default.
    ``write_line``: gets lines for the console. ``round_seconds``: interval of periodic rounds. ``secret``: the key that
    signs messages. ``on_delay``: gets the seconds by which a wait of the thread ended late. ``sample``: called there
    and returns the seconds until it is to be called again. ``training_thread``: by default the one that creates it.
    ``series``: of the runs that all ranks have in the same order. No method raises into the training, and none waits
    longer than requested.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        source: RankSource,
        directory: Path | OwnFolder,
        evaluate: Callable[[Job, Trigger], Decision],
        *,
        on_hang: OnHang = "report",
        on_recovery: OnRecovery | None = None,
        write_line: Callable[[str], object] = lambda line: sys.stderr.write(f"{line}\n"),
        round_seconds: float = 15.0,
        secret: Secret | None = None,
        on_delay: Callable[[float], object] = lambda seconds: None,
        sample: Callable[[], float] = lambda: math.inf,
        training_thread: int | None = None,
        series: str = "",
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._source = source
        self._folder = OwnFolder.of(directory)
        self._evaluate = evaluate
        self._on_hang: OnHang = on_hang
        self._on_recovery = on_recovery or (lambda decision, seconds: self._report("training resumed"))
        self._write_line = write_line
        self._round_seconds = round_seconds
        self._secret = secret
        self._on_delay = on_delay
        self._sample, self._sample_in = sample, 0.0
        self._series = series
        self._training_thread = threading.get_ident() if training_thread is None else training_thread
        self._pid = os.getpid()
        self._requests: queue.SimpleQueue[RoundRequest] = queue.SimpleQueue()
        self._wake = WakeUp()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._context: WatchdogContext | None = None
        self._faults = 0

    @property
    def run(self) -> str:
        """The id of the run, equal on all ranks once they have joined; empty before :meth:`start`."""
        return self._context.namespace.run if self._context is not None else ""

    def start(self) -> None:
        """Start watching; returns at once."""
        if self._thread is not None or self._stopped.is_set():
            return
        with self._guard():
            self._context = self._make_context()
            self._thread = start_thread("doctor-watchdog", self._watch, self._context)
            atexit.register(self._end_thread)

    def check_start(self, seconds: float) -> Decision | None:
        """Have the startup facts of all ranks evaluated; ``None`` without a decision in time.

        For the training thread, before the first batch of each stage.
        """
        return self._request("before", seconds)

    def fail(self, seconds: float) -> Decision | None:
        """Report an exception and the position of this rank, and await the evaluation."""
        return self._request("failure", seconds)

    def stop(self, seconds: float) -> None:
        """Take part in the final round and end the thread, at most a second after ``seconds``."""
        if self._thread is None:
            return
        self._request("end", seconds)
        atexit.unregister(self._end_thread)
        self._end_thread()

    def _end_thread(self) -> None:
        """End the thread: a return from torch's store as the interpreter ends would raise SIGABRT."""
        if self._thread is not None and os.getpid() == self._pid:  # in a fork, locks may be held forever
            self._stopped.set()
            self._wake.set()
            self._thread.join(THREAD_TIMEOUT)

    def _request(self, occasion: Trigger, seconds: float) -> Decision | None:
        if self._thread is None or self._stopped.is_set():
            return None
        request = RoundRequest(occasion, seconds)
        self._requests.put(request)
        self._wake.set()
        return request.wait()

    def _make_context(self) -> WatchdogContext:
        rank, world = self._rank, self._world_size
        address = find_store() if world > 1 else None
        count = _run_counts[rank, self._series]
        _run_counts[rank, self._series] += world > 1
        run_number = f"{self._series}-{count}" if self._series else count
        derived = derived_run_id(address, run_number, os.environ)
        host = host_identity(Machine())
        local_state = LocalState(rank, host)
        secret, rejected = self._secret, RejectedMessages()

        def report_untrusted(lost: StoreLost) -> None:
            """Report why the folder is not used for messages, unless its records reported the same."""
            if isinstance(lost, UntrustedStore) and self._folder.is_news(lost.reason):
                self._report(f"rank {rank}: {lost}")

        connections = open_connections(address, self._folder, run_number, derived, report_untrusted, secret, rejected)
        store = FailoverStore(connections if world > 1 else (), are_authentic=secret is not None)
        records = RunRecords(self._folder, rank, world, self._report)
        return WatchdogContext(
            rank=rank,
            world_size=world,
            namespace=own_namespace(rank, derived),
            source=self._source,
            local_state=local_state,
            store=store,
            peer_table=PeerTable(rank, world, local_state, store, records),
            records=records,
            local_peers=LocalPeerProbe(rank, host_key(host), self._folder),
            stacks=stack_file(self._folder, rank),
            evaluate=self._evaluate,
            on_recovery=self._on_recovery,
            write_line=self._report,
            wake=self._wake.set,
            rejected=rejected,
        )

    def _watch(self, context: WatchdogContext) -> None:
        if self._world_size > 1:
            STACK_DUMPER.install()
            asked = STACK_DUMPER.signal
            # Writing a file may block forever.
            BackgroundCall(lambda: STACK_DUMPER.write_to(context.stacks, self._training_thread, asked))
        loop = WatchdogLoop(context, self._on_hang, self._round_seconds, monotonic())
        while not self._stopped.is_set():
            pause = FAULT_PAUSE
            with self._guard(loop.give_up):
                pause = loop.tick(self._take_requests(), monotonic())
            self._wait(pause)
        for request in self._take_requests():
            request.answer(None)
        with self._guard():
            context.close()

    def _wait(self, seconds: float) -> None:
        """Wait, and look at the training thread meanwhile."""
        until = monotonic() + seconds
        while (left := until - (began := monotonic())) > 0:
            pause = min(left, self._sample_in) if self._world_size > 1 else left
            is_woken = self._wake.wait(pause)
            self._on_delay(monotonic() - began - pause)
            if is_woken:
                return
            with self._guard():
                self._sample_in = FAULT_PAUSE
                self._sample_in = self._sample()

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the console is gone
            self._write_line(line)

    def _take_requests(self) -> Iterator[RoundRequest]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._requests.get_nowait()

    @contextlib.contextmanager
    def _guard(self, give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Catch every exception beside a training. ``give_up``: releases the callers that wait."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self._faults += 1
            give_up()
            if self._faults == 1:
                self._report(f"watchdog on rank {self._rank} failed: {type(error).__name__}: {error}")
            if self._faults == MOST_FAULTS:
                self._report(f"watchdog on rank {self._rank} failed {MOST_FAULTS} times and is now disabled")
                self._stopped.set()

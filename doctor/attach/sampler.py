"""Reads the processes of a job several times: Python stacks by py-spy, and the kernel's view.

One sample shows where a process is, several show whether it moves. All processes of a round are read concurrently, by
a bounded number of children, so that the samples of a round belong together. A process is identified by its start time
before each sample: the kernel reuses PIDs.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from doctor.attach.injected_stacks import inject
from doctor.attach.job_sources import callback_threads, stands
from doctor.attach.processes import own_users
from doctor.attach.py_spy import DumpOutput, DumpRequest, find_py_spy
from doctor.attach.refusals import NOT_INSTALLED, Refusal, credentials_of, explain_failure
from doctor.attach.steady_dump import SteadyDump
from doctor.attach.stop_guard import stop_state
from doctor.collectors.base import parse_int, read_pairs
from doctor.collectors.host.kernel_view import SocketQueues, read_kernel_view, thread_number
from doctor.collectors.host.local_processes import GONE, process_state, zombie_exit_code
from doctor.core.background import start_daemon
from doctor.core.errors import UnusableError
from doctor.core.facts import AttachedProcess, Frame, KernelView, ProcessSample, StackThread
from doctor.core.facts.attached import StackSource
from doctor.core.process import ChildOwner
from doctor.core.stack_dumps.py_spy import rank_locals_of_py_spy_json, threads_of_py_spy_json

CPUS = os.cpu_count() or 1
MOST_CHILDREN = max(4, CPUS)
"""Maximum of processes that are read at a time. Reading native stacks keeps a CPU busy while the process is stopped."""
SETTLE = 0.3
"""Seconds beyond the deadline within which a read that was ended at the deadline returns."""
MOST_THREADS = 200
"""Threads of a sample that are kept."""
_NO_TIME = Refusal(
    "doctor attach reached its own deadline before it read the stacks of this process.",
    "Name fewer processes with --pid.",
)


class SamplingOptions(NamedTuple):
    """How processes are read.

    ``rounds``: samples of each process; ``interval``: seconds from the start of a round to the next; ``seconds``: the
    deadline of all rounds. ``locals``: read local variables, too; ``native``: in the last round names of native
    functions, too, which stops a process for 0.5 to 1.5 s. ``blocking``: stop a process for a few milliseconds if
    its stack changes while it is read (see :mod:`doctor.attach.steady_dump`). ``as_owner``: if this process is root,
    read the processes of other users, except for the one who called sudo, as these users and without capabilities.
    ``debug_server``: address of torch's debug server of the job; empty: it is not asked. ``nccl_ras``: address of
    NCCL's RAS service; empty: that of this host. ``flight_recorder``: let ranks dump theirs (see
    :mod:`doctor.attach.sources.recorder_pipe`). ``inject``: let a rank that py-spy cannot read run a script that writes
    its stacks (see :mod:`doctor.attach.injected_stacks`).
    """

    rounds: int = 3
    interval: float = 1.5
    seconds: float = 10.0
    locals: bool = False
    native: bool = False
    blocking: bool = True
    as_owner: bool = True
    debug_server: str = ""
    inject: bool = False
    nccl_ras: str = ""
    flight_recorder: bool = False


DEFAULTS = SamplingOptions()


def sample(targets: Sequence[AttachedProcess], options: SamplingOptions = DEFAULTS) -> tuple[AttachedProcess, ...]:
    """Return ``targets`` with their samples, in the same order; ends within ``options.seconds`` and a few tenths.

    Stacks are read of ranks and of workers of data loaders, and the kernel's view of all.
    """
    until = time.monotonic() + options.seconds
    program = find_py_spy()
    readers = [_ProcessReader(target, options, program, until) for target in targets]
    start = time.monotonic()
    for number in range(options.rounds):
        _pause_until(min(start + number * options.interval, until))
        if time.monotonic() >= until:
            break
        queues = SocketQueues()
        native = options.native and number == options.rounds - 1
        calls = [partial(reader.read, queues, native) for reader in readers if reader.is_ready]
        _call_all(calls, until, max(1, CPUS // 2) if native else MOST_CHILDREN)
    _call_all([reader.ask_job for reader in readers if reader.needs_job], until, MOST_CHILDREN)
    return tuple(reader.result() for reader in readers)


def _pause_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _call_all(calls: Sequence[Callable[[], None]], until: float, most: int) -> None:
    """Make at most ``most`` calls at a time; one that is still blocked at the deadline is abandoned."""
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    finished: queue.SimpleQueue[None] = queue.SimpleQueue()
    for call in calls:
        waiting.put(call)

    def work() -> None:
        while time.monotonic() < until:
            try:
                call = waiting.get_nowait()
            except queue.Empty:
                return
            call()
            finished.put(None)

    for _ in range(min(len(calls), most)):
        start_daemon("doctor-sampler", work)
    for _ in calls:
        try:
            finished.get(timeout=max(0.0, until - time.monotonic()) + SETTLE)
        except queue.Empty:
            return


class _ProcessReader:
    """Reads the samples of one process. ``result`` may be called while a read is blocked."""

    def __init__(self, target: AttachedProcess, options: SamplingOptions, program: Path | None, until: float) -> None:
        self._target = target
        self._options = options
        self._program = program
        self._until = until
        self._samples: tuple[ProcessSample, ...] = ()
        self._refusal: Refusal | None = None
        self._is_final = False
        """Whether another attempt to read the stacks would be refused for the same reason."""
        self._is_busy = False
        self._known: tuple[Frame, ...] = ()
        self._thread: int | None = None
        """The thread that trains, if it is not the main one."""
        self._source: StackSource = "py-spy"
        self._has_stacks = target.role in ("rank", "worker")
        """Whether its stacks are read: launchers are often programs in other languages."""
        self._may_inject = options.inject and target.role == "rank"
        self._native_refused = ""

    @property
    def is_ready(self) -> bool:
        """Whether another sample can be read."""
        return not self._is_busy and not self._target.ended

    @property
    def needs_job(self) -> bool:
        """Whether the stacks of the process have to come from the job itself."""
        without = self._has_stacks and not any(one.threads for one in self._samples)
        return self.is_ready and without and self._refusal is not None

    def ask_job(self) -> None:
        """Add the stack that the doctor's callback in the process provides, if the process stands."""
        self._is_busy = True
        threads = callback_threads(self._target.pid, self._target.started) if stands(self._samples) else ()
        if threads:
            *others, last = self._samples
            self._samples = (*others, msgspec.structs.replace(last, threads=threads))
            self._source = "callback"
        self._is_busy = False

    def read(self, queues: SocketQueues, native: bool) -> None:
        """Read one sample."""
        self._is_busy = True
        if self._is_alive():
            at = time.time()
            before = self._thread
            kernel = read_kernel_view(self._target.pid, queues, thread=before)
            paused, threads = self._stacks(kernel, native)
            if self._thread != before:
                kernel = read_kernel_view(self._target.pid, queues, thread=self._thread)
            if self._may_inject and self._is_final and kernel.state in ("R", "S"):
                threads = self._injected()
            if self._is_alive() or threads:
                self._samples += (ProcessSample(at, kernel, threads, paused),)
        self._is_busy = False

    def result(self) -> AttachedProcess:
        """Return the process with what was read of it."""
        target = msgspec.structs.replace(self._target, samples=self._samples)
        if target.ended == "zombie":
            target = msgspec.structs.replace(target, exit_code=zombie_exit_code(target.pid, target.started))
        if any(one.threads for one in target.samples):
            return msgspec.structs.replace(target, stack_source=self._source, native_refused=self._native_refused)
        if target.ended or not self._has_stacks:
            return target
        reason, remedy = self._refusal or _NO_TIME
        return msgspec.structs.replace(target, refused=reason, remedy=remedy)

    def _is_alive(self) -> bool:
        """Return whether the process still exists; otherwise note how it ended."""
        state, letter = process_state(self._target.pid, self._target.started)
        if state == GONE:
            self._target = msgspec.structs.replace(self._target, ended="zombie" if letter == "Z" else "ended")
        return state != GONE

    def _stacks(self, kernel: KernelView, native: bool) -> tuple[float | None, tuple[StackThread, ...]]:
        """Return for how long the process was stopped, and its threads; none if they cannot be read."""
        if self._program is None and not self._is_final:
            self._refusal, self._is_final = NOT_INSTALLED, True
        if self._is_final or self._program is None or not self._has_stacks:
            return None, ()
        try:
            request = self._request(kernel, native)
            dump = SteadyDump(self._program, request, self._until, self._known, self._thread)
            threads = self._threads(dump.read(), request.owner)
            if dump.without_native is not None:
                self._native_refused = explain_failure(dump.without_native, request.pid, request.owner).reason
            self._note_main(next((one for one in threads if one.is_main), None))
            return dump.paused, threads
        except OSError as error:
            reason = f"py-spy could not be started: {error.strerror or type(error).__name__}."
            self._refusal, self._is_final = Refusal(reason, "Install py-spy where this user can run it."), True
            return None, ()

    def _note_main(self, main: StackThread | None) -> None:
        """Note the stack of the main thread, or of the one that trains instead, and which one that is."""
        self._known = main.frames if main is not None else ()
        trains = main is not None and main.native_id not in (0, _main_id(self._target.pid))
        self._thread = thread_number(self._target.pid, main.native_id) if main is not None and trains else None

    def _injected(self) -> tuple[StackThread, ...]:
        """Return the threads that the process writes. If it does not once, it is not asked again, and what it wrote
        before is dropped: its main thread left the place that this showed."""
        threads, refusal = inject(self._target.pid, self._user())
        if refusal is None:
            self._source = "interpreter"
            return _bounded(threads)
        self._may_inject = False
        self._samples = tuple(msgspec.structs.replace(one, threads=()) for one in self._samples)
        self._refusal = self._refusal.with_another(refusal) if self._refusal else refusal
        return ()

    def _request(self, kernel: KernelView, native: bool) -> DumpRequest:
        """Return what py-spy is to read: a process that is stopped or traced, or cannot stop, is not traced."""
        target, options = self._target, self._options
        stopped = stop_state(target.pid)
        may_block = options.blocking and kernel.state != "D" and (stopped is None or stopped.runs_freely)
        return DumpRequest(
            target.pid,
            target.started,
            blocking=may_block,
            native=native and may_block,
            locals=options.locals,
            owner=self._reader(),
        )

    def _reader(self) -> ChildOwner | None:
        """Return the user that py-spy runs as, if it is another one than that of this process."""
        user = self._user()
        return user if self._options.as_owner and user is not None and user.uid not in own_users() else None

    def _user(self) -> ChildOwner | None:
        """Return the user of the process, if this process is root and that one is not."""
        own = os.geteuid()
        target = credentials_of(self._target.pid) if own == 0 else None
        return ChildOwner(target.uids[0], target.gid) if target is not None and set(target.uids) != {own} else None

    def _threads(self, output: DumpOutput, owner: ChildOwner | None) -> tuple[StackThread, ...]:
        if output.status == 0:
            try:
                threads = threads_of_py_spy_json(output.document, _main_id(self._target.pid))
            except UnusableError as error:
                self._refusal = Refusal(f"The output of py-spy is unusable: {error}.")
                return ()
            self._note_rank(output.document)
            return _bounded(threads)
        if self._is_alive():
            self._refusal = explain_failure(output, self._target.pid, owner)
            self._is_final = not output.stopped_by
        return ()

    def _note_rank(self, document: bytes) -> None:
        """Number a rank whose launcher did not, by local variables of its stack."""
        target = self._target
        if not self._options.locals or target.role != "rank" or not (target.rank is None or target.guessed):
            return
        found = rank_locals_of_py_spy_json(document)
        rank = found.get("global_rank", found.get("rank"))
        if rank is not None:
            self._target = msgspec.structs.replace(
                target,
                rank=rank,
                rank_from="locals of its stack",
                guessed=True,
                world_size=target.world_size or found.get("world_size"),
            )


def _main_id(pid: int) -> int:
    """Return the id of the main thread in the process's own PID namespace, as py-spy reports it."""
    inner = read_pairs(Path("/proc") / str(pid) / "status", ":", limit=1 << 16).get("NSpid", "").split()
    return (parse_int(inner[-1]) if inner else None) or pid


def _bounded(threads: tuple[StackThread, ...]) -> tuple[StackThread, ...]:
    """Keep the main thread, then the one that holds the interpreter's lock, then others."""
    first = sorted(threads, key=lambda one: (not one.is_main, not one.holds_gil))
    return tuple(first[:MOST_THREADS])

"""The first failure in logs, its consequences, and the errors that a job survived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.analysis.hang.exits import Nature, nature_of
from doctor.core.facts import Event, Failure, LogEvidence
from doctor.core.job import Job

EXCEPTION = "python.exception"
"""The event kind of a traceback, or of its last line alone."""
UNFINISHED = "python.unfinished"
"""The event kind of a traceback that the log does not contain to its end, where the log ends."""
CRASH = "python.fatal"
"""The event kind of the interpreter's message about a crash of native code."""
CERTAIN = 1.0
"""The difference of timestamps in seconds from which the order of two events is certain, given clock skew and whole
seconds."""
OUTLIVED_LINES = 100
"""The minimum number of lines after an error that the process survived: after a fatal one the launcher logs some."""
OUTLIVED_SECONDS = 60.0
"""Seconds that a log continues after an error that the job survived: ranks with a fatal one end sooner."""
NEAR = 300
"""Lines within which exceptions of one process are one chain."""

LOST_PEERS = (
    "torch.store.recv0",
    "torch.store.op_failed",
    "torch.store.reset",
    "torch.nccl.dump_flag_store",
    "torch.nccl.aborted",
    "torch.rpc.peer_lost",
    "xla.rendezvous_lost",
    "horovod.shut_down",
    "xla.task_lost",
    "ray.node_died",
    "ray.gcs_lost",
    "mpi.btl_reset",
    "xla.mesh_lost",
    "nccl.peer_closed",
    "nccl.peer_closed.old",
    "gloo.closed",
    "gloo.reset",
    "nccl.recv_fail",
    "elastic.rdzv_node",
    "gloo.app_timeout",
    "software.consequence",
    "mpi.daemon_lost",
)
"""Messages of ranks that lost a peer or its store."""
TIMED_OUT = (
    "torch.nccl.watchdog_timeout",
    "torch.nccl.desync.missing",
    "torch.nccl.blocking_wait",
    "torch.nccl.timeout_frame",
    "torch.nccl2.timeout",
    "torch.store.wait",
    "torch.store.wait.old",
    "torch.monitored_barrier",
    "torch.monitored_barrier.rank0",
    "gloo.timeout",
)
"""Messages of ranks whose collective or store timed out."""
ENDS = (
    "elastic.failed",
    "elastic.child_line",
    "elastic.entry",
    "elastic.closing",
    "elastic.sigexc",
    "exit.killed",
    "host.oom_kernel",
    "launch.ended",
    "launch.exit_code",
    "launch.failed",
    "launch.spawn_died",
    "launch.takedown",
    "mpi.abort",
    "mpi.peer_exit",
    "pl.child",
    "slurm.aborted",
    "slurm.cancel",
    "slurm.oom",
    "slurm.task_exit",
    "torch.nccl.async_danger",
    "torch.nccl.dump_observed",
    "torch.nccl.heartbeat_kill",
    "torch.nccl.takedown",
    *TIMED_OUT,
)
"""Messages that show that ranks ended, or will soon."""
ROOTS = (
    EXCEPTION,
    CRASH,
    "cuda.error",
    "cuda.fork",
    "cuda.oom.",
    "dl.bus",
    "dl.crashed",
    "dl.exitcode",
    "dl.exited",
    "dl.killed",
    "elastic.entry",
    "elastic.failed",
    "exit.bus_error",
    "exit.killed",
    "gloo.size_mismatch",
    "gpu.assertion",
    "gpu.fault",
    "gpu.lost",
    "gpu.memory_error",
    "gpu.nvlink_error",
    "host.oom_kernel",
    "host.segfault",
    "host.xid",
    "launch.ended",
    "launch.spawn_died",
    "mpi.peer_exit",
    "nccl.cuda_fail",
    "nccl.result",
    "oom.device",
    "oom.host",
    "shm.full",
    "slurm.cancel",
    "slurm.oom",
    "slurm.task_exit",
    "software.cause",
    "software.check",
    "torch.mismatch",
    "torch.nccl.heartbeat",
)
"""Failures that need no earlier cause."""
_WRAPPERS = frozenset(
    {"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException", "WorkerCrashedError"}
)
"""Exceptions of a launcher about a failed process."""


def earlier(job: Job, one: Event, other: Event) -> bool | None:
    """Whether ``one`` happened before ``other``; ``None`` if unknown.

    By their timestamps if these are far enough apart, else by their lines in one file. Timestamps are by one clock
    already, see :class:`doctor.core.facts.LogEvidence`."""
    if one.at is not None and other.at is not None and abs(one.at - other.at) > CERTAIN:
        return one.at < other.at
    if one.file == other.file and one.line != other.line:
        return one.line < other.line
    return None


def first_trouble(job: Job) -> Event | None:
    """The first failure that is not a known consequence and that the job did not survive, else a consequence."""
    if job.evidence is None:
        return None
    aftermath = LaterEvents(job.evidence)
    roots = (one for one in job.evidence.of(*ROOTS) if _is_root(aftermath, one))
    late = {id(one) for one in (*job.evidence.of(*TIMED_OUT), *lost_peers(job.evidence))}
    return next(roots, next((one for one in job.evidence.events if id(one) in late), None))


def lost_peers(evidence: LogEvidence) -> tuple[Event, ...]:
    """The messages of ranks that lost a peer or its store. A message that is known as a consequence only counts if its
    line is no message of a more specific kind."""
    known = {(one.file, one.line) for one in evidence.events if not one.kind.startswith(("software.", "python."))}
    remote = (one for one in evidence.of("nccl.result") if _REMOTE in one.text)
    lost = (*evidence.of(*LOST_PEERS), *remote)
    return tuple(one for one in lost if one.kind != _CONSEQUENCE or (one.file, one.line) not in known)


_CONSEQUENCE = "software.consequence"


def _is_root(aftermath: LaterEvents, event: Event) -> bool:
    if event.kind in (EXCEPTION, CRASH):
        return nature_of_exception(event) == "own" and not aftermath.outlived(event)
    if event.kind == "nccl.result" and _REMOTE in event.text:
        return False
    return "-15" not in (event.value("code"), event.value("exitcode"))


_REMOTE = "remote process exited"
"""ncclRemoteError (ncclGetErrorString in src/init.cc of NCCL): the rank lost a peer."""


def exceptions(evidence: LogEvidence) -> Iterator[Event]:
    """Exceptions of ranks, without those of launchers about failed processes."""
    # Watchdogs abort their process on purpose after a timeout, and log why.
    has_watchdog = bool(evidence.of(*TIMED_OUT, *LOST_PEERS))
    for one in evidence.of(EXCEPTION, CRASH):
        is_abort = has_watchdog and one.kind == CRASH and (one.value("what") or "").startswith("Aborted")
        if _plain(one) not in _WRAPPERS and not is_abort:
            yield one


def launcher_reports(evidence: LogEvidence) -> Iterator[Event]:
    """Exceptions of launchers about failed processes, without their cause."""
    return (one for one in evidence.of(EXCEPTION) if _plain(one) in _WRAPPERS)


def nature_of_exception(event: Event) -> Nature:
    """The cause of an exception, see :data:`doctor.analysis.hang.exits.Nature`."""
    return nature_of(failure_of(event))


def failure_of(event: Event) -> Failure:
    """An exception in a log, as the failure of a rank."""
    if event.kind == CRASH:
        return Failure("Fatal Python error", event.value("what") or "", event.at, event.frames)
    return Failure(event.value("type") or "exception", event.value("message") or "", event.at, event.frames)


def cause_in_chain(events: Sequence[Event]) -> Event:
    """The exception that ended a process: the first of its last chain that is not a consequence.

    Those of earlier chains (``During handling of the above exception …``) were handled."""
    chain = [events[-1]]
    for event in reversed(events[:-1]):
        if event.file != chain[0].file or chain[0].line - event.line > NEAR:
            break
        chain.insert(0, event)
    return next((event for event in chain if nature_of_exception(event) == "own"), chain[0])


def _plain(event: Event) -> str:
    return (event.value("type") or "").rpartition(".")[2]


def _completion_after_restart(evidence: LogEvidence) -> Event | None:
    """The orderly end of a job whose ranks torchrun restarted; ``None`` if any of its logs shows a later failure.

    Ranks log steps after the restart, and the launcher or all ranks that log to the file end. torchrun prints no table
    of failures: with one, an exit status of 0 is that of another command, such as ``tee``.
    """
    if evidence.of("elastic.entry", "elastic.child_line"):
        return None
    failed = {event.file: event.line for event in evidence.of(*ENDS)}
    restarted = {event.file for event in evidence.of("elastic.failed")}
    ranks = {file.path: set(file.ranks) for file in evidence.files}
    ends: list[Event] = []
    for path, line in failed.items():
        later = [mark for mark in evidence.marks if mark.file == path and mark.line > line]
        own_ends = [mark for mark in later if mark.kind == "mark.end"]
        ended = {mark.rank for mark in own_ends}
        trained = any(mark.kind == "mark.step" for mark in later)
        if path not in restarted or not trained or not own_ends or not (None in ended or ended >= ranks[path]):
            return None
        ends.append(own_ends[-1])
    return ends[-1] if ends else None


class LaterEvents:
    """Events after an error: whether the process continued, or any process ended."""

    def __init__(self, evidence: LogEvidence) -> None:
        self._files = {file.path: file for file in evidence.files}
        self._last_end: dict[str, int] = {}
        self._last_peace: dict[str, int] = {}
        for event in evidence.of(*ENDS, "run.ended_well"):
            last = self._last_peace if event.kind == "run.ended_well" else self._last_end
            last[event.file] = max(event.line, last.get(event.file, 0))
        self._completion = _completion_after_restart(evidence)

    def preceded_restart(self, event: Event) -> bool:
        """Whether torchrun restarted the ranks after an error, and a later attempt completed."""
        end = self._completion
        if end is None:
            return False
        if end.file == event.file:
            return event.line < end.line
        return end.at is None or event.at is None or event.at < end.at

    def outlived(self, event: Event) -> bool:
        """Whether the log continues after an error without the end of a process: the error was handled."""
        if self.preceded_restart(event):
            return True
        if self._last_end.get(event.file, 0) > event.line:
            return False
        if self._last_peace.get(event.file, 0) > event.line:
            return True
        file = self._files.get(event.file)
        if file is None or file.lines - event.line < OUTLIVED_LINES:
            return False
        return event.at is None or file.last_at is None or file.last_at - event.at >= OUTLIVED_SECONDS

    @property
    def is_peaceful(self) -> bool:
        """Whether the job reported a normal end, and no later event contradicts it."""
        return bool(self._last_peace) and all(
            self._last_end.get(file, 0) < line for file, line in self._last_peace.items()
        )

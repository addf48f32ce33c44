"""The state of every rank of a run: its progress, the collectives that it entered, and those that it waits in."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec

from doctor.analysis.call_sites import CallSite, is_in_backward, local_work_of, site_of, site_of_wait
from doctor.core.facts import (
    Collective,
    Failure,
    Frame,
    LoaderFacts,
    ProcessGroup,
    ProgressFacts,
    RecorderFacts,
    TrainingFacts,
)
from doctor.core.facts.telemetry import (
    A_SLEEP,
    AT_WORK,
    DEFAULT_GROUPS,
    ENDLESS,
    FAILING,
    FAR,
    IDLE,
    LOST,
    OWN_LOCK,
    PROCESS_EVENT,
    REPEATS,
    SEARCH,
    SHARED_LOCK,
    WALK,
    WHOSE_THREAD,
    WITH_TIMEOUT,
    group_in_words,
)
from doctor.core.frames import is_doctor, waits_in
from doctor.core.job import Job
from doctor.core.text import lazy_compile
from doctor.knowledge.waiting_functions import OF_GROUPS, tries_lock_file

LEAST_WAIT = 3.0
"""Seconds without progress from which a rank in a collective counts as waiting, even within its own limit.

Ranks of a healthy run are in a collective about half of the time."""
LEAST_STILL = 6.0
"""Seconds from which a rank that neither moves nor computes has come to a stop, if nothing that prepares a step is on
its stack."""
LONG_IDLE = 10.0
"""The same for a wait of a library for its own threads, which may wait for a server."""
LONG_STILL = 40.0
"""The same before the first batch, where ranks start one after the other or wait for a file; not for locks, users."""
_QUEUES = ("an item of a queue (", "room in a queue (")
_OF_STANDARD = lazy_compile(r"/lib(?:64)?/python\d+\.\d+/(?!site-packages|dist-packages|importlib)")
"""Files of Python's own library: what calls them waits."""
_IMPORTS = "<frozen importlib"
"""Start of the file of an import, which waits while another thread imports the same module."""
_FULL_PIPE = "room in a pipe"
"""The same for a file whose reader has stopped; a file server may only be slow."""
_END_OF_CHILD, _FROM_PIPE = "the end of a child process", "data from a pipe"
"""The same for a command that the rank started, and for its output."""
_OF_THREADS = ("/threading.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py")
_OF_TERMINAL = ("input from a terminal", "room in a terminal")
_OUTSIDE = (
    "a lock on ", _FULL_PIPE, "data from ", "room to send to ", "a connection to ", "the other end of a named pipe",
    "a signal", "a semaphore that other processes share", "a message queue that other processes share",
    "a result of another process", "a future (torch.futures)", "a request to its own server", *_OF_TERMINAL,
)  # fmt: skip
"""Starts of the same for what another process, a server or a user has to end or to answer."""
_IN_TURN = ("a lock on ", "a semaphore that other processes share")
_OF_OTHERS = (OWN_LOCK, SHARED_LOCK, PROCESS_EVENT, "one of several files or sockets", *_OUTSIDE)
"""The same with what another thread has to end."""
_BY_ITSELF = (SEARCH, REPEATS)
"""Starts of the same for loops in which no child process has a part."""
_OF_STEP = frozenset({"step", "forward", "backward", "optimizer"})
_AFTER_STEP = frozenset({"batch-end", "epoch-end"})
_COMPILES = lazy_compile(r"importlib|^<frozen|/torch/(?!multiprocessing/|futures/|utils/(?:data/|file_baton))|/triton/")
"""Files of code that may wait without moving between steps: imports, compilation, and a device that computes."""
_PREPARES = lazy_compile(
    r"importlib|^<frozen|/torch/cuda/|/torch/_(?:dynamo|inductor|functorch)/|/triton/|/multiprocessing/"
    r"|/concurrent/futures/|/asyncio/|/(?:socket|ssl|selectors|subprocess)\.py$|/http/"
)
"""Files of code that may wait without moving while a step is prepared: imports, compilation, downloads, processes."""
WITH_ALL = frozenset(
    {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_to_all",
        "reduce_scatter_tensor",
        "reduce_scatter",
        "barrier",
    }
)
"""Operations that complete only after all ranks have entered them."""
_ON_HOST = frozenset({"", "gloo", "mpi", "ucc"})
"""Backends whose calls run on the host, one after the other."""

_STAGES = {
    "setup": "setup",
    "sanity": "the sanity check",
    "train": "training",
    "validate": "validation",
    "predict": "prediction",
    "teardown": "teardown",
}


def is_of_device(entry: Collective) -> bool:
    """Whether a device runs a call asynchronously, so that its host may continue."""
    return entry.backend not in _ON_HOST


class RankState(msgspec.Struct, frozen=True, dict=True):
    """The state of one rank; a missing section is ``None``.

    ``ended_waiting``: its newest collective ended with an error by a timeout (``timeout``) or a lost peer
    (``peer``)."""

    rank: int
    progress: ProgressFacts | None
    recorder: RecorderFacts | None
    ended_waiting: str = ""

    @property
    def state(self) -> str:
        """As in :class:`doctor.core.facts.ProgressFacts`; empty if its progress is unknown."""
        return self.progress.state if self.progress else ""

    @property
    def failure(self) -> Failure | None:
        """The error that it ended with."""
        return self.progress.failure if self.progress else None

    @property
    def stack(self) -> tuple[Frame, ...]:
        """Its last known stack, innermost frame first."""
        return self.progress.stack if self.progress else ()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The calls in its flight recorder."""
        return self.recorder.collectives if self.recorder else ()

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups in its flight recorder."""
        return self.recorder.groups if self.recorder else ()

    def description_of(self, group: str) -> str:
        """What a process group is for, as in ``mesh_cp``; empty if its flight recorder does not show it."""
        return next((one.description for one in self.groups if one.name == group), "")

    def name_of(self, group: str) -> str:
        """``the default group``, ``group 12 (TENSOR_MODEL_PARALLEL_GROUP)`` or ``group 12``."""
        return group_in_words(group, self.description_of(group))

    @property
    def is_stuck(self) -> bool:
        """Whether it makes no progress, by its own limit, by what peers observed, or by the open call in a dump."""
        if self.state in ("stalled", "stopped", "silent") or self.ended_waiting == "timeout" or self.stands:
            return True
        return self.is_from_dumps and self.wait is not None

    @functools.cached_property
    def stands(self) -> bool:
        """Whether it has surely come to a stop before the pace of the run is known: in a debugger, in one frame of a
        training step that neither computes nor prepares anything, such as a lock or a sleep, in a file that nobody
        reads, or before the first batch in one call of the user's code, of a lock or for long."""
        progress = self.progress
        if progress is None or self.state != "running":
            return False
        loops = (progress.loops or 0.0) >= LEAST_STILL
        loops = loops and (progress.blocked.startswith(_BY_ITSELF) or not _may_have_work_done(progress))
        loops = loops and not (progress.stage == "train" and progress.point in _OF_STEP)
        if (progress.still or 0.0) < LEAST_STILL and not loops:
            return False
        if self.wait is not None or self.stack_wait or not self.stack or is_in_backward(self.stack):
            return False
        is_before = progress.stage == "setup" or (not progress.step and progress.point not in _AFTER_STEP)
        is_outside = progress.stage != "train" or progress.point not in _OF_STEP
        if not is_before and is_outside:
            return loops or _stands_between_steps(progress)
        work = local_work_of(self.stack)
        if is_before and is_outside and (loops or _waits_before_training(progress)):
            return True
        if progress.stage == "train" and progress.blocked.endswith(LOST):
            return True
        if work is not None:
            return (
                work.kind == "debugger"
                or (work.kind == "saving" and _stands_while_saving(progress))
                or (work.kind == "child" and _waits_for_still_child(progress))
            )
        prepares = any(_PREPARES.search(frame.file) for frame in _without_endless_wait(progress) if not frame.user)
        if progress.stage == "setup":
            return not prepares and _stands_before_training(progress)
        works_elsewhere = any(one.state in ("R", "D") and not one.name.startswith("pt_") for one in progress.children)
        return progress.stage == "train" and progress.point in _OF_STEP and not prepares and not works_elsewhere

    @property
    def is_held(self) -> bool:
        """Whether it waits in the doctor itself, which ends all of its own waits: for the first check of all ranks."""
        caller = next((frame for frame in self.stack if not frame.file.endswith(_OF_THREADS)), None)
        return caller is not None and is_doctor(caller)  # not what it puts around a function, as of the backward pass

    @property
    def is_sampled(self) -> bool:
        """Whether its process was read from outside, so that it has made no progress for at least the time known."""
        return self.progress is not None and self.progress.sampled

    @property
    def is_snapshot(self) -> bool:
        """Whether its process was read only once, which does not show whether it moves."""
        return self.progress is not None and self.progress.sampled and self.progress.idle is None

    @property
    def is_from_dumps(self) -> bool:
        """Whether it is known from a dump, perhaps with logs, and was not monitored."""
        is_monitored = self.progress is not None and (bool(self.progress.run) or self.progress.idle is not None)
        return self.recorder is not None and not is_monitored

    @functools.cached_property
    def pending(self) -> Mapping[str, Collective]:
        """The oldest collective of each group that it has entered and not completed."""
        found: dict[str, Collective] = {}
        for entry in self.collectives:
            if not entry.is_p2p and entry.group not in found and self._is_open(entry):
                found[entry.group] = entry
        return found

    @functools.cached_property
    def transfers(self) -> tuple[Collective, ...]:
        """Sends and receives that are not completed."""
        return tuple(entry for entry in self.collectives if entry.is_p2p and self._is_open(entry))

    def _is_open(self, entry: Collective) -> bool:
        if entry.state == "completed":
            return False
        if self.ended_waiting and entry is self.collectives[-1]:
            return True
        return not entry.retired or entry.backend in self._completing_backends

    @functools.cached_property
    def _completing_backends(self) -> frozenset[str]:
        """Backends that report completion: a call that they retire without it timed out.

        Gloo retires every call and reports none as completed; after a timeout its counters claim completion."""
        reported = {entry.backend for entry in self.collectives if entry.state == "completed"}
        unfinished = {entry.backend for entry in self.collectives if self._is_beyond_counter(entry)}
        return frozenset((reported | unfinished) - _ON_HOST)

    def _is_beyond_counter(self, entry: Collective) -> bool:
        group = self.recorder.group(entry.group) if self.recorder and entry.retired and not entry.is_p2p else None
        return group is not None and group.enqueued is not None and (group.completed or 0) < entry.sequence

    @functools.cached_property
    def _entered(self) -> Mapping[str, int]:
        entered: dict[str, int] = {}
        for entry in self.collectives:
            if not entry.is_p2p:
                entered[entry.group] = max(entered.get(entry.group, 0), entry.sequence)
        # NCCL counts the sends and receives of a group in the same counter.
        mixed = {entry.group for entry in self.collectives if entry.is_p2p}
        for group in self.groups:
            if group.enqueued is not None and group.name not in mixed:
                entered[group.name] = max(entered.get(group.name, 0), group.enqueued)
        return entered

    def entered(self, group: str) -> int:
        """The sequence of the newest collective of a group that it has entered; 0 for none."""
        return self._entered.get(group, 0)

    def has_completed(self, group: str, sequence: int) -> bool:
        """Whether it has entered a collective and completed it."""
        if self.entered(group) < sequence:
            return False
        oldest = self.pending.get(group)
        return oldest is None or oldest.sequence > sequence

    @functools.cached_property
    def wait(self) -> Collective | None:
        """The collective that it waits in: the oldest one over all groups."""
        open_ones = [*self.pending.values(), *self.transfers]
        return min(open_ones, key=lambda entry: entry.at or 0.0, default=None)

    @property
    def stack_wait(self) -> str:
        """The operation that it waits in according to its stack, or to what else was seen of it; empty if it waits in
        none."""
        return (self.progress.awaits if self.progress else "") or waits_in(self.stack)

    @property
    def made_group(self) -> tuple[int, tuple[int, ...]] | None:
        """Number and ranks of the group that it makes together with others; ``None`` if it makes none, or they are not
        known."""
        number, is_known, members = (self.progress.group if self.progress else "").partition(" of ranks ")
        if not is_known or not number.isdecimal() or self.stack_wait not in OF_GROUPS:
            return None
        return int(number), tuple(int(one) for one in members.split(", ") if one.isdecimal())

    @property
    def _is_seen_moving(self) -> bool:
        """Whether it was read from outside and used CPU time or changed its stack: a function on it that may wait does
        not wait then."""
        return self.is_sampled and self.state == "running"

    @property
    def _has_just_entered(self) -> bool:
        """Whether it was monitored, and entered a collective a moment before: it moves from one to the next, such as in
        an evaluation that no loader shows. Its stack may show one that its recorder has closed since."""
        progress = self.progress
        if progress is None or progress.at is None or progress.idle is None or self.is_sampled or self.ended_waiting:
            return False
        newest = self.collectives[-1].at if self.collectives else None
        since = progress.at - newest if newest is not None else 0.0  # a record with one time for all tells nothing
        # The recorder is read a moment after the progress: what was entered in between shows that it moves, too.
        return since != 0.0 and since < LEAST_WAIT <= progress.idle - since

    @property
    def may_wait_in_backward(self) -> bool:
        """Whether it is in the backward pass, and no recorder shows whether it computes or waits."""
        return self.recorder is None and is_in_backward(self.stack) and not self._is_seen_moving

    @property
    def waits(self) -> bool:
        """Whether it surely waits for others, and not only for a moment."""
        if self._is_seen_moving or self._has_just_entered:
            return False
        idle = self.progress.idle if self.progress else None
        is_long = self.is_stuck or bool(self.ended_waiting) or idle is None or idle >= LEAST_WAIT
        return is_long and (self.wait is not None or bool(self.stack_wait))

    @property
    def is_elsewhere(self) -> bool:
        """Whether its stack shows that it does not wait for others."""
        return bool(self.stack) and not self.waits and not self.may_wait_in_backward

    @functools.cached_property
    def site(self) -> CallSite | None:
        """Where it waits, or else where it is; ``None`` if no line is known."""
        failure = self.failure.frames if self.failure else ()
        if failure and not self.ended_waiting:
            return site_of_wait(failure)
        if self.wait is not None and self.wait.frames:
            return site_of(self.wait.operation, self.wait.frames)
        if failure:
            return site_of_wait(failure)
        operation = self.wait.operation if self.wait else self.stack_wait
        if self.stack or operation:
            return site_of(operation or ("all_reduce" if self.may_wait_in_backward else ""), self.stack)
        return None

    @property
    def blocked(self) -> str:
        """What its thread waits for in the kernel, apart from its collective; empty if unknown.

        In a collective a thread waits for that of the backend on a condition variable, which the kernel shows as a lock
        (``Work::wait`` in torch's ``ProcessGroup.cpp``, ``UnboundBuffer::waitRecv`` of Gloo).
        """
        blocked = self.progress.blocked if self.progress else ""
        is_of_collective = self.site is not None and self.site.operation and blocked.startswith(OWN_LOCK)
        return "" if is_of_collective else blocked

    @property
    def place(self) -> str:
        """``training, epoch 1, batch 40``, without the unknown parts."""
        if self.progress is None:
            return ""
        parts = [_STAGES.get(self.progress.stage, self.progress.stage)]
        parts += [f"epoch {self.progress.epoch}"] if self.progress.epoch is not None else []
        parts += [f"batch {self.progress.batch}"] if self.progress.batch is not None else []
        return ", ".join(part for part in parts if part)


def walked_folder(progress: ProgressFacts) -> str:
    """``/data, which contains itself as /data/train``: the folder that a rank walks through; empty if it does not."""
    return progress.blocked.removeprefix(WALK) if progress.blocked.startswith(WALK) else ""


def searched(progress: ProgressFacts) -> str:
    """``a recursion of solve() at train.py:40``: the search that a rank computes; empty if it is in none."""
    return progress.blocked.removeprefix(SEARCH) if progress.blocked.startswith(SEARCH) else ""


def repeated(progress: ProgressFacts) -> str:
    """```token`, in the loop at train.py:40``: what each answer that a rank gets there names; empty if they differ."""
    return progress.blocked.removeprefix(REPEATS) if progress.blocked.startswith(REPEATS) else ""


def _may_have_work_done(progress: ProgressFacts) -> bool:
    """Whether a child process that is no data worker of torch may work for a rank: one that has run of late."""
    others = (one for one in progress.children if not one.name.startswith("pt_") and one.state != "Z")
    return any((one.still or 0.0) < LEAST_STILL for one in others)


def _without_endless_wait(progress: ProgressFacts) -> tuple[Frame, ...]:
    """The stack, without the frames of an endless wait of the user's code for a future, a thread or a queue."""
    if progress.blocked.startswith(_QUEUES) or progress.blocked.endswith(ENDLESS):
        at, caller = _caller(progress.stack)
        return progress.stack[at:] if caller.user or progress.blocked.startswith(_QUEUES) else progress.stack
    return progress.stack


def _caller(stack: Sequence[Frame]) -> tuple[int, Frame]:
    """The innermost frame outside of imports, of Python's own library and of what waits for lock files, with its
    place."""
    places = (
        (at, one)
        for at, one in enumerate(stack)
        if one.user or not (_OF_STANDARD.search(one.file) or one.file.startswith(_IMPORTS) or tries_lock_file(one.file))
    )
    return next(places, (0, stack[0]))


def _blocked_at_last(progress: ProgressFacts) -> str:
    """What it waits for, or the thread that it waits for."""
    return progress.blocked.rpartition(WHOSE_THREAD)[2]


def _waits_for_still_child(progress: ProgressFacts) -> bool:
    """Whether a rank waits in training, or before, for a child process, and none has run of late."""
    waits = progress.blocked == _END_OF_CHILD or progress.blocked.startswith((_FROM_PIPE, _FULL_PIPE))
    waits = waits or FAILING in progress.blocked
    trains = progress.stage == "train" and progress.point in _OF_STEP | _AFTER_STEP
    return (
        waits
        and (trains or progress.stage == "setup")
        and bool(progress.children)
        and not _may_have_work_done(progress)
    )


def _stands_before_training(progress: ProgressFacts) -> bool:
    """Whether a rank that has not begun to train is blocked in one call of the user's code, in no library and with no
    child process that may work for it: for a lock of its process, a user, or a long sleep."""
    if not progress.stack[0].user or _may_have_work_done(progress):
        return False
    if progress.blocked and progress.blocked != A_SLEEP:
        return progress.blocked.startswith((OWN_LOCK, SHARED_LOCK, *_OF_TERMINAL))
    return (progress.still or 0.0) >= LONG_STILL


def _waits_before_training(progress: ProgressFacts) -> bool:
    """Whether a rank that has not begun to train waits without a timeout in the user's code, or for a worker that does.

    Neither for a sleep of less than a minute nor for a lock that processes share: ranks start one after the other."""
    work = local_work_of(progress.stack)
    if work is not None and work.kind == "loading" and progress.blocked.startswith((*_QUEUES, _FROM_PIPE)):
        awaited = [one.waits for one in progress.children if one.waits]
        if any(one.state == "T" for one in progress.children):
            return True
        return bool(awaited) and not any(map(_may_end, awaited)) and _stands_while_loading(progress)
    is_in_turn = progress.blocked == A_SLEEP or progress.blocked.startswith(_IN_TURN)
    if is_in_turn or _may_have_work_done(progress):
        return False
    if not (_caller(progress.stack)[1].user or progress.blocked.endswith(LOST)):
        return False
    return _waits_without_end(progress)


def _may_end(waits: str) -> bool:
    return waits == A_SLEEP or waits.startswith("the file ") or waits.endswith(WITH_TIMEOUT)


def _stands_between_steps(progress: ProgressFacts) -> bool:
    """Whether a rank between two steps of a loop, where nothing is known of its work, waits without a timeout.

    In a call of the user's code, of Python's library too: for a lock, a queue, a pipe, a terminal, a signal, a child
    process or a silent server; or it sleeps there, perhaps between attempts without end. In another library: for what
    other processes or servers have to do, or for data workers that stand, too. No child process may work for it.
    """
    work = local_work_of(progress.stack)
    if work is not None and work.kind == "debugger":
        return True
    if _may_have_work_done(progress):
        return False
    of_work = _STANDS_AT_WORK.get(work.kind if work is not None else "")
    return of_work(progress) if of_work else _waits_without_end(progress)


def _stands_while_saving(progress: ProgressFacts) -> bool:
    return _blocked_at_last(progress).startswith(_OF_OTHERS) or progress.blocked.endswith(ENDLESS)


def _stands_while_loading(progress: ProgressFacts) -> bool:
    if not progress.blocked.startswith((*_QUEUES, _FROM_PIPE)):
        return _waits_without_end(progress)
    return bool(progress.children) and all((one.still or 0.0) >= LEAST_STILL for one in progress.children)


def _is_long_idle(progress: ProgressFacts) -> bool:
    """Whether a rank has waited in a library for its other threads, none of which has run for longer than most servers
    take to answer."""
    compiles = any(_COMPILES.search(frame.file) for frame in progress.stack if not frame.user)
    return not compiles and (progress.still or 0.0) >= LONG_IDLE and progress.blocked.endswith((ENDLESS, IDLE))


def _awaits_others_for_long(progress: ProgressFacts) -> bool:
    """Whether a rank has waited in a library for its own thread, which waits for another process or a server."""
    is_long = WHOSE_THREAD in progress.blocked and (progress.still or 0.0) >= LEAST_STILL
    return is_long and _blocked_at_last(progress).startswith(_OUTSIDE)


def _waits_without_end(progress: ProgressFacts) -> bool:
    blocked = progress.blocked
    is_of_user = _caller(progress.stack)[1].user
    if FAILING in blocked or blocked.endswith((LOST, AT_WORK)):
        return not blocked.endswith(AT_WORK)
    if blocked.endswith((ENDLESS, IDLE)) or blocked.startswith(_QUEUES):
        return is_of_user or _is_long_idle(progress) or _awaits_others_for_long(progress)
    if WHOSE_THREAD in blocked and _blocked_at_last(progress).startswith(_OF_OTHERS):
        return is_of_user
    if any(_COMPILES.search(frame.file) for frame in progress.stack if not frame.user):
        return False
    if blocked.endswith(FAR):
        return True
    if blocked.endswith(WITH_TIMEOUT) and not progress.stack[0].user:
        return False
    if not is_of_user:
        return blocked.startswith(_OUTSIDE)
    return blocked.startswith((*_OF_OTHERS, A_SLEEP)) or _waits_for_still_child(progress)


_STANDS_AT_WORK = {
    "child": _waits_for_still_child,
    "saving": _stands_while_saving,
    "loading": _stands_while_loading,
}
"""By the kind of local work of a rank, whether it stands between two steps."""


def _shared_names(job: Job) -> frozenset[str]:
    """Names of several groups: all parts of a split group have one name."""
    members: dict[str, set[tuple[int, ...]]] = {}
    for recorder, _ in job.facts(RecorderFacts):
        for group in recorder.groups:
            if group.members:
                members.setdefault(group.name, set()).add(group.members)
    return frozenset(name for name, found in members.items() if len(found) > 1)


def _with_first_member(recorder: RecorderFacts, shared: frozenset[str]) -> RecorderFacts:
    """The recorder with the first member added to the names that several groups have."""
    names = {
        group.name: f"{group.name} from rank {group.members[0]}"
        for group in recorder.groups
        if group.name in shared and group.members
    }
    groups = (msgspec.structs.replace(one, name=names.get(one.name, one.name)) for one in recorder.groups)
    entries = (msgspec.structs.replace(one, group=names.get(one.group, one.group)) for one in recorder.collectives)
    return msgspec.structs.replace(recorder, groups=tuple(groups), collectives=tuple(entries))


class JobState:
    """The states of all ranks of a job.

    ``unseen``: ranks of which nothing is known. ``ungathered``: the number of ranks that were not asked. ``joins``: the
    run uses ``Join`` for uneven inputs. ``hosts``: host names by rank. ``ended_waiting``: as in :class:`RankState`, by
    rank. ``ended_by_count``: for some of these ranks only counters show it, see
    :func:`doctor.analysis.hang.collective_mismatch.gloo_timeouts`. ``in_deadlock``: all ranks wait for one another
    (:mod:`.wait_graph`), so that they are stuck even within their limits.

    It keeps no reference to the job, which is the weak key under which its diagnosis is stored.
    """

    def __init__(
        self, job: Job, ended_waiting: Mapping[int, str] | None = None, *, ended_by_count: bool = False
    ) -> None:
        waited = ended_waiting or {}
        self.ended_by_count = ended_by_count
        self.in_deadlock = False
        self.ungathered = job.ungathered
        self.joins = any(training.joins for training, _ in job.facts(TrainingFacts))
        self.hosts: dict[int, str] = {rank.number: rank.host.name for rank in job.ranks}
        self.ranks: dict[int, RankState] = {}
        self.loaders: dict[int, LoaderFacts] = {}
        silent = set(job.absent)
        shared = _shared_names(job)
        for rank in job.ranks:
            progress, recorder = rank.find(ProgressFacts), rank.find(RecorderFacts)
            recorder = _with_first_member(recorder, shared) if recorder and shared else recorder
            if progress is None and recorder is None:
                silent.add(rank.number)
            else:
                rank_state = RankState(rank.number, progress, recorder, waited.get(rank.number, ""))
                self.ranks.setdefault(rank.number, rank_state)
            if (loaders := rank.find(LoaderFacts)) is not None:
                self.loaders.setdefault(rank.number, loaders)
        if self.is_from_dumps:
            # No rank below the highest known one if most of these are unknown.
            silent.update(range(max(self.ranks)) if max(self.ranks) < 2 * len(self.ranks) else ())
            silent.update(*(group.members for one in self.ranks.values() for group in one.groups))
        self.unseen = tuple(sorted(silent.difference(self.ranks)))

    @functools.cached_property
    def is_from_dumps(self) -> bool:
        """Whether the job is known from dumps and was not monitored."""
        recorded = [one for one in self.ranks.values() if one.recorder is not None]
        return bool(recorded) and all(one.is_from_dumps for one in recorded)

    @functools.cached_property
    def is_snapshot(self) -> bool:
        """Whether the stacks of all ranks were read only once."""
        return bool(self.ranks) and all(one.is_snapshot for one in self.ranks.values())

    @functools.cached_property
    def is_sampled(self) -> bool:
        """Whether ranks were read from outside: those of hosts that no process attached to may be anywhere."""
        return any(one.is_sampled for one in self.ranks.values())

    @functools.cached_property
    def calls(self) -> Mapping[str, Mapping[int, Mapping[int, Collective]]]:
        """All recorded collectives, by group, sequence number and rank."""
        found: dict[str, dict[int, dict[int, Collective]]] = {}
        for rank, rank_state in self.ranks.items():
            for entry in rank_state.collectives:
                if not entry.is_p2p:
                    found.setdefault(entry.group, {}).setdefault(entry.sequence, {})[rank] = entry
        return found

    @functools.cached_property
    def members(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks of each group, as recorded.

        Without a record, all ranks for the default group, and the ranks that used it for another one."""
        recorded: dict[str, set[int]] = {}
        used: dict[str, set[int]] = {}
        for rank_state in self.ranks.values():
            for group in rank_state.groups:
                recorded.setdefault(group.name, set()).update(group.members)
                used.setdefault(group.name, set()).add(rank_state.rank)
        everybody = {*self.ranks, *self.unseen}
        return {
            name: tuple(sorted(members or (everybody if name in DEFAULT_GROUPS else used[name])))
            for name, members in recorded.items()
        }

    @property
    def stuck(self) -> tuple[int, ...]:
        """Ranks that make no progress."""
        return tuple(rank for rank, one in self.ranks.items() if one.is_stuck or self.in_deadlock)

    @functools.cached_property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that surely wait for others."""
        return tuple(rank for rank, one in self.ranks.items() if one.waits)

    @functools.cached_property
    def has_recorder(self) -> bool:
        """Whether any rank has a flight recorder."""
        return any(one.recorder is not None for one in self.ranks.values())

    def has_length(self, rank: int, stage: str, loader: int | None) -> bool:
        """Whether a rank knows how many batches a loader of a stage has."""
        known = self.loaders[rank].of(stage) if rank in self.loaders else ()
        return any(one.batches is not None for one in known if one.index == (loader or 0))

    def name_of(self, group: str) -> str:
        """``the default group``, ``group 12 (TENSOR_MODEL_PARALLEL_GROUP)`` or ``group 12``."""
        descriptions = (one.description_of(group) for one in self.ranks.values())
        return group_in_words(group, next(filter(None, descriptions), ""))

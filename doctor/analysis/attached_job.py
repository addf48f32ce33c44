"""The job of training ranks, from what attaching processes read of its processes.

The state of a rank follows from its samples (:mod:`doctor.analysis.process_movement`). A rank that computes or writes
while others wait for it is ``running``: what the reasoning over hangs finds then is a remark and no error, because a
checkpoint, a long validation and a slow step look the same. Beyond the default timeout of process groups, which only
repeated attaching can observe, it is ``stalled``.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from doctor.analysis.gpu_activity import gpu_activity
from doctor.analysis.hang.rank_state import is_of_device
from doctor.analysis.process_movement import (
    Movement,
    blocked_call,
    driver_call,
    in_worker_loop,
    is_idle_worker,
    kernel_of,
    movement_of,
    waits_for_batch,
    waits_for_children,
)
from doctor.analysis.ras_reports import RasRank, ras_ranks
from doctor.core.facts import (
    AttachedProcess,
    AttachFacts,
    ChildProcess,
    Failure,
    Frame,
    GpuActivity,
    ProgressFacts,
    RecorderFacts,
)
from doctor.core.facts.telemetry import GpuKind
from doctor.core.job import Host, Job, Member, Sections, build_job
from doctor.core.stack_dumps.native_calls import DEVICE_WAIT
from doctor.knowledge.launcher_index import ENDING_OTHERS

GROUP_TIMEOUT = 1800.0
"""Default timeout of process groups in seconds, for all backends but NCCL, whose 600 s need not apply."""
OPEN_CALL = 30.0
"""Seconds from which an open collective shows that a rank waits: the host of a healthy job is not so far ahead."""
HEARTBEAT = 480.0
"""Seconds after which torch's heartbeat monitor ends a process whose watchdog is blocked in the driver, too."""
FIRST_CALL = 60.0
"""Seconds that a collective in which all ranks are may take: the first one sets up connections."""

_STATES = {
    "moving": "running",
    "busy": "running",
    "waiting": "stalled",
    "standing": "stalled",
    "held": "silent",
    "stopped": "stopped",
    "ended": "gone",
    "unread": "stalled",
}
"""States of :class:`doctor.core.facts.ProgressFacts` by kind of movement. A rank that could not be read has a state but
no stack, so that it is never the one that others are said to wait for."""

_SIGNALS = frozenset(signal.Signals)
_ENDED_BY_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals by which users and schedulers end a process."""

T = TypeVar("T")


class AttachedRank(NamedTuple):
    """A rank, its process and data workers, how it moved, what its GPU did meanwhile, and the name of its host."""

    number: int
    process: AttachedProcess
    workers: tuple[AttachedProcess, ...]
    movement: Movement
    gpu: GpuActivity | None = None
    host: str = ""

    @property
    def gpu_kind(self) -> GpuKind:
        """As in :class:`doctor.core.facts.GpuActivity`; empty if nothing is known of its GPU."""
        return self.gpu.kind if self.gpu else ""


class _HostPart(NamedTuple):
    """What one attaching process read: its ``host`` and section."""

    host: Host
    facts: AttachFacts


class StandingTimes:
    """Since when each process stands where it is, over repeated attaching to one job."""

    def __init__(self) -> None:
        self._since: dict[tuple[object, ...], float] = {}

    def seconds(self, host: Host, process: AttachedProcess, movement: Movement) -> float | None:
        """The seconds for which the process has stood at least; forgets where it stood before."""
        if movement.seconds is None or not process.samples:
            return movement.seconds
        place = (host.identity, process.pid, process.started)
        where = (*place, movement.kind, tuple((frame.file, frame.line) for frame in movement.stack))
        since = self._since.get(where, process.samples[0].at)
        self._since = {key: at for key, at in self._since.items() if key[:3] != place}
        if movement.kind == "moving":
            return movement.seconds
        self._since[where] = since
        return round(process.samples[-1].at - since, 1)


def attached_job(members: Job, times: StandingTimes | None = None) -> Job:
    """Return the job of the training ranks that the ``members``, attaching processes, read.

    ``times``: of earlier rounds. Ranks of hosts that no process attached to are only counted in the world size. A
    process that several members read counts once.
    """
    times = times or StandingTimes()
    parts = _parts(members)
    found = _found(parts, times)
    waits = any(rank.movement.kind == "waiting" for _, rank in found)
    processes = [rank.process for _, rank in found]
    world = _most_common(process.world_size for process in processes if process.world_size)
    reports = _ras_reports(parts, found)
    seen = {rank.number for _, rank in found}
    lost = {number: part for part in parts for number in _lost(part) if number not in seen}
    # Ranks dump their recorders one after the other, so those of ranks that move do not belong together.
    stand = all(rank.movement.kind != "moving" for _, rank in found)
    ranks = [
        _member(
            part.host,
            rank.number,
            _progress(rank, reports.get(rank.number, RasRank()), waits=waits),
            rank.process.recorder if stand else None,
        )
        for part, rank in found
    ]
    ranks += [
        _member(part.host, number, _ended(waits=waits, is_orderly=_stops_on_failure(part)))
        for number, part in sorted(lost.items())
    ]
    ranks += [
        _unseen(number, report)
        for number, report in sorted(reports.items())
        if report.lost and number < (world or 0) and number not in {*seen, *lost}
    ]
    return build_job(
        ranks,
        world_size=max(world or 0, len({member.rank for member in ranks}), 1),
        launcher=_most_common(process.launcher for process in processes if process.launcher) or "none",
        expected=members.expected,
        captured=members.captured,
        evidence=members.evidence,
    )


def attached_ranks(members: Job) -> tuple[AttachedRank, ...]:
    """The ranks of all members with their processes, by number; the last of :func:`attached_job`'s parts."""
    found = _found(_parts(members), StandingTimes())
    return tuple(sorted((rank for _, rank in found), key=lambda rank: rank.number))


def _found(parts: Sequence[_HostPart], times: StandingTimes) -> list[tuple[_HostPart, AttachedRank]]:
    return _with_device_waits(_numbered([(part, rank) for part in parts for rank in _ranks_of(part, times)]))


def _parts(members: Job) -> list[_HostPart]:
    """What the members read, each process once."""
    seen: set[tuple[object, ...]] = set()
    parts = []
    for member in members.ranks:
        facts = member.find(AttachFacts)
        if facts is None:
            continue
        kept = []
        for process in facts.processes:
            identity = (member.host.identity, process.pid, process.started)
            if identity not in seen:
                seen.add(identity)
                kept.append(process)
        parts.append(_HostPart(member.host, msgspec.structs.replace(facts, processes=tuple(kept))))
    return parts


def _ranks_of(part: _HostPart, times: StandingTimes) -> list[AttachedRank]:
    ranks = [process for process in part.facts.processes if process.role == "rank"]
    taken = {process.rank for process in ranks}
    free = iter(number for number in range(len(ranks) + len(taken)) if number not in taken)
    children: dict[int | None, list[AttachedProcess]] = {}
    for one in part.facts.processes:
        if one.role in ("worker", "other"):
            children.setdefault(one.parent, []).append(one)
    found = []
    for process in ranks:
        workers = tuple(children.get(process.pid, ()))
        movement = _of_rank(process, workers)
        movement = movement._replace(seconds=times.seconds(part.host, process, movement))
        number = process.rank if process.rank is not None else next(free)
        gpu = gpu_activity(process, part.facts.gpus)
        found.append(AttachedRank(number, process, workers, movement, gpu, part.host.name))
    return found


def _numbered(found: list[tuple[_HostPart, AttachedRank]]) -> list[tuple[_HostPart, AttachedRank]]:
    """With other numbers for ranks whose guessed one is taken: each host guesses from 0 on."""
    taken = {rank.number for _, rank in found if rank.process.rank is not None and not rank.process.guessed}
    numbered = []
    for part, rank in found:
        number = rank.number
        if rank.process.rank is None or rank.process.guessed:
            while number in taken:
                number += 1
            taken.add(number)
        numbered.append((part, rank._replace(number=number)))
    return numbered


def _of_rank(process: AttachedProcess, workers: Sequence[AttachedProcess]) -> Movement:
    """The movement of a rank, in which its children count if it waits for them."""
    own = movement_of(process)
    if own.kind not in ("standing", "busy") or not waits_for_children(own.stack):
        return own
    moves = [(worker, movement_of(worker)) for worker in workers]
    if any(movement.is_progress for _, movement in moves):
        return own._replace(kind="busy")
    if not waits_for_batch(own.stack):
        return own
    stuck = (one for _, one in moves if one.kind in ("standing", "held", "stopped") and _in_dataset(one))
    worker_stack = next((one.stack for one in stuck), ())
    # The rank waits for the line of the dataset that its worker is in.
    return own._replace(kind="standing", stack=(*in_worker_loop(worker_stack), *own.stack))


def _in_dataset(movement: Movement) -> bool:
    return bool(movement.stack) and not is_idle_worker(movement.stack)


def _with_device_waits(found: list[tuple[_HostPart, AttachedRank]]) -> list[tuple[_HostPart, AttachedRank]]:
    """With ranks that wait for their GPU, which waits for another rank, as waiting for that rank.

    The host thread of a rank that waits in a collective of NCCL spins in the next synchronization with its device, and
    nothing in its Python stack says so; in a job that moves a rank looks the same. It waits for others if its GPU only
    polls while that of another rank does not, or, where nothing is known of its GPU, if another rank stands elsewhere.
    """
    found = [(part, _as_recorded(_as_seen_on_gpu(rank))) for part, rank in found]
    kinds = ("standing", "held", "stopped", "ended")
    stands = any(rank.movement.kind in kinds and not rank.movement.on_device for _, rank in found)
    works = any(rank.movement.kind in ("busy", "unread") and rank.gpu_kind in ("computes", "idle") for _, rank in found)
    return [(part, _as_device_wait(rank, stands=stands, works=works)) for part, rank in found]


def _as_seen_on_gpu(rank: AttachedRank) -> AttachedRank:
    """The rank, which is busy if it waits for its GPU and this one computes."""
    if rank.movement.operation != DEVICE_WAIT or rank.gpu_kind != "computes":
        return rank
    return rank._replace(movement=rank.movement._replace(kind="busy", operation=""))


def _as_recorded(rank: AttachedRank) -> AttachedRank:
    """The rank as waiting in the oldest open collective of its flight recorder, if that has been open for long."""
    movement, recorder, samples = rank.movement, rank.process.recorder, rank.process.samples
    is_unclear = movement.kind in ("busy", "unread") and rank.gpu_kind != "computes"
    if recorder is None or not samples or not is_unclear or waits_for_children(movement.stack):
        return rank
    calls = (one for one in recorder.collectives if is_of_device(one) and not one.is_p2p and not one.retired)
    begun = {one.at: one for one in calls if one.state != "completed" and one.at is not None}
    oldest = min(begun, default=None)
    if oldest is None or samples[-1].at - oldest < OPEN_CALL:
        return rank
    seconds = round(samples[-1].at - oldest, 1)
    return rank._replace(movement=movement._replace(kind="waiting", seconds=seconds, operation=begun[oldest].operation))


def _as_device_wait(rank: AttachedRank, *, stands: bool, works: bool) -> AttachedRank:
    """The rank as waiting for its GPU, if it does. ``stands``: another rank stands elsewhere; ``works``: the GPU of
    another rank that is at one place does not poll."""
    movement = rank.movement
    is_open = movement.kind == "busy" or (movement.kind == "unread" and rank.gpu_kind == "waits")
    if not is_open or waits_for_children(movement.stack):
        return rank
    by_kind = {"waits": stands or works, "computes": False, "idle": stands and movement.on_device}
    if not by_kind.get(rank.gpu_kind, stands and (movement.on_device or rank.process.uses_gpu)):
        return rank
    return rank._replace(movement=movement._replace(kind="waiting", operation=DEVICE_WAIT))


def _lost(part: _HostPart) -> list[int]:
    """Ranks that the launcher started on this host, as the others' numbers show, and that are not there."""
    ranks = [process for process in part.facts.processes if process.role == "rank" and not process.guessed]
    if part.facts.chosen or part.facts.unreadable or not ranks:
        return []
    blocks = {
        (process.rank - process.local_rank, process.local_world_size)
        for process in ranks
        if process.rank is not None and process.local_rank is not None and process.local_world_size
    }
    if len(blocks) != 1:
        return []
    start, size = blocks.pop()
    return [number for number in range(start, start + (size or 0)) if number not in {one.rank for one in ranks}]


def _member(host: Host, number: int, progress: ProgressFacts, recorder: RecorderFacts | None = None) -> Member:
    recorded: Sections = {RecorderFacts.key: recorder} if recorder is not None else {}
    sections: Sections = {**host.sections, ProgressFacts.key: progress, **recorded}
    return Member(number, sections, host.identity)


def _stops_on_failure(part: _HostPart) -> bool:
    """Whether a rank that is missing has ended without an error: its launcher would have ended the others."""
    ranks = [process for process in part.facts.processes if process.role == "rank"]
    agents = [process for process in part.facts.processes if process.role == "agent" and not process.ended]
    return bool(agents) and all(process.launcher in ENDING_OTHERS for process in ranks)


def _ras_reports(parts: Sequence[_HostPart], found: Iterable[tuple[_HostPart, AttachedRank]]) -> Mapping[int, RasRank]:
    """What NCCL's RAS service reports of each rank."""
    pids = Counter(rank.process.pid for _, rank in found)
    unique = {rank.process.pid: rank.number for _, rank in found if pids[rank.process.pid] == 1}
    return ras_ranks((event for part in parts for event in part.facts.ras), unique)


def _unseen(number: int, report: RasRank) -> Member:
    """A rank of a host that no process attached to, which RAS has lost."""
    state = "gone" if report.lost == "dead" else "silent"
    progress = ProgressFacts(state=state, stage="", point="", sampled=True, reported=report.words)
    return Member(number, {ProgressFacts.key: progress}, (None, None, report.node or "unknown host"))


def _ended(*, waits: bool, is_orderly: bool = False) -> ProgressFacts:
    """A rank without a process: an end that matters only to ranks that wait."""
    state = "gone" if waits and not is_orderly else "ended"
    return ProgressFacts(state=state, stage="", point="", sampled=True)


def _of_zombie(process: AttachedProcess, *, waits: bool) -> ProgressFacts:
    code = process.exit_code
    if not code or -code in _ENDED_BY_OTHERS:
        ended = _ended(waits=waits, is_orderly=code == 0)
        return msgspec.structs.replace(ended, pid=process.pid)
    name = signal.Signals(-code).name if -code in _SIGNALS else "exit code"
    failure = Failure(name, f"ended by signal {-code} ({name})" if -code in _SIGNALS else str(code))
    return ProgressFacts(state="failed", stage="", point="", pid=process.pid, failure=failure, sampled=True)


def _progress(rank: AttachedRank, report: RasRank, *, waits: bool) -> ProgressFacts:
    process, movement = rank.process, rank.movement
    if movement.is_progress:
        report = RasRank()
    if movement.kind == "ended":
        return _of_zombie(process, waits=waits)
    state = _STATES[movement.kind]
    driver = driver_call(process) if movement.kind == "busy" else ""
    if movement.kind == "busy" and (movement.seconds or 0.0) >= (HEARTBEAT if driver else GROUP_TIMEOUT):
        state = "stalled"
    return ProgressFacts(
        state=state,
        pid=process.pid,
        at=process.samples[-1].at if process.samples else None,
        stage="",
        point="data" if waits_for_batch(movement.stack) else "",
        idle=movement.seconds,
        patience=FIRST_CALL if movement.kind == "waiting" else None,
        stack=movement.stack,
        stack_from=process.stack_source,
        kernel_state=kernel_of(process).state or None,
        children=tuple(_child(worker) for worker in rank.workers),
        sampled=True,
        awaits="" if movement.kind != "waiting" else movement.operation,
        group=movement.group,
        guessed=process.guessed,
        driver=driver,
        blocked=blocked_call(process),
        gpu=rank.gpu,
        reported=report.words,
        behind=report.behind,
    )


def _child(worker: AttachedProcess) -> ChildProcess:
    stack = movement_of(worker).stack
    where = _line_of(stack)
    name = {"worker": "data worker"}.get(worker.role, worker.program or "child")
    return ChildProcess(worker.pid, kernel_of(worker).state, f"{name} at {where}" if where else name)


def _line_of(stack: Sequence[Frame]) -> str:
    if is_idle_worker(stack):
        return ""
    own = next((frame for frame in stack if frame.user), None)
    return f"{own.file.rpartition('/')[2]}:{own.line}" if own else ""


def _most_common(values: Iterable[T]) -> T | None:
    counts = Counter(values).most_common(1)
    return counts[0][0] if counts else None


def movements(members: Job) -> Mapping[int, Movement]:
    """How each rank moved, by number."""
    return {rank.number: rank.movement for rank in attached_ranks(members)}

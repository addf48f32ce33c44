"""Sections of single ranks from logs: failures, and collectives in messages of NCCL's watchdog.

They are the sections of a monitored run, so the analysis of stalled runs also applies to logs. A log does not contain
the position of a rank: ``stage`` and ``point`` are empty. The collectives are those that a rank waits in, with the
counters in the same messages; :mod:`doctor.knowledge.log_patterns` has the wordings of the releases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from doctor.analysis.logs.root_event import LaterEvents, cause_in_chain, exceptions, failure_of
from doctor.core.facts import (
    Collective,
    Event,
    Failure,
    LogEvidence,
    ProcessGroup,
    ProgressFacts,
    RecorderFacts,
    Section,
)
from doctor.postmortem.logs.outcome_marks.marks import PREFIX as MARK

MOST_RANKS = 1 << 17
"""Upper bound of a rank: larger numbers come from garbled lines."""
WATCHDOG = "torch.nccl.watchdog_timeout"
_COUNTERS = ("torch.nccl.pg_status", "torch.nccl.pg_status.old", "torch.nccl.dump_signal")
_WATCHDOG_KINDS = frozenset({WATCHDOG, *_COUNTERS})
_WORLD = {
    "nccl.init": "nranks",
    "pl.init_dist": "w",
    "pl.all_registered": "w",
    "torch.nccl.init_opts": "size",
    "torch.store.clients": "want",
    "run.world": "size",
}
"""Messages with the world size or a lower bound of it, and its field."""
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "allreduce_coalesced",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
"""Names of operations in torch's watchdog messages, and in its flight recorder."""
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
_SIGNALS |= {15: "SIGTERM", 24: "SIGXCPU"}
_WORDS_OF_SIGNALS = (
    ("Killed", 9),
    ("Segmentation", 11),
    ("Bus error", 7),
    ("Aborted", 6),
    ("Terminated", 15),
    ("Floating point", 8),
    ("Out Of Memory", 9),  # the OOM killer ended a process of the task
)


def sections_of(evidence: LogEvidence) -> dict[int, dict[str, Section]]:
    """Return the sections of each rank in a log; none for a silent rank if most others logged."""
    failures = _failures(evidence)
    calls = _calls(evidence)
    found: dict[int, dict[str, Section]] = {}
    for rank in sorted({*failures, *calls}):
        sections: dict[str, Section] = {}
        if rank in calls:
            sections[RecorderFacts.key] = calls[rank]
        if (failure := failures.get(rank)) is not None:
            state, cause = ("gone", None) if failure.kind == _GONE else ("failed", failure)
            sections[ProgressFacts.key] = ProgressFacts(state=state, stage="", point="", at=failure.at, failure=cause)
        found[rank] = sections
    for rank in _completed(evidence).difference(failures) if failures else ():
        ended = ProgressFacts(state="ended", stage="", point="", at=None)
        found.setdefault(rank, {}).setdefault(ProgressFacts.key, ended)
    timed_out = [rank for rank, failure in failures.items() if failure.kind == _TIMEOUT]
    logged = {rank_of(event) for event in evidence.events}
    silent = [number for number in range(world_size_of(evidence) or 0) if number not in logged]
    if len(silent) < len(timed_out):
        found.update({number: {} for number in silent if number not in found})
    return found


def world_size_of(evidence: LogEvidence) -> int | None:
    """Return the largest world size that logs state or imply by a rank; ``None`` without any."""
    bounds = (rank + 1 for event in evidence.events if (rank := rank_of(event)) is not None)
    sizes = (size for size in bounds if size <= MOST_RANKS)
    return max((*sizes, *filter(None, (stated_world_size(evidence),))), default=None)


def stated_world_size(evidence: LogEvidence) -> int | None:
    """Return the largest world size that logs state; ``None`` without any."""
    stated = (_number(event.value(_WORLD[event.kind])) for event in evidence.of(*_WORLD))
    return max((size for size in stated if size is not None and 0 < size <= MOST_RANKS), default=None)


def rank_of(event: Event) -> int | None:
    """Return the rank that logged an event, by its line or by a message of the default group."""
    if event.rank is not None:
        return event.rank
    if event.kind in _WATCHDOG_KINDS and (label := _label(event)).is_default and label.rank is not None:
        return label.rank
    return _number(event.value("rank")) if event.kind == "pl.init_dist" else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and len(text) < 10 else None


# How ranks ended.

_GONE, _TIMEOUT = "gone", "DistBackendError"


def _failures(evidence: LogEvidence) -> dict[int, Failure]:
    raised = _raised(evidence)
    exits = exit_failures(evidence)
    timeouts: dict[int, tuple[int, Failure]] = {}
    for number, event in enumerate(evidence.events):
        if event.kind == WATCHDOG and (timed_out := rank_of(event)) is not None:
            timeouts.setdefault(timed_out, (number, Failure(_TIMEOUT, event.text, event.at)))
    found: dict[int, Failure] = {}
    for rank in {*raised, *timeouts, *exits}:
        candidates = [one for one in (raised.get(rank), timeouts.get(rank)) if one is not None]
        found[rank] = min(candidates, key=lambda one: one[0])[1] if candidates else exits[rank]
    return _with_unlabelled(evidence, found, exits)


def _raised(evidence: LogEvidence) -> dict[int, tuple[int, Failure]]:
    """Return the exception that ended each rank, the first of its last chain, with its index in the events."""
    order = {id(event): number for number, event in enumerate(evidence.events)}
    aftermath = LaterEvents(evidence)
    by_rank: dict[int, list[Event]] = {}
    for event in exceptions(evidence):
        if event.rank is not None and not aftermath.outlived(event):
            by_rank.setdefault(event.rank, []).append(event)
    chosen = {rank: cause_in_chain(events) for rank, events in by_rank.items()}
    return {rank: (order[id(event)], failure_of(event)) for rank, event in chosen.items()}


def exit_failures(evidence: LogEvidence) -> dict[int, Failure]:
    """Return the exit codes of ranks, from torchrun's tables and messages of other launchers."""
    found: dict[int, Failure] = {}
    for event in evidence.of("elastic.entry"):
        code = event.value("exitcode")
        if event.rank is not None and code is not None:
            found.setdefault(event.rank, _of_code(int(code), event.at))
    for event in evidence.of("launch.spawn_died", "mpi.peer_exit", "mpi.first_exit"):
        rank = _number(event.value("rank"))
        if rank is not None:
            signal = event.value("sig") or ""
            by_name = next((-number for number, name in _SIGNALS.items() if name == signal), None)
            exited = by_name or -(_number(signal) or 0) or int(event.value("code") or 1)
            found.setdefault(rank, _of_code(exited, event.at))
    if not evidence.of("elastic."):
        for event in evidence.of("slurm.task_exit"):
            how = event.value("how") or ""
            killed = next((-number for word, number in _WORDS_OF_SIGNALS if how.startswith(word)), None)
            failure = _of_code(killed or int(event.value("code") or 1), event.at)
            for rank in _numbers(event.value("task") or ""):
                found.setdefault(rank, failure)
    return found


def _completed(evidence: LogEvidence) -> set[int]:
    """Return the ranks that ended normally: by their own last line, or because torchrun's table does not list them.

    The table of recent releases lists all processes with an exit code other than 0, also those that torchrun ended
    (SubprocessContext._poll in torch/distributed/elastic/multiprocessing/api.py); older ones list only the first.
    """
    ended = {mark.rank for mark in evidence.marks if mark.kind == f"{MARK}end" and mark.rank is not None}
    entries = evidence.of("elastic.entry")
    signalled = {event.value("pid") for event in evidence.of("elastic.closing")}
    is_complete = signalled and signalled <= {event.value("pid") for event in entries}
    if is_complete and all(event.value("rank") == event.value("local_rank") for event in entries):
        logged = {one.rank for one in (*evidence.events, *evidence.marks) if one.rank is not None}
        ended |= logged - {_number(event.value("rank")) for event in entries}
    return ended


def hosts_of_tasks(evidence: LogEvidence) -> dict[int, str]:
    """Return the hosts of the tasks that srun reports as ended, by rank; empty if torchrun started the ranks."""
    if evidence.of("elastic."):
        return {}
    exits = ((event.value("node"), event.value("task")) for event in evidence.of("slurm.task_exit"))
    return {rank: node for node, tasks in exits if node and tasks for rank in _numbers(tasks)}


def _of_code(code: int, at: float | None) -> Failure:
    signal = -code if code < 0 else code - 128 if code > 128 else 0
    if signal == 15:
        return Failure("SIGTERMException", "ended by signal 15 (SIGTERM)", at)
    if signal == 6:
        # Aborted by C code, which may have logged the reason elsewhere.
        return Failure(_GONE, "", at)
    if signal in _SIGNALS:
        return Failure(_SIGNALS[signal], f"ended by signal {signal} ({_SIGNALS[signal]})", at)
    return Failure("exit code", str(code), at)


def _numbers(text: str, most: int = 4096) -> list[int]:
    """Parse ``0-2,5``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = _number(first.strip()), _number((last or first).strip())
        if low is not None and high is not None:
            found += range(low, min(high, low + most) + 1)
    return found


def _with_unlabelled(
    evidence: LogEvidence, found: dict[int, Failure], exits: Mapping[int, Failure]
) -> dict[int, Failure]:
    """Assign an exception without a rank to failed ranks in a table that have none of their own."""
    aftermath = LaterEvents(evidence)
    alone = [event for event in exceptions(evidence) if event.rank is None and not aftermath.outlived(event)]
    open_ones = [rank for rank, failure in found.items() if failure is exits.get(rank) and failure.kind == "exit code"]
    if not alone or not open_ones:
        return found
    cause = failure_of(cause_in_chain(alone))
    same = len({(event.value("type"), event.value("message")) for event in alone}) == 1
    first = min(open_ones, key=lambda rank: (exits[rank].at or 0.0, rank))
    for rank in open_ones if same else [first]:
        found[rank] = msgspec.structs.replace(cause, at=exits[rank].at)
    return found


# Collectives in messages of the watchdog.


class _GroupLabel(NamedTuple):
    """The process group in a message: ``[PG ID 0 PG GUID 0(default_pg) Rank 1]``.

    ``number``: local to the process; ``name``: the same on all ranks; ``rank``: within the group.
    """

    number: str
    name: str
    description: str
    rank: int | None

    @property
    def is_default(self) -> bool:
        """Whether it is the group of all ranks, or the message names none."""
        if self.name or self.description:
            return self.description == "default_pg" or (self.name == "0" and not self.description)
        return self.number in ("", "0")


_LABEL = re.compile(
    r"\[(?:PG (?:ID )?(?P<number>\d+) "
    r"(?:PG GUID (?P<name>[^\s(\]]{1,200}))?(?:\s?\((?P<description>[^)]{0,200})\))? ?)?"
    r"Rank (?P<rank>\d+)\]"
)


def _label(event: Event) -> _GroupLabel:
    found = _LABEL.search(event.text)
    if found is None:
        return _GroupLabel("", "", "", _number(event.value("rank")) if event.kind == WATCHDOG else None)
    parts = found.groupdict(default="")
    return _GroupLabel(parts["number"], parts["name"], parts["description"], _number(parts["rank"]))


def _calls(evidence: LogEvidence) -> dict[int, RecorderFacts]:
    """Return the groups of each rank and the collectives that it waits in, from its watchdog."""
    by_rank: dict[int, list[Event]] = {}
    for event in evidence.of(*_WATCHDOG_KINDS):
        if (rank := rank_of(event)) is not None:
            by_rank.setdefault(rank, []).append(event)
    shared = _shared_numbers(evidence)
    return {rank: _recorder(rank, events, shared) for rank, events in by_rank.items()}


def _shared_numbers(evidence: LogEvidence) -> frozenset[str]:
    """Return the group numbers with one meaning on all ranks: ranks within the group are global ranks."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for event in evidence.of(*_WATCHDOG_KINDS):
        label, rank = _label(event), event.rank
        if label.number and not label.name and rank is not None and label.rank is not None:
            pairs.setdefault(label.number, []).append((label.rank, rank))
    return frozenset(number for number, found in pairs.items() if all(inner == rank for inner, rank in found))


def _recorder(rank: int, events: Sequence[Event], shared: frozenset[str]) -> RecorderFacts:
    by_sequence = {
        event.value("seq") or event.value("work"): _label(event) for event in events if event.kind in _COUNTERS[:2]
    }
    groups: dict[str, ProcessGroup] = {}
    collectives: dict[tuple[str, int], Collective] = {}
    for event in events:
        label = _label(event)
        if not label.number and not label.name:
            label = by_sequence.get(event.value("seq"), label)
        name = _group_name(label, rank, shared)
        known = groups.setdefault(name, ProcessGroup(name, label.description))
        if event.kind in _COUNTERS:
            groups[name] = msgspec.structs.replace(known, **_counts(event, known))
        elif (call := _call(event, name)) is not None:
            collectives.setdefault((name, call.sequence), call)
    oldest_first = sorted(collectives.values(), key=lambda call: (call.group, call.sequence))
    return RecorderFacts(groups=tuple(groups.values()), collectives=tuple(oldest_first))


def _group_name(label: _GroupLabel, rank: int, shared: frozenset[str]) -> str:
    if label.name:
        return label.name
    if label.is_default or label.description == "default_pg":
        return "0"
    return label.number if label.number in shared else f"{label.number} of rank {rank}"


def _counts(event: Event, known: ProcessGroup) -> dict[str, int | None]:
    """Return the counters of an event; torch counts from 1, and prints 0 or -1 before the first."""
    counts = {"enqueued": _number(event.value("enq")) or None, "completed": _number(event.value("done")) or None}
    return {
        name: max((value for value in (count, getattr(known, name)) if value is not None), default=None)
        for name, count in counts.items()
    }


def _call(event: Event, group: str) -> Collective | None:
    """Return the collective that timed out. Messages before torch 2.1 do not number it."""
    named = event.named
    sequence, operation = _number(named.get("seq")), named.get("op", "")
    if sequence is None or not operation:  # the message is cut
        return None
    ran, limit = _number(named.get("ran")), _number(named.get("timeout"))
    return Collective(
        group,
        sequence,
        _OPERATIONS.get(operation, operation.lower()),
        "nccl",
        is_p2p=operation in ("SEND", "RECV", "RECVANYSOURCE"),
        input_sizes=_sizes(named.get("nin")),
        output_sizes=_sizes(named.get("nout")),
        at=event.at - ran / 1000 if event.at is not None and ran is not None else None,
        timeout=limit / 1000 if limit is not None else None,
    )


def _sizes(text: str | None) -> tuple[tuple[int, ...], ...]:
    count = _number(text)
    return ((count,),) if count is not None else ()

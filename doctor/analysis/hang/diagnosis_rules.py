"""The diagnosis of a hang or failed run: one for a job, however many symptoms it has.

A run hangs if a rank makes no progress within its own limit and some rank waits for another. Ranks that are all busy in
one place are not a hang, however long that takes. The rules are ordered by cause: a dead rank before the ranks that
wait for it, an exhausted loader before the calls that no longer match, different calls before late ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from doctor.analysis.hang.collective_mismatch import (
    OF_GLOO,
    Divergence,
    MismatchGroup,
    divergences,
    gloo_timeouts,
    largest_first,
    mismatches,
    reshaped,
)
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.different_members import ranks_by_members
from doctor.analysis.hang.different_roots import ranks_by_root
from doctor.analysis.hang.exits import RunEnd, ending_of, interrupted_waits
from doctor.analysis.hang.left_loops import ranks_that_left
from doctor.analysis.hang.missing_ranks import (
    diverged_ranks,
    late_ranks,
    ranks_by_count,
    ranks_by_gpu,
    ranks_by_stack,
    ranks_in_unrecorded_call,
)
from doctor.analysis.hang.one_sided_calls import one_sided_call
from doctor.analysis.hang.rank_state import WITH_ALL, JobState, is_of_device
from doctor.analysis.hang.recorder_evidence import ranks_by_recorder
from doctor.analysis.hang.uneven_loaders import uneven_of, uneven_of_calls
from doctor.analysis.hang.wait_graph import CollectiveNode, missing_from, wait_for_one_another
from doctor.core.facts import Collective
from doctor.core.job import Job

_DIAGNOSES: WeakKeyDictionary[Job, Diagnosis | None] = WeakKeyDictionary()
_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
"""Bytes of an element, by torch's type names; 1 for all others."""


SNAPSHOT = 0.8
"""Confidence of a diagnosis from one stack of each rank, as a share of that from two equal ones."""


def diagnose_stall(job: Job) -> Diagnosis | None:
    """Why a job hangs or ended in an error; ``None`` if it does neither. Computed once for a job."""
    if job not in _DIAGNOSES:
        _DIAGNOSES[job] = _diagnose(job)
    return _DIAGNOSES[job]


def silent_mismatches(job: Job) -> tuple[Divergence, ...]:
    """Completed calls in which ranks exchanged tensors of different sizes or types: the newest one of each group.

    In dumps without any, calls with different shapes of the same number of elements."""
    states = JobState(job)
    return tuple(mismatches(states)) or (tuple(reshaped(states)) if states.is_from_dumps else ())


def _diagnose(job: Job) -> Diagnosis | None:
    states = JobState(job)
    by_error = interrupted_waits(states)
    by_count = gloo_timeouts(states)
    if by_error or by_count:
        states = JobState(job, {**by_count, **by_error}, ended_by_count=bool(by_count))
    ending = ending_of(states)
    if (ending is None or ending.nature == "peer") and (unheard := _unheard_by_gloo(states)) is not None:
        return unheard
    if ending is not None and ending.nature in ("own", "outside"):
        confidence = 0.95 if ending.failure else 0.85
        died = Diagnosis(states, "died", ending.ranks, confidence, ending=ending)
        return _aborted_by_gloo(states, ending) or died
    if ending is not None and ending.left and (left := ranks_that_left(states)) is not None:
        return Diagnosis(states, "left", left.ranks, 0.9, ending=ending, left=left)
    if ending is None and "peer" in by_error.values() and (left := ranks_that_left(states)) is not None and left.ended:
        return Diagnosis(states, "left", left.ranks, 0.9, left=left)  # some ranks may not have lost it yet
    found = _hang(states)
    if ending is not None and not _is_more_specific(found, ending):
        return Diagnosis(states, "died", ending.ranks, 0.9 if ending.nature == "mismatch" else 0.4, ending=ending)
    if found and states.is_snapshot:
        return replace(found, confidence=round(found.confidence * SNAPSHOT, 2))
    if found and states.ungathered and not states.is_from_dumps:
        # The cause may be a rank that did not take part.
        return replace(found, confidence=round(found.confidence * 0.7, 2))
    return found


def _is_more_specific(found: Diagnosis | None, ending: RunEnd) -> bool:
    """Whether a hang explains more than an end that is itself a consequence: peers that were lost, or that left."""
    if found is None or found.kind in ("together", "undetermined"):
        return False
    return found.kind == "loader-ended" or not (ending.left or ending.nature == "mismatch")


def _aborted_by_gloo(states: JobState, ending: RunEnd) -> Diagnosis | None:
    """The diagnosis of ranks that ended without a Python error, if the others differ in their last call over Gloo.

    Gloo ends the process that receives more bytes than its buffer holds (``op.preamble.length <= op.nbytes``), so a
    missing rank passed less than the largest: it counts as one of those that passed the least. With it, these may be
    the majority that made their usual call, while the others made one that only they make."""
    if ending.failure is not None and ending.failure.kind != "SIGABRT":
        return None
    divergence = next(_newest_over_gloo(states), None)
    return _with_sizes(states, divergence, ending, 0.8) if divergence is not None else None


def _unheard_by_gloo(states: JobState) -> Diagnosis | None:
    """The same if a rank failed by a lost peer in such a call, and since then nothing was heard from a single member,
    whose call is not known.

    Without that member, which Gloo aborted, two calls of one rank each would be a tie."""
    lost = [one for one in states.ranks.values() if one.ended_waiting == "peer"]
    since = min((one.failure.at for one in lost if one.failure and one.failure.at is not None), default=None)
    if since is None:
        return None
    for divergence in _newest_over_gloo(states):
        known = {rank for one in divergence.variants for rank in one.ranks}
        unheard = [
            rank
            for rank in states.members.get(divergence.group, ())
            if rank not in known and not _was_heard(states, rank, since)
        ]
        if len(unheard) == 1 and any(one.rank in known for one in lost):
            ending = RunEnd((unheard[0],), unheard[0], None, "own", tuple(one.rank for one in lost))
            return _with_sizes(states, divergence, ending, 0.7)
    return None


def _was_heard(states: JobState, rank: int, since: float) -> bool:
    one = states.ranks.get(rank)
    at = one.progress.at if one is not None and one.progress is not None else None
    return one is not None and (at is None or at >= since)


def _newest_over_gloo(states: JobState) -> Iterator[Divergence]:
    """The newest call of each group over Gloo, if ranks passed different sizes or types in it."""
    for divergence in mismatches(states, OF_GLOO):
        newest = max(one.entered(divergence.group) for one in states.ranks.values())
        if divergence.sequence == newest and all(one.entry.backend == "gloo" for one in divergence.variants):
            yield divergence


def _with_sizes(states: JobState, divergence: Divergence, ending: RunEnd, confidence: float) -> Diagnosis:
    whole = msgspec.structs.replace(divergence, variants=_with_aborted(divergence.variants, ending.ranks))
    lines_known = all(one.site.frame for one in whole.variants)
    if lines_known and (one := one_sided_call(whole)) is not None:
        return Diagnosis(states, "one-sided", one.ranks, confidence, ending=ending, divergence=whole, one_sided=one)
    return Diagnosis(states, "differ", whole.odd_ranks, confidence, ending=ending, divergence=whole)


def _with_aborted(variants: Iterable[MismatchGroup], aborted: tuple[int, ...]) -> tuple[MismatchGroup, ...]:
    others = [
        msgspec.structs.replace(one, ranks=tuple(rank for rank in one.ranks if rank not in aborted)) for one in variants
    ]
    least = min(others, key=lambda one: _input_bytes(one.entry))
    joined = msgspec.structs.replace(least, ranks=tuple(sorted((*least.ranks, *aborted))))
    return largest_first([joined, *(one for one in others if one.ranks and one is not least)])


def _input_bytes(call: Collective) -> int:
    return sum(map(prod, call.input_sizes)) * _BYTES.get("".join(call.types[:1]), 1)


def _hang(states: JobState) -> Diagnosis | None:
    states.in_deadlock = wait_for_one_another(states)
    if not states.stuck or len(states.ranks) + len(states.unseen) < 2:
        return None
    ranks = states.ranks.values()
    is_held = not states.unseen and any(one.is_held for one in ranks)
    if is_held and all(one.waits or one.is_held or not one.is_stuck for one in ranks):
        return None  # the ranks that wait will be joined by those that the doctor holds, or has just released
    rules = (rule(states) for rule in (_RULES_FOR_DUMPS if states.is_from_dumps else _RULES))
    found = next((diagnosis for diagnosis in rules if diagnosis is not None), None)
    return _without_held(found) if found is not None and is_held else found


def _without_held(found: Diagnosis) -> Diagnosis:
    """The same without ranks that the doctor holds, unless it is only these: they go on in any case."""
    free = tuple(rank for rank in found.ranks if not found.states.ranks[rank].is_held)
    return msgspec.structs.replace(found, ranks=free) if free else found


def _stopped(states: JobState) -> Diagnosis | None:
    return _unresponsive(states, [rank for rank, one in states.ranks.items() if one.state == "stopped"], 0.95)


def _loader_ended(states: JobState) -> Diagnosis | None:
    uneven = uneven_of(states)
    if uneven is None:
        return None
    return Diagnosis(states, "loader-ended", uneven.odd, 0.9 if uneven.certain else 0.7, uneven=uneven)


def _left(states: JobState) -> Diagnosis | None:
    left = ranks_that_left(states)
    return Diagnosis(states, "left", left.ranks, 0.9, left=left) if left is not None else None


def _loader_ended_by_calls(states: JobState) -> Diagnosis | None:
    divergence = next(divergences(states), None)
    uneven = uneven_of_calls(states, divergence) if divergence is not None else None
    if uneven is None:
        return None
    return Diagnosis(states, "loader-ended", uneven.odd, 0.7, uneven=uneven, divergence=divergence)


def _silent(states: JobState) -> Diagnosis | None:
    silent = [rank for rank, one in states.ranks.items() if one.state == "silent" and not one.stack_wait]
    return _unresponsive(states, sorted((*silent, *states.unseen)), 0.85)


def _unresponsive(states: JobState, ranks: list[int], confidence: float) -> Diagnosis | None:
    """The diagnosis of these ranks, if there are any and others wait."""
    is_awaited = bool({*states.stuck, *states.waiting}.difference(ranks))
    return Diagnosis(states, "unresponsive", tuple(ranks), confidence) if ranks and is_awaited else None


def _behind(states: JobState) -> Diagnosis | None:
    """Ranks whose device has not finished a collective that others completed; Gloo's calls run on the host."""
    newest: dict[str, int] = {}
    for one in states.ranks.values():
        for group, entry in one.pending.items():
            newest[group] = max(newest.get(group, 0), entry.sequence)
    behind = tuple(
        rank
        for rank, one in states.ranks.items()
        if any(
            entry.sequence < newest[group] and entry.operation in WITH_ALL and is_of_device(entry)
            for group, entry in one.pending.items()
        )
    )
    return Diagnosis(states, "behind", behind, 0.8) if behind and len(behind) * 2 < len(states.ranks) else None


def _together(states: JobState) -> Diagnosis | None:
    if not states.waiting:
        return None
    if states.is_snapshot:
        # A healthy job spends much of its time in collectives.
        return Diagnosis(states, "undetermined", states.waiting, 0.0)
    calls = {(one.wait.group, one.wait.sequence) for one in states.ranks.values() if one.wait is not None}
    by_stack = {one.site.text for one in states.ranks.values() if one.site is not None and one.stack_wait}
    # A large call that is made for the first time may still complete.
    waiting = [states.ranks[rank].progress for rank in states.waiting]
    early = all(one is not None and (one.idle or 0.0) < (one.patience or 0.0) for one in waiting)
    if len(calls) == 1 and not missing_from(states, CollectiveNode(*calls.pop())):
        return Diagnosis(states, "together", states.waiting, 0.5, within_limit=early)
    everybody = len(states.ranks) + len(states.unseen) + (states.ungathered if states.is_sampled else 0)
    if not states.has_recorder and len(by_stack) == 1 and len(states.waiting) == everybody:
        return Diagnosis(states, "together", states.waiting, 0.3, within_limit=early)
    return Diagnosis(states, "undetermined", states.waiting, 0.0)


_RULES: tuple[Callable[[JobState], Diagnosis | None], ...] = (
    _stopped,
    _left,
    _loader_ended,
    diverged_ranks,
    ranks_by_root,
    ranks_by_members,
    _silent,
    _behind,
    ranks_in_unrecorded_call,
    late_ranks,
    ranks_by_count,
    ranks_by_stack,
    ranks_by_gpu,
    _together,
)
_RULES_FOR_DUMPS: tuple[Callable[[JobState], Diagnosis | None], ...] = (
    _loader_ended_by_calls,
    diverged_ranks,
    ranks_by_recorder,
)

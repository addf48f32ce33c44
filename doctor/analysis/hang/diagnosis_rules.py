"""Why a run stands still, or ended: one diagnosis a job, whatever the number of its symptoms.

A run stands still where a rank makes no progress by its own pace and somebody waits for somebody. Ranks that are all
busy in one place, however long, are no hang. Rules are asked in the order in which one explains the next: a dead rank
before those that miss it, a loader that ended before the calls that no longer meet, calls that differ before whoever
happens to be late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

from doctor.analysis.hang.collective_mismatch import Divergence, divergences, mismatches, reshaped, timed_out_by_gloo
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.exits import RunEnd, ending_of, waited_in_vain
from doctor.analysis.hang.gloo_abort import aborted_ranks
from doctor.analysis.hang.missing_ranks import late_ranks
from doctor.analysis.hang.rank_state import WITH_ALL, JobState, RankState, is_of_device
from doctor.analysis.hang.recorder_evidence import ranks_by_recorder
from doctor.analysis.hang.split_group import split_ranks
from doctor.analysis.hang.stack_evidence import ranks_by_stack
from doctor.analysis.hang.uneven_loaders import uneven_of, uneven_of_calls
from doctor.analysis.hang.wait_graph import CollectiveNode, missing_from
from doctor.core.job import Job

_DIAGNOSES: WeakKeyDictionary[Job, Diagnosis | None] = WeakKeyDictionary()


def diagnose_stall(job: Job) -> Diagnosis | None:
    """Why a job stands still, or ended in an error; ``None`` where it does neither. Worked out once a job."""
    if job not in _DIAGNOSES:
        _DIAGNOSES[job] = _diagnose(job)
    return _DIAGNOSES[job]


def silent_mismatches(job: Job) -> tuple[Divergence, ...]:
    """Calls of a job in which ranks exchanged tensors of different sizes or types, and which ended all the same: one of
    each group, the newest; in dumps without any, those of different shapes with as many elements."""
    scene = JobState(job)
    return tuple(mismatches(scene)) or (tuple(reshaped(scene)) if scene.is_left_behind else ())


def _diagnose(job: Job) -> Diagnosis | None:
    scene = JobState(job)
    in_vain = waited_in_vain(scene)
    by_count = timed_out_by_gloo(scene)
    if in_vain or by_count:
        scene = JobState(job, {**by_count, **in_vain}, ended_by_count=bool(by_count))
    ending = ending_of(scene)
    if ending is not None and ending.nature == "own":
        confidence = 0.95 if ending.failure else 0.85
        died = Diagnosis(scene, "died", ending.ranks, confidence, ending=ending)
        return aborted_ranks(scene, ending) or died
    found = _hang(scene)
    if ending is not None and not _is_more_specific(found, ending):
        return Diagnosis(scene, "died", ending.ranks, 0.9 if ending.nature == "mismatch" else 0.4, ending=ending)
    return _less_sure(found) if found else None


def _is_more_specific(found: Diagnosis | None, ending: RunEnd) -> bool:
    """Whether a hang tells more than an end that is itself a consequence: peers that were lost, or left."""
    if found is None or found.kind in ("together", "untold"):
        return False
    return found.kind == "loader-ended" or not (ending.left or ending.nature == "mismatch")


def _less_sure(found: Diagnosis) -> Diagnosis:
    """Less sure where ranks were not asked: the culprit may be among them."""
    is_less = found.scene.ungathered and not found.scene.is_left_behind
    return replace(found, confidence=round(found.confidence * 0.7, 2)) if is_less else found


def _hang(scene: JobState) -> Diagnosis | None:
    if not scene.stuck or len(scene.ranks) + len(scene.unseen) < 2:
        return None
    found = (rule(scene) for rule in (_OF_DUMPS if scene.is_left_behind else _RULES))
    return next((diagnosis for diagnosis in found if diagnosis is not None), None)


def _stopped(scene: JobState) -> Diagnosis | None:
    stopped = tuple(rank for rank, standing in scene.ranks.items() if standing.state == "stopped")
    return Diagnosis(scene, "unresponsive", stopped, 0.95) if stopped and _is_missed(scene, stopped) else None


def _loader_ended(scene: JobState) -> Diagnosis | None:
    uneven = uneven_of(scene)
    if uneven is None:
        return None
    return Diagnosis(scene, "loader-ended", uneven.odd, 0.9 if uneven.certain else 0.7, uneven=uneven)


def _split_loops(scene: JobState) -> Diagnosis | None:
    parting = next(divergences(scene), None)
    uneven = uneven_of_calls(scene, parting) if parting is not None else None
    if uneven is None:
        return None
    return Diagnosis(scene, "loader-ended", uneven.odd, 0.7, uneven=uneven, parting=parting)


def _silent(scene: JobState) -> Diagnosis | None:
    silent = [rank for rank, one in scene.ranks.items() if one.state == "silent" and not one.stack_wait]
    ranks = tuple(sorted((*silent, *scene.unseen)))
    return Diagnosis(scene, "unresponsive", ranks, 0.85) if ranks and _is_missed(scene, ranks) else None


def _is_missed(scene: JobState, ranks: Iterable[int]) -> bool:
    return bool({*scene.stuck, *scene.waiting}.difference(ranks))


def _behind(scene: JobState) -> Diagnosis | None:
    """Ranks whose device has not finished a collective that it entered and others have left: only devices run on their
    own, so Gloo's are out of this."""
    newest: dict[str, int] = {}
    for standing in scene.ranks.values():
        for group, entry in standing.pending.items():
            newest[group] = max(newest.get(group, 0), entry.sequence)
    behind = tuple(
        rank
        for rank, standing in scene.ranks.items()
        if any(
            entry.sequence < newest[group] and entry.operation in WITH_ALL and is_of_device(entry)
            for group, entry in standing.pending.items()
        )
    )
    return Diagnosis(scene, "behind", behind, 0.8) if behind and len(behind) * 2 < len(scene.ranks) else None


def _together(scene: JobState) -> Diagnosis | None:
    """All who wait have met in the same call, and it does not end."""
    if not scene.waiting:
        return None
    meetings = {(one.wait.group, one.wait.sequence) for one in scene.ranks.values() if one.wait is not None}
    by_stack = {one.site.text for one in scene.ranks.values() if one.site is not None and one.stack_wait}
    early = all(_is_early(scene.ranks[rank]) for rank in scene.waiting)
    if len(meetings) == 1 and not missing_from(scene, CollectiveNode(*meetings.pop())):
        return Diagnosis(scene, "together", scene.waiting, 0.5, within_limit=early)
    if not scene.has_recorder and len(by_stack) == 1 and len(scene.waiting) == len(scene.ranks) + len(scene.unseen):
        return Diagnosis(scene, "together", scene.waiting, 0.3, within_limit=early)
    return Diagnosis(scene, "untold", scene.waiting, 0.0)


def _is_early(standing: RankState) -> bool:
    """Whether the call may still take its time: a large one, made for the first time."""
    progress = standing.progress
    return progress is not None and (progress.idle or 0.0) < (progress.patience or 0.0)


_RULES: tuple[Callable[[JobState], Diagnosis | None], ...] = (
    _stopped,
    _loader_ended,
    split_ranks,
    _silent,
    _behind,
    late_ranks,
    ranks_by_stack,
    _together,
)
_OF_DUMPS: tuple[Callable[[JobState], Diagnosis | None], ...] = (_split_loops, split_ranks, ranks_by_recorder)

"""Without flight recorders: what stacks alone tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from doctor.analysis.call_sites import site_of
from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.missing_ranks import of_late_ranks
from doctor.analysis.hang.one_sided_calls import one_sided_call
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.hang.split_group import of_split_group
from doctor.core.facts import Collective

_SENDING, _RECEIVING = ("send", "send_object_list"), ("recv", "recv_object_list")


def ranks_by_stack(scene: JobState) -> Diagnosis | None:
    """Of ranks that wait by their stacks, and of those that do not."""
    if not scene.waiting:
        return None
    late = [rank for rank, standing in scene.ranks.items() if _is_late(standing)]
    if late:
        return of_late_ranks(scene, late)
    return _lonely_transfers(scene) or _split_by_stacks(scene)


def _is_late(standing: RankState) -> bool:
    """Whether a stack is known and shows no wait."""
    has_stack = standing.progress is not None and bool(standing.progress.stack)
    return has_stack and not standing.waits and not standing.may_wait_in_backward


def _lonely_transfers(scene: JobState) -> Diagnosis | None:
    """Sends that nobody receives, and receives that nobody sends: Gloo's recorder does not show them."""
    senders = tuple(rank for rank, one in scene.ranks.items() if one.stack_wait in _SENDING)
    receivers = tuple(rank for rank, one in scene.ranks.items() if one.stack_wait in _RECEIVING)
    if bool(senders) == bool(receivers):
        return None
    return Diagnosis(scene, "deadlock", senders or receivers, 0.7)


def _split_by_stacks(scene: JobState) -> Diagnosis | None:
    """Ranks that wait in different calls, and could not have come so far together."""
    waiting: dict[tuple[str, str, str], list[RankState]] = {}
    for one in scene.ranks.values():
        if one.recorder is None and one.site is not None and (one.waits or one.may_wait_in_backward):
            waiting.setdefault((one.site.operation, one.site.place, one.site.words), []).append(one)
    if len(waiting) < 2:
        return None
    parties = [_mismatch_group_of(key, members) for key, members in waiting.items()]
    ordered = tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks[0])))
    parting = Divergence("", 0, "site", ordered)
    return replace(of_split_group(scene, parting, one_sided_call(parting)), confidence=0.6)


def _mismatch_group_of(key: tuple[str, str, str], members: Sequence[RankState]) -> MismatchGroup:
    stack = members[0].progress.stack if members[0].progress else ()
    call = Collective("", 0, key[0], frames=stack)
    return MismatchGroup(tuple(one.rank for one in members), call, site_of(key[0], stack), key, is_usual=False)

"""Ranks that parted: members of a group that made different calls under one number."""

from __future__ import annotations

from doctor.analysis.hang.collective_mismatch import Divergence, divergences
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.one_sided_calls import OneSidedCall, one_sided_call
from doctor.analysis.hang.rank_state import JobState


def split_ranks(scene: JobState) -> Diagnosis | None:
    """Of the largest group that stands still and whose ranks parted."""
    stuck = set(scene.stuck)
    for parting in divergences(scene):
        if stuck.intersection(scene.members.get(parting.group, ())):
            return of_split_group(scene, parting, one_sided_call(parting))
    return None


def of_split_group(scene: JobState, parting: Divergence, side: OneSidedCall | None) -> Diagnosis:
    """The diagnosis of ranks that parted so; ``side``: where one call is made by some of them only."""
    if side is None:
        blamed = tuple(sorted(rank for party in parting.odd for rank in party.ranks))
        return Diagnosis(scene, "differ", blamed, 0.7 if parting.is_even else 0.9, parting=parting)
    sure = bool(side.call.site.condition) or not parting.is_even
    return Diagnosis(scene, "one-sided", side.ranks, 0.95 if sure else 0.8, parting=parting, side=side)

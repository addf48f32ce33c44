"""Ranks that make the same new process group and gave different ranks for it.

torch.distributed numbers the calls of ``new_group``, which all ranks make in the same order with the same ranks. Each
rank knows number and ranks of its call from its own stack, while it waits there for the others.
"""

from __future__ import annotations

from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup, largest_first
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.rank_state import JobState
from doctor.core.facts import Collective
from doctor.knowledge.waiting_functions import OF_GROUPS


def ranks_by_members(states: JobState) -> Diagnosis | None:
    """The diagnosis of the ranks that gave other ranks for a group than most; of all of them if there is no majority.

    Only in a call of the same number on all ranks that wait: in one of another number, a rank may just be earlier."""
    creating = [one for one in states.ranks.values() if one.waits and one.stack_wait in OF_GROUPS]
    given = {one.rank: made for one in creating if (made := one.made_group) is not None}
    if len({number for number, _ in given.values()}) != 1 or len(given) < len(creating):
        return None
    by_members: dict[tuple[int, ...], list[int]] = {}
    for rank, (_, members) in given.items():
        by_members.setdefault(members, []).append(rank)
    if len(by_members) < 2:
        return None
    variants = largest_first(_variant(states, ranks, members) for members, ranks in by_members.items())
    divergence = Divergence("", 0, "members", variants)
    return Diagnosis(states, "differ", divergence.odd_ranks, 0.8 if divergence.is_tie else 0.95, divergence=divergence)


def _variant(states: JobState, ranks: list[int], members: tuple[int, ...]) -> MismatchGroup:
    first = states.ranks[ranks[0]]
    site = first.site
    assert site is not None  # of a rank that waits
    entry = Collective(f"ranks {', '.join(map(str, members))}", 0, "new_group", frames=first.stack)
    return MismatchGroup(tuple(sorted(ranks)), entry, site, ("new_group", members), is_usual=False)

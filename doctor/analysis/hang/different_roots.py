"""Ranks that wait in one call of a group and name different ranks as its source or destination.

Flight recorders have no root. Each rank knows the one that it named from its own stack, while it waits in the call. A
rank whose part of the call is done has gone on: its root in the next call from the same line shows what is usual.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from doctor.analysis.call_sites import SiteKey, site_key
from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.core.facts import Collective

_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Operations with a source or destination."""


def ranks_by_root(states: JobState) -> Diagnosis | None:
    """The diagnosis of the ranks that name another root than most, in a call that two ranks name different ones in."""
    named: dict[tuple[str, SiteKey], dict[int, Collective]] = {}
    for one in states.ranks.values():
        call = _call_with_root(one, states)
        if call is not None:
            named.setdefault((call.group, site_key(call)), {})[one.rank] = call
    for (group, key), calls in named.items():
        sequence = _first_that_differs(calls)
        if sequence is None:
            continue
        roots = Counter(call.root for call in calls.values())
        found = (_variant(states, calls, root, key) for root in roots)
        variants = tuple(sorted(found, key=lambda one: (-len(one.ranks), one.entry.root != 0, one.ranks[0])))
        divergence = Divergence(group, sequence, "root", variants)
        confidence = 0.7 if divergence.is_tie else 0.9
        return Diagnosis(states, "differ", divergence.odd_ranks, confidence, divergence=divergence)
    return None


def _call_with_root(one: RankState, states: JobState) -> Collective | None:
    """The call that a rank waits in with its root, as a rank of the job; ``None`` if one of them is not known."""
    call, root = one.wait, one.progress.root if one.progress else None
    if call is None or root is None or call.operation not in _ROOTED or not one.waits:
        return None
    members = states.members.get(call.group, ())
    return replace(call, root=members[root]) if 0 <= root < len(members) else None


def _first_that_differs(calls: dict[int, Collective]) -> int | None:
    roots: dict[int, set[int | None]] = {}
    for call in calls.values():
        roots.setdefault(call.sequence, set()).add(call.root)
    return min((sequence for sequence, found in roots.items() if len(found) > 1), default=None)


def _variant(states: JobState, calls: dict[int, Collective], root: int | None, key: SiteKey) -> MismatchGroup:
    ranks = tuple(sorted(rank for rank, call in calls.items() if call.root == root))
    site = states.ranks[ranks[0]].site
    assert site is not None  # of a rank that waits
    return MismatchGroup(ranks, calls[ranks[0]], site, key, is_usual=len(ranks) > 1)

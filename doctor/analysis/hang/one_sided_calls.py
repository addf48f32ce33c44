"""Whether a call is made by some ranks only, or different calls by all: what makes ranks part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from doctor.analysis.call_sites import conditions_of
from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup

_LINE = re.compile(r"line (\d+)$")


class OneSidedCall(NamedTuple):
    """``call``: the one that only its party makes, or that a party passes over. ``others``: what is called in its
    place. ``ranks``: who is to blame: those with the call where they are the few, else those without. ``extra``: it is
    the blamed ranks that make the call."""

    call: MismatchGroup
    others: MismatchGroup
    ranks: tuple[int, ...]
    extra: bool


def one_sided_call(parting: Divergence) -> OneSidedCall | None:
    """The call that only some ranks make; ``None`` where all make one, and not the same, or no line of a call is known.

    Tells, the surest first: one of the lines stands under a condition on the rank and the other does not stand in
    another branch of it; the call that usually follows was made by some; one call was never made before, the other one
    was; a framework makes one of them for all ranks; most ranks make a call that a few pass over.
    """
    if len({party.key for party in parting.parties}) == 1 or not any(party.site.frame for party in parting.parties):
        return None
    parting = parting._replace(parties=_distinguished(parting.parties))
    found = _by_condition(parting)
    if found is None and not _are_branches(parting.parties):
        found = _by_habit(parting) or _by_novelty(parting)
    found = found or _by_number(parting)
    return found if found and found.call.key != found.others.key else None


def _by_condition(parting: Divergence) -> OneSidedCall | None:
    under = [party for party in parting.parties if party.site.condition]
    free = [party for party in parting.parties if not party.site.condition]
    if not under or not free or _are_branches(parting.parties):
        return None
    return _made_by(under[0], free[0])


def _distinguished(parties: Sequence[MismatchGroup]) -> tuple[MismatchGroup, ...]:
    """The parties with the innermost condition of theirs that not all are under: ``if local_rank >= 0: main()`` is on
    the way to every call."""
    conditions = [conditions_of(party.entry.frames) for party in parties]
    common = set(conditions[0]).intersection(*conditions)
    own = [next((one for one in found if one not in common), "") for found in conditions]
    return tuple(
        party._replace(site=party.site._replace(condition=condition))
        for party, condition in zip(parties, own, strict=True)
    )


def _are_branches(parties: Sequence[MismatchGroup]) -> bool:
    """Whether calls stand in different branches of one ``if``."""
    return any(_is_same_if(parties[0], other) for other in parties[1:])


def _is_same_if(first: MismatchGroup, second: MismatchGroup) -> bool:
    lines = [_LINE.search(party.site.condition) for party in (first, second)]
    files = {party.site.frame.file for party in (first, second) if party.site.frame}
    is_same = bool(lines[0] and lines[1] and lines[0][1] == lines[1][1] and len(files) == 1)
    return is_same and first.site.condition != second.site.condition


def _by_habit(parting: Divergence) -> OneSidedCall | None:
    usual = next((party for party in parting.parties if party.key == parting.usual_next), None)
    others = [party for party in parting.parties if party is not usual]
    if usual is None:
        return None
    # The usual call is missing where something else follows that all make at some time; else that is one too many.
    return _passed_over(usual, others[0]) if others[0].is_usual else _made_by(others[0], usual)


def _by_novelty(parting: Divergence) -> OneSidedCall | None:
    for is_usual in (lambda party: party.is_usual, lambda party: not party.site.own):
        usual = [party for party in parting.parties if is_usual(party)]
        novel = [party for party in parting.parties if not is_usual(party)]
        if usual and novel:
            return _made_by(novel[0], usual[0])
    return None


def _by_number(parting: Divergence) -> OneSidedCall | None:
    if parting.is_even or not all(party.is_usual for party in parting.parties):
        return None
    return _passed_over(parting.parties[0], parting.parties[1])


def _made_by(call: MismatchGroup, others: MismatchGroup) -> OneSidedCall:
    """Those who make the call are to blame, unless they are most of the ranks."""
    extra = len(call.ranks) <= len(others.ranks)
    return OneSidedCall(call, others, call.ranks if extra else others.ranks, extra)


def _passed_over(call: MismatchGroup, others: MismatchGroup) -> OneSidedCall:
    """Those who do not make the call are to blame, unless they are most of the ranks."""
    extra = len(call.ranks) < len(others.ranks)
    return OneSidedCall(call, others, call.ranks if extra else others.ranks, extra)

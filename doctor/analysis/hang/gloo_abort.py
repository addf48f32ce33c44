"""Ranks that Gloo aborted because others sent more than they expected."""

from __future__ import annotations

from math import prod

from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup, mismatches
from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.exits import RunEnd
from doctor.analysis.hang.rank_state import JobState
from doctor.core.facts import Collective

_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
"""Bytes of an element, by torch's names; of the others 1."""


def aborted_ranks(scene: JobState, ending: RunEnd) -> Diagnosis | None:
    """Of ranks that are gone without an error of Python, where the others differ in the last call of theirs over Gloo.

    Gloo ends the process that receives more bytes than its buffer holds (``op.preamble.length <= op.nbytes``), so
    whoever is gone had fewer than the most: it counts with those that have the fewest.
    """
    if ending.failure is not None:
        return None
    for parting in mismatches(scene):
        newest = max(standing.entered(parting.group) for standing in scene.ranks.values())
        if parting.sequence == newest and all(party.entry.backend == "gloo" for party in parting.parties):
            return _with_the_gone(scene, ending, parting)
    return None


def _with_the_gone(scene: JobState, ending: RunEnd, parting: Divergence) -> Diagnosis:
    others = [party._replace(ranks=_without(party, ending.ranks)) for party in parting.parties]
    fewest = min(others, key=lambda party: _size(party.entry))
    joined = [
        party._replace(ranks=tuple(sorted((*party.ranks, *ending.ranks)))) if party is fewest else party
        for party in others
        if party.ranks or party is fewest
    ]
    ordered = tuple(sorted(joined, key=lambda party: (-len(party.ranks), party.ranks)))
    whole = parting._replace(parties=ordered)
    blamed = tuple(sorted(rank for party in whole.odd for rank in party.ranks))
    return Diagnosis(scene, "differ", blamed, 0.8, ending=ending, parting=whole)


def _without(party: MismatchGroup, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank in party.ranks if rank not in ranks)


def _size(call: Collective) -> int:
    """Bytes that a call gives."""
    return sum(map(prod, call.input_sizes)) * _BYTES.get("".join(call.types[:1]), 1)

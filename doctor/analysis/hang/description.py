"""A diagnosis in words and as evidence: who, where, since when, and where the others wait."""

from __future__ import annotations

from doctor.analysis.hang.diagnosis import Diagnosis
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.launch_origin import ranks_in_words
from doctor.core.facts import Collective

SHOWN = 8
"""Ranks whose place a finding shows: those to blame first."""


def stall_ranks(found: Diagnosis) -> str:
    """``rank 2 (training, epoch 1, batch 40)``: who is to blame, and where the first of them is."""
    place = found.first.place if found.first else ""
    return ranks_in_words(found.ranks) + (f" ({place})" if place else "")


def stall_waiters(found: Diagnosis) -> str:
    """``; ranks 0 and 2-7 have waited 12 s in all_reduce at train.py:54 (step)``; where nobody else waits ``, for 12
    s``; empty where that is not known either."""
    if not found.waiting:
        return f", for {found.seconds:.0f} s" if found.seconds else ""
    site, verb = found.waiting_at, "have" if len(found.waiting) > 1 else "has"
    waited = f" {found.seconds_waited:.0f} s" if found.seconds_waited else ""
    where = site.text if site else "a collective"
    return f"; {ranks_in_words(found.waiting)} {verb} waited{waited} in {where}"


def stall_evidence(found: Diagnosis) -> dict[str, object]:
    """Where the ranks stand, as data. The ranks to blame come first."""
    chosen = [*found.ranks, *(rank for rank in found.scene.ranks if rank not in found.ranks)]
    standings = [found.scene.ranks[rank] for rank in chosen if rank in found.scene.ranks]
    unseen = found.scene.unseen[:64] if found.scene.is_left_behind else ()
    times = {"seconds_without_progress": found.seconds, "seconds_waited": found.seconds_waited}
    return {
        **({"ranks_without_dumps": list(unseen)} if unseen else {}),
        "where": {str(one.rank): stall_location(one) for one in standings[:SHOWN]},
        "waiting_ranks": list(found.waiting[:64]),
        **{name: seconds for name, seconds in times.items() if seconds is not None},
    }


def stall_location(standing: RankState) -> str:
    """One rank in a line: ``stalled; training, epoch 0, batch 4; waits in all_gather at train.py:62; number 11 of group
    0``."""
    parts = [standing.state, standing.place]
    if standing.site is not None:
        verb = "waits in" if standing.waits or standing.may_wait_in_backward else "is at"
        parts += [f"{verb} {standing.site.text}", standing.site.condition]
    if standing.wait is not None:
        parts.append(numbered_call(standing.wait))
    return "; ".join(part for part in parts if part)


def numbered_call(entry: Collective, scene: JobState | None = None) -> str:
    """``number 11 of group 0``; where it is told how groups are called, ``number 11 of the default group``."""
    return f"number {entry.sequence} of {scene.name_of(entry.group) if scene else f'group {entry.group}'}"


def missed_call(found: Diagnosis) -> Collective | None:
    """The call that the first of the ranks to blame has not come to, and somebody waits in for it."""
    calls = (found.scene.ranks[rank].wait for rank in found.waiting)
    for call in calls:
        members = found.scene.members.get(call.group, ()) if call is not None and not call.is_p2p else ()
        for rank in found.ranks:
            standing = found.scene.ranks.get(rank)
            if call and rank in members and (standing is None or standing.entered(call.group) < call.sequence):
                return call
    return None

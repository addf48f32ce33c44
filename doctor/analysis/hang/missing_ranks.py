"""Ranks that have not come to where the others wait, and ranks that wait for one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from doctor.analysis.call_sites import LocalWork, is_point_to_point, local_work_of, site_key, site_of
from doctor.analysis.hang.collective_mismatch import Divergence, MismatchGroup
from doctor.analysis.hang.diagnosis import Diagnosis, Kind
from doctor.analysis.hang.exits import waited_in_vain
from doctor.analysis.hang.one_sided_calls import one_sided_call
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.hang.split_group import of_split_group
from doctor.analysis.hang.wait_graph import roots_of
from doctor.core.facts import Collective


def late_ranks(scene: JobState) -> Diagnosis | None:
    """Of whoever stands at the end of the graph of waits."""
    roots = roots_of(scene)
    if not roots:
        return None
    if roots[0].is_cycle:
        return of_circle(scene, roots[0].ranks)
    return of_late_ranks(scene, [rank for root in roots if not root.is_cycle for rank in root.ranks])


def of_late_ranks(scene: JobState, late: Sequence[int]) -> Diagnosis:
    """Those for whom the others wait, by what the first of them is about: all of them that are about the same."""
    kinds = {rank: _kind_of(scene.ranks.get(rank)) for rank in late}
    kind = kinds[late[0]]
    ranks = tuple(sorted(rank for rank in late if kinds[rank] == kind))
    standings = [scene.ranks[rank] for rank in ranks if rank in scene.ranks]
    is_early = bool(standings) and all(one.state == "running" for one in standings)
    return Diagnosis(
        scene,
        kind,
        ranks,
        0.9 if scene.has_recorder else 0.75,
        within_limit=is_early and "timeout" not in waited_in_vain(scene).values(),
        business=_business(standings[0]) if kind == "busy" else None,
    )


def _kind_of(standing: RankState | None) -> Kind:
    if standing is None:
        return "unresponsive"
    if is_point_to_point(standing.stack_wait):
        return "deadlock"
    if standing.state == "ended" or standing.stack_wait or _business(standing) is None:
        return "elsewhere"
    return "busy"


def _business(standing: RankState) -> LocalWork | None:
    return local_work_of(standing.progress.stack, standing.progress.point) if standing.progress else None


def of_circle(scene: JobState, circle: Sequence[int]) -> Diagnosis:
    """Ranks that wait for one another: each is where it should be at another time, or one of them never."""
    ranks = [scene.ranks[rank] for rank in circle if rank in scene.ranks]
    # A send or receive is always one rank's own.
    if not any(one.transfers or is_point_to_point(one.stack_wait) for one in ranks):
        parties = _groups_in_circle(scene, ranks)
        parting = Divergence("", 0, "site", parties)
        side = one_sided_call(parting) if len(parties) > 1 else None
        if side is not None and (side.call.site.condition or not side.call.is_usual):
            return of_split_group(scene, parting, side)
    return Diagnosis(scene, "deadlock", tuple(circle), 0.9)


def _groups_in_circle(scene: JobState, ranks: Iterable[RankState]) -> tuple[MismatchGroup, ...]:
    """Ranks by the call that they wait in."""
    waiting: dict[tuple[object, ...], list[tuple[int, Collective]]] = {}
    for one in ranks:
        if one.wait is not None:
            waiting.setdefault(site_key(one.wait), []).append((one.rank, one.wait))
    entries = (entry for one in scene.ranks.values() if one.recorder for entry in one.recorder.collectives)
    made = Counter(key for entry in entries if (key := site_key(entry)) in waiting)
    parties = (
        MismatchGroup(
            tuple(rank for rank, _ in members),
            members[0][1],
            site_of(members[0][1].operation, members[0][1].frames),
            key,
            is_usual=made[key] > len(members),
        )
        for key, members in waiting.items()
    )
    return tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks[0])))

"""Why a job stood still, from flight recorders alone: dumps, as a job leaves them behind.

A dump shows what a rank enqueued and what came to an end, and neither where the rank was in its program nor when the
dump was taken. So each rank is taken to wait in its oldest open call, and it waits for the members of that call's group
that have not entered it, and for those that have and are held up before it by an older one. Who stands at the end of
that graph is to blame, and so is a rank whose device has not left a call that the others have left.

The graph and the labels of its ends follow Holmes (NSDI '25) and C4D (HPCA '25), the components R. Tarjan (1972).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from doctor.analysis.hang.diagnosis import Diagnosis, Kind
from doctor.analysis.hang.missing_ranks import of_circle
from doctor.analysis.hang.rank_state import WITH_ALL, JobState, RankState, is_of_device
from doctor.analysis.hang.wait_graph import CollectiveNode, Node, has_counterpart, other_end_of, sinks_of
from doctor.core.facts import Collective

SURE, BY_MAJORITY, NO_DUMP, TOGETHER = 0.9, 0.8, 0.6, 0.4
"""Confidence where entries say it; of those that are in a circle with more ranks that wait together; of a rank that
left no dump; and where all are in one call."""
WITHOUT_HISTORY, BY_COUNT = 0.9, 0.75
"""What it is multiplied with where no history says that the groups were in step before, and where a call counts as
open only because others have not entered it."""


class WaitGraphEnds(NamedTuple):
    """Who stands at the ends of the graph. ``behind``: their device has not left what others have. ``late``: they have
    not come to where others wait. ``circles``: those who wait for one another. ``absent``: no dump of theirs is there.
    ``together``: all members of a call that are in it, where it does not end. ``alone``: they wait in a call of a group
    of which nobody else tells."""

    behind: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    circles: tuple[tuple[int, ...], ...] = ()
    absent: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()


def ranks_by_recorder(scene: JobState) -> Diagnosis | None:
    """Of whoever stands at the ends of the graph of waits; ``None`` where nobody waits."""
    ends = ends_of(scene)
    if ends.late or ends.behind:
        kind: Kind = "missing" if ends.late else "behind"
        found = _diagnosis(scene, kind, (*ends.late, *ends.behind), SURE)
        return replace(found, behind=ends.behind) if ends.late else found
    if ends.circles:
        return _of_circle(scene, ends.circles[0])
    if ends.absent:
        return _diagnosis(scene, "unresponsive", ends.absent, NO_DUMP)
    if len(ends.alone) > 1:
        return _diagnosis(scene, "deadlock", ends.alone, NO_DUMP)
    if ends.together and _ran_out_of_time(scene, ends.together):
        return _diagnosis(scene, "together", ends.together, TOGETHER)
    untold = tuple(rank for rank in scene.waiting if not _others_have_left(scene, scene.ranks[rank]))
    return Diagnosis(scene, "untold", untold, 0.0) if untold else None


def _others_have_left(scene: JobState, standing: RankState) -> bool:
    """Whether all others have left the call that a rank waits in: its dump was taken a moment earlier."""
    wait = standing.wait
    others = [rank for rank in scene.members.get(wait.group, ()) if rank != standing.rank] if wait is not None else []
    return wait is not None and all(
        rank in scene.ranks and scene.ranks[rank].has_left(wait.group, wait.sequence) for rank in others
    )


def _diagnosis(scene: JobState, kind: Kind, ranks: Iterable[int], confidence: float) -> Diagnosis:
    sure = confidence * (1.0 if _has_history(scene) else WITHOUT_HISTORY)
    sure *= BY_COUNT if scene.ended_by_count else 1.0
    return Diagnosis(scene, kind, tuple(sorted(set(ranks))), round(sure, 2))


def _of_circle(scene: JobState, circle: tuple[int, ...]) -> Diagnosis:
    """Ranks that wait for one another; where most of them wait in one call, the others are those that are elsewhere."""
    found = of_circle(scene, circle)
    waits = {rank: wait for rank in circle if (wait := scene.ranks[rank].wait) is not None}
    calls = {rank: (wait.group, wait.sequence) for rank, wait in waits.items()}
    most, count = Counter(calls.values()).most_common(1)[0]
    if found.kind != "deadlock" or count * 2 <= len(circle) or any(wait.is_p2p for wait in waits.values()):
        return found
    return _diagnosis(scene, "deadlock", (rank for rank in circle if calls.get(rank) != most), BY_MAJORITY)


def _ran_out_of_time(scene: JobState, ranks: Iterable[int]) -> bool:
    """Whether a call surely took too long: dumps of a healthy moment show all ranks in one call too."""
    standings = [scene.ranks[rank] for rank in ranks if rank in scene.ranks]
    return any(one.ended_waiting or (one.wait is not None and one.wait.retired) for one in standings)


def _has_history(scene: JobState) -> bool:
    """Whether some rank still shows a call before the one that it waits in: not where a ring was overwritten since, or
    only open entries were dumped."""
    for standing in scene.ranks.values():
        wait = standing.wait
        entries = standing.recorder.collectives if standing.recorder else ()
        if wait is not None and any(one.group == wait.group and one.sequence < wait.sequence for one in entries):
            return True
    return False


def ends_of(scene: JobState) -> WaitGraphEnds:
    """The ends of the graph of waits that somebody waits for."""
    behind = _behind(scene)
    graph = _graph(scene, behind)
    sinks = sinks_of(graph)
    alone = [sink.ranks[0] for sink in sinks if len(sink.nodes) == 1 and sink.ranks and sink.waiters]
    met = [node for sink in sinks if len(sink.nodes) == 1 for node in sink.nodes if isinstance(node, CollectiveNode)]
    circles = sorted((sink for sink in sinks if len(sink.ranks) > 1), key=lambda sink: (-sink.waiters, sink.ranks))
    dumped = {rank for rank, standing in scene.ranks.items() if standing.recorder is not None}
    still = [rank for rank in alone if rank in dumped and rank not in behind and _wait(scene, rank) is None]
    return WaitGraphEnds(
        behind=tuple(sorted(behind)),
        late=(*still, *_stopped_short(scene, met)),
        circles=tuple(sink.ranks for sink in circles),
        absent=tuple(rank for rank in alone if rank not in dumped) if _are_few(scene) else (),
        together=_together(scene, met),
        alone=_alone(scene, met),
    )


def _wait(scene: JobState, rank: int) -> Collective | None:
    """The call that a rank waits in. One over Gloo that only an error of the rank says it waited in, and that all
    others have left, had ended: the error came later."""
    standing = scene.ranks[rank]
    wait = standing.wait
    if wait is None or wait.is_p2p or is_of_device(wait) or not standing.ended_waiting:
        return wait
    return None if _others_have_left(scene, standing) else wait


def _graph(scene: JobState, behind: frozenset[int]) -> dict[Node, list[Node]]:
    """From a rank to the call that it waits in, from that to the members that hold it up, and from a rank to the other
    end of a transfer. A rank whose device is behind waits for nobody but that."""
    graph: dict[Node, list[Node]] = {rank: [] for rank in (*scene.ranks, *scene.unseen)}
    for rank, standing in scene.ranks.items():
        wait = _wait(scene, rank)
        if wait is None or rank in behind:
            continue
        if wait.is_p2p:
            graph[rank] += _other_ends(scene, standing, wait)
            continue
        meeting = CollectiveNode(wait.group, wait.sequence)
        graph[rank].append(meeting)
        if meeting not in graph:
            members = scene.members.get(meeting.group, ())
            graph[meeting] = [one for one in members if _holds_up(scene.ranks.get(one), meeting, one in behind)]
    return graph


def _holds_up(standing: RankState | None, meeting: CollectiveNode, is_behind: bool) -> bool:
    """Whether a member has not entered a call, or has and can't come to it."""
    if standing is None or standing.recorder is None:
        return standing is None or not standing.ended_waiting
    if standing.entered(meeting.group) < meeting.sequence:
        return True
    if standing.has_left(*meeting):
        return False
    wait = standing.wait
    # A call enqueued behind another group's may run on a stream of its own: Gloo's are made one after the other.
    return is_behind or (wait is not None and (wait.group, wait.sequence) != tuple(meeting))


def _other_ends(scene: JobState, standing: RankState, wait: Collective) -> list[Node]:
    """The ranks that a send or receive waits for, and all that are coalesced with it; but for those that wait at the
    other end of it."""
    members = scene.members.get(wait.group, ())
    found: list[Node] = []
    for transfer in _coalesced_with(standing, wait):
        other = other_end_of(transfer, members)
        theirs = scene.ranks.get(other) if other is not None else None
        there = _coalesced_with(theirs, theirs.wait) if theirs is not None and theirs.wait is not None else ()
        if other not in (None, standing.rank, *found) and not has_counterpart(there, transfer, members, standing.rank):
            found.append(other)
    return found


def _coalesced_with(standing: RankState, wait: Collective) -> tuple[Collective, ...]:
    return tuple(one for one in standing.transfers if (one.group, one.sequence) == (wait.group, wait.sequence))


def _behind(scene: JobState) -> frozenset[int]:
    """Ranks whose device has not left a call that others have: of each call not more than half of the members, or it is
    those others that are odd."""
    inside: dict[CollectiveNode, list[int]] = {}
    for rank, standing in scene.ranks.items():
        for group, entry in standing.pending.items():
            if is_of_device(entry) and entry.operation in WITH_ALL:
                inside.setdefault(CollectiveNode(group, entry.sequence), []).append(rank)
    found: set[int] = set()
    for meeting, ranks in inside.items():
        members = scene.members.get(meeting.group, ())
        has_left = any(one in scene.ranks and scene.ranks[one].has_left(*meeting) for one in members)
        if has_left and len(ranks) * 2 <= len(members):
            found.update(ranks)
    return frozenset(found)


def _stopped_short(scene: JobState, met: Iterable[CollectiveNode]) -> list[int]:
    """Of ranks that all are in one call that does not end, those that enqueued nothing of what the others have behind
    it: their program stopped, and with it perhaps the device."""
    found = []
    for meeting in met:
        members = [scene.ranks[one] for one in scene.members.get(meeting.group, ()) if one in scene.ranks]
        further = {one.rank: _enqueued_behind(one, meeting) for one in members}
        short = [rank for rank, count in further.items() if not count]
        if short and len(short) * 2 <= len(members) and max(further.values()) > 1:
            found += short
    return found


def _enqueued_behind(standing: RankState, meeting: CollectiveNode) -> int:
    entries = standing.recorder.collectives if standing.recorder else ()
    return sum(1 for one in entries if one.group == meeting.group and one.sequence > meeting.sequence)


def _together(scene: JobState, met: Iterable[CollectiveNode]) -> tuple[int, ...]:
    """All members of the calls that everybody has entered and nobody has left."""
    return tuple(
        sorted(
            {
                rank
                for meeting in met
                for rank in scene.members.get(meeting.group, ())
                if not any(one.has_left(*meeting) for one in scene.ranks.values())
            }
        )
    )


def _alone(scene: JobState, met: Iterable[CollectiveNode]) -> tuple[int, ...]:
    """Ranks that wait in a group of which no other rank tells, and of whose members no dump tells."""
    untold = (scene.members.get(meeting.group, ()) for meeting in met if _is_undetermined(scene, meeting))
    return tuple(sorted({members[0] for members in untold if len(members) == 1}))


def _is_undetermined(scene: JobState, meeting: CollectiveNode) -> bool:
    groups = (one.recorder.group(meeting.group) for one in scene.ranks.values() if one.recorder)
    return not any(group.members for group in groups if group is not None)


def _are_few(scene: JobState) -> bool:
    """Whether few ranks left no dump: where most dumps are missing, they were not collected."""
    return len(scene.unseen) < len(scene.ranks)

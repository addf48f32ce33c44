"""Why a job hung, from flight-recorder dumps alone.

A dump shows what a rank enqueued and what completed, but neither the rank's position in its program nor the time of the
dump. So each rank is assumed to wait in its oldest open call: for the members of that call's group that have not
entered it, and for those that have entered it and are blocked by an older call. The ranks at the ends of that graph are
faulty, and so are ranks whose device has not completed a call that the others completed.

The graph and the labels of its ends follow Holmes (NSDI '25) and C4D (HPCA '25).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from doctor.analysis.hang.diagnosis import Diagnosis, Kind
from doctor.analysis.hang.missing_ranks import BY_MAJORITY, of_cycle
from doctor.analysis.hang.rank_state import WITH_ALL, JobState, RankState, is_of_device
from doctor.analysis.hang.wait_graph import CollectiveNode, Node, sinks_of, unmatched_peers
from doctor.core.facts import Collective

SURE, NO_DUMP, TOGETHER = 0.9, 0.6, 0.4
"""Confidence if entries show it; for a rank without a dump; if all ranks are in one call."""
WITHOUT_HISTORY, BY_COUNT = 0.9, 0.75
"""Factors of the confidence if no history shows that the groups matched before, and if a call counts as open only
because others have not entered it."""


class WaitGraphEnds(msgspec.Struct, frozen=True):
    """The ranks at the ends of the graph. ``behind``: their device has not completed a call that others completed.
    ``late``: they did not reach a call that others wait in. ``cycles``: they wait for one another. ``absent``: they
    left no dump. ``together``: the members of calls that all members entered and none completed. ``alone``: they wait
    in a group that no other rank recorded."""

    behind: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    cycles: tuple[tuple[int, ...], ...] = ()
    absent: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()


def ranks_by_recorder(states: JobState) -> Diagnosis | None:
    """The diagnosis of the ranks at the ends of the wait graph; ``None`` if no rank waits."""
    ends = ends_of(states)
    if ends.late or ends.behind:
        kind: Kind = "missing" if ends.late else "behind"
        found = _diagnosis(states, kind, (*ends.late, *ends.behind), SURE)
        return replace(found, behind=ends.behind) if ends.late else found
    if ends.cycles:
        return _of_cycle(states, ends.cycles[0])
    if ends.absent:
        return _diagnosis(states, "unresponsive", ends.absent, NO_DUMP)
    if len(ends.alone) > 1:
        return _diagnosis(states, "deadlock", ends.alone, NO_DUMP)
    # Dumps of a healthy job may show all ranks in one call too, but no timeout.
    members = [states.ranks[rank] for rank in ends.together if rank in states.ranks]
    if any(one.ended_waiting or (one.wait is not None and one.wait.retired) for one in members):
        return _diagnosis(states, "together", ends.together, TOGETHER)
    waiting = tuple(rank for rank in states.waiting if not _others_completed(states, states.ranks[rank]))
    return Diagnosis(states, "undetermined", waiting, 0.0) if waiting else None


def _others_completed(states: JobState, rank_state: RankState) -> bool:
    """Whether all others completed the call that a rank waits in: its dump is slightly older."""
    wait = rank_state.wait
    if wait is None:
        return False
    others = (rank for rank in states.members.get(wait.group, ()) if rank != rank_state.rank)
    return all(rank in states.ranks and states.ranks[rank].has_completed(wait.group, wait.sequence) for rank in others)


def _diagnosis(states: JobState, kind: Kind, ranks: Iterable[int], confidence: float) -> Diagnosis:
    confidence *= 1.0 if _has_history(states) else WITHOUT_HISTORY
    confidence *= BY_COUNT if states.ended_by_count else 1.0
    return Diagnosis(states, kind, tuple(sorted(set(ranks))), round(confidence, 2))


def _of_cycle(states: JobState, cycle: tuple[int, ...]) -> Diagnosis:
    """The diagnosis of ranks that wait for one another; if most of them wait in one call, of the other ones."""
    found = of_cycle(states, cycle)
    if found.kind != "deadlock" or set(found.ranks) == set(cycle):
        return found
    return _diagnosis(states, "deadlock", found.ranks, BY_MAJORITY)


def _has_history(states: JobState) -> bool:
    return any(
        one.wait is not None and entry.group == one.wait.group and entry.sequence < one.wait.sequence
        for one in states.ranks.values()
        for entry in one.collectives
    )


def ends_of(states: JobState) -> WaitGraphEnds:
    """The ends of the wait graph that ranks wait for."""
    behind = _behind(states)
    graph = _graph(states, behind)
    sinks = sinks_of(graph)
    alone = [sink.ranks[0] for sink in sinks if len(sink.nodes) == 1 and sink.ranks and sink.waiters]
    calls = [node for sink in sinks if len(sink.nodes) == 1 for node in sink.nodes if isinstance(node, CollectiveNode)]
    cycles = sorted((sink for sink in sinks if len(sink.ranks) > 1), key=lambda sink: (-sink.waiters, sink.ranks))
    dumped = {rank for rank, one in states.ranks.items() if one.recorder is not None}
    still = [rank for rank in alone if rank in dumped and rank not in behind and _wait(states, rank) is None]
    incomplete = (call for call in calls if not any(one.has_completed(*call) for one in states.ranks.values()))
    return WaitGraphEnds(
        behind=tuple(sorted(behind)),
        late=(*still, *_stopped_early(states, calls)),
        cycles=tuple(sink.ranks for sink in cycles),
        # If most dumps are missing, they were not collected.
        absent=tuple(rank for rank in alone if rank not in dumped and len(states.unseen) < len(states.ranks)),
        together=tuple(sorted({rank for call in incomplete for rank in states.members.get(call.group, ())})),
        alone=_alone(states, calls),
    )


def _wait(states: JobState, rank: int) -> Collective | None:
    """The call that a rank waits in; none if only its own error left a call over Gloo open that others completed."""
    rank_state = states.ranks[rank]
    wait = rank_state.wait
    if wait is None or wait.is_p2p or is_of_device(wait) or not rank_state.ended_waiting:
        return wait
    return None if _others_completed(states, rank_state) else wait


def _graph(states: JobState, behind: frozenset[int]) -> dict[Node, list[Node]]:
    """Edges from a rank to the call that it waits in, from that to the members that block it, and from a rank to the
    peer of a transfer. A rank whose device is behind waits for that device only."""
    graph: dict[Node, list[Node]] = {rank: [] for rank in (*states.ranks, *states.unseen)}
    for rank, rank_state in states.ranks.items():
        wait = _wait(states, rank)
        if wait is None or rank in behind:
            continue
        if wait.is_p2p:
            graph[rank] += unmatched_peers(states, rank, _coalesced_transfers(rank_state), _coalesced_transfers)
            continue
        call = CollectiveNode(wait.group, wait.sequence)
        graph[rank].append(call)
        if call not in graph:
            members = states.members.get(call.group, ())
            graph[call] = [one for one in members if _blocks(states.ranks.get(one), call, one in behind)]
    return graph


def _blocks(rank_state: RankState | None, call: CollectiveNode, is_behind: bool) -> bool:
    if rank_state is None or rank_state.recorder is None:
        return rank_state is None or not rank_state.ended_waiting
    if rank_state.entered(call.group) < call.sequence:
        return True
    if rank_state.has_completed(*call):
        return False
    wait = rank_state.wait
    # Calls of several groups may run on separate streams; those of Gloo run one after the other.
    return is_behind or (wait is not None and (wait.group, wait.sequence) != tuple(call))


def _coalesced_transfers(rank_state: RankState) -> tuple[Collective, ...]:
    wait = rank_state.wait
    return tuple(
        one for one in rank_state.transfers if wait and (one.group, one.sequence) == (wait.group, wait.sequence)
    )


def _behind(states: JobState) -> frozenset[int]:
    """Ranks whose device has not completed a call that others completed: at most half of the members of a call."""
    inside: dict[CollectiveNode, list[int]] = {}
    for rank, rank_state in states.ranks.items():
        for group, entry in rank_state.pending.items():
            if is_of_device(entry) and entry.operation in WITH_ALL:
                inside.setdefault(CollectiveNode(group, entry.sequence), []).append(rank)
    found: set[int] = set()
    for call, ranks in inside.items():
        members = states.members.get(call.group, ())
        has_completed = any(one in states.ranks and states.ranks[one].has_completed(*call) for one in members)
        if has_completed and len(ranks) * 2 <= len(members):
            found.update(ranks)
    return frozenset(found)


def _stopped_early(states: JobState, calls: Iterable[CollectiveNode]) -> list[int]:
    """Of members that are all in one call, those that enqueued no later call: their program stopped."""
    found = []
    for call in calls:
        members = [states.ranks[one] for one in states.members.get(call.group, ()) if one in states.ranks]
        later = {
            one.rank: sum(each.group == call.group and each.sequence > call.sequence for each in one.collectives)
            for one in members
        }
        stopped = [rank for rank, count in later.items() if not count]
        if stopped and len(stopped) * 2 <= len(members) and max(later.values()) > 1:
            found += stopped
    return found


def _alone(states: JobState, calls: Iterable[CollectiveNode]) -> tuple[int, ...]:
    """Ranks that wait in a group that no other rank recorded, and whose members are unknown."""
    known = {group.name for one in states.ranks.values() for group in one.groups if group.members}
    unknown = (states.members.get(call.group, ()) for call in calls if call.group not in known)
    return tuple(sorted({members[0] for members in unknown if len(members) == 1}))

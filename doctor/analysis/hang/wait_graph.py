"""The wait graph of ranks and collectives, and the ranks at its ends.

A rank that has entered a collective waits for every member of the group that has not. Collectives are nodes,
so that the number of edges grows with the number of ranks and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from doctor.analysis.call_sites import POINT_TO_POINT
from doctor.analysis.hang.collective_mismatch import calls_differ
from doctor.analysis.hang.rank_state import LEAST_STILL, JobState, RankState, is_of_device
from doctor.core.facts import Collective
from doctor.core.frames import waiting_row
from doctor.knowledge.waiting_functions import OF_GROUPS

Node = Hashable
Graph = Mapping[Node, Sequence[Node]]


class CollectiveNode(NamedTuple):
    """A collective of a group, as a node of the graph."""

    group: str
    sequence: int


class WaitSink(msgspec.Struct, frozen=True):
    """A strongly connected component without edges to others; ``waiters``: the number of edges to it."""

    nodes: tuple[Node, ...]
    waiters: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks among the nodes."""
        return tuple(sorted(node for node in self.nodes if isinstance(node, int)))


def roots_of(states: JobState) -> tuple[tuple[int, ...], ...]:
    """The ranks at each end of the graph that ranks wait for, the end with most waiters first.

    Several ranks wait for one another in a cycle; a single one waits for no rank."""
    sinks = (sink for sink in sinks_of(wait_graph(states)) if len(sink.ranks) > 1 or (sink.ranks and sink.waiters))
    return tuple(ranks for _, ranks in sorted((-sink.waiters, sink.ranks) for sink in sinks))


def sinks_of(graph: Graph) -> list[WaitSink]:
    """The ends of a graph: its strongly connected components without edges to others."""
    components = strong_components(graph)
    home = {node: number for number, component in enumerate(components) for node in component}
    waiters: dict[int, int] = {}
    leads_on: set[int] = set()
    for node, targets in graph.items():
        for target in targets:
            if home[node] != home[target]:
                leads_on.add(home[node])
                waiters[home[target]] = waiters.get(home[target], 0) + 1
    return [
        WaitSink(tuple(component), waiters.get(number, 0))
        for number, component in enumerate(components)
        if number not in leads_on
    ]


def wait_graph(states: JobState) -> Graph:
    """The graph with edges from a rank to the collectives that it waits in, from these to the members that have not
    entered them, and from a rank to the peer of a send or receive.

    The peer of a transfer that no recorder shows, as over Gloo, is the one that the stack shows, unless that is in a
    collective and perhaps has no part in it; else it may be any rank that is not in a call."""
    graph: dict[Node, list[Node]] = {rank: [] for rank in (*states.ranks, *states.unseen)}
    late: dict[CollectiveNode, list[int]] = {}
    elsewhere = [rank for rank, one in states.ranks.items() if one.is_elsewhere] if states.has_recorder else []
    for rank, rank_state in states.ranks.items():
        if not rank_state.waits:
            continue
        for group, entry in rank_state.pending.items():
            call = CollectiveNode(group, entry.sequence)
            if call not in late:
                late[call] = missing_from(states, call)
            if late[call]:
                graph[rank].append(call)
        if rank_state.stack_wait in POINT_TO_POINT and rank_state.wait is None:
            graph[rank] += _peers_by_stack(states, rank_state, elsewhere)
        graph[rank] += unmatched_peers(states, rank, rank_state.transfers, lambda theirs: theirs.transfers)
    for call, ranks in late.items():
        if ranks:
            graph[call] = list(ranks)
    return graph


def missing_from(states: JobState, call: CollectiveNode) -> list[int]:
    """The members of a group that have not entered a collective of it."""
    return [rank for rank in states.members.get(call.group, ()) if _is_missing(states.ranks.get(rank), call)]


def _is_missing(rank_state: RankState | None, call: CollectiveNode) -> bool:
    if rank_state is None:
        return True
    if rank_state.recorder is None:
        return not rank_state.waits and not rank_state.may_wait_in_backward
    return rank_state.entered(call.group) < call.sequence


def unmatched_peers(
    states: JobState,
    rank: int,
    transfers: Iterable[Collective],
    open_transfers: Callable[[RankState], Iterable[Collective]],
) -> list[Node]:
    """The peers of sends and receives of ``rank`` that have no matching call among their ``open_transfers``."""
    found: list[Node] = []
    for entry in transfers:
        members = states.members.get(entry.group, ())
        peer = _peer_of(entry, members)
        if peer is None or peer in (rank, *found):
            continue
        theirs = open_transfers(states.ranks[peer]) if peer in states.ranks else ()
        wanted = {"send": "recv", "recv": "send"}.get(entry.operation)
        opposite = (one for one in theirs if one.group == entry.group and one.operation == wanted)
        if not any(_peer_of(one, members) == rank for one in opposite):
            found.append(peer)
    return found


def peer_by_stack(states: JobState, rank_state: RankState) -> int | None:
    """The peer of the send or receive that a rank is in, as its stack shows it within the group; ``None`` if the rank
    is in several groups in which that number is another rank."""
    number = rank_state.progress.root if rank_state.progress else None
    members = {group.name: states.members.get(group.name, ()) for group in rank_state.groups}
    groups = [found for found in members.values() if rank_state.rank in found]
    peers = {found[number] if number is not None and 0 <= number < len(found) else None for found in groups}
    peer = peers.pop() if len(peers) == 1 else None
    return None if peer == rank_state.rank else peer


def is_answered(rank_state: RankState) -> bool:
    """Whether the function in which a rank sends or receives has the other part of the exchange, too."""
    return any(frame.answered for frame in rank_state.stack)


def _peers_by_stack(states: JobState, rank_state: RankState, elsewhere: Sequence[int]) -> Sequence[int]:
    """The peer that the stack shows, unless it may be in the call that fits; else those that may be the peer."""
    peer = peer_by_stack(states, rank_state) if states.has_recorder else None
    if peer is None or (peer not in elsewhere and not is_answered(rank_state)):
        return elsewhere
    return [] if _answers(states, rank_state.rank, peer) else [peer]


def _answers(states: JobState, rank: int, peer: int) -> bool:
    """Whether a peer may be in the send or receive that fits to the one that a rank is in, as stacks show them."""
    one, other = states.ranks[rank], states.ranks.get(peer)
    if other is None or other.stack_wait not in POINT_TO_POINT:
        return False
    both_send_or_receive = one.stack_wait[:4] == other.stack_wait[:4]
    return not both_send_or_receive and peer_by_stack(states, other) in (None, rank)


def wait_for_one_another(states: JobState) -> bool:
    """Whether every rank is known and stands in a call of all members of a group that can't complete.

    Before the first batch nothing tells how long a rank may be busy, and the others may well wait for it for minutes.
    If no rank is busy, that is a deadlock all the same."""
    if states.unseen or states.ungathered or states.joins or len(states.ranks) < 2:
        return False
    ranks = states.ranks.values()
    return all(map(_stands_waiting, ranks)) and all(_waits_in_vain(states, one) for one in ranks)


def _stands_waiting(one: RankState) -> bool:
    progress = one.progress
    return (
        progress is not None
        and one.state == "running"
        and not one.is_sampled
        and one.recorder is not None
        and one.waits
        and (progress.still or 0.0) >= LEAST_STILL
    )


def _waits_in_vain(states: JobState, one: RankState) -> bool:
    """Whether the call that a rank waits in can't complete while all others stay where they are."""
    if is_unrecorded(one):
        return _is_alone_in_call(states, one)
    call = one.wait
    if call is None or call.is_p2p or not states.members.get(call.group):
        return False
    if is_of_device(call) and not one.stack_wait:
        return False  # its device may still compute what precedes the call
    node = CollectiveNode(call.group, call.sequence)
    return bool(missing_from(states, node)) or calls_differ(states, *node)


def is_unrecorded(one: RankState) -> bool:
    """Whether a rank waits in a call of a whole group that no recorder shows: the creation of a group, a
    ``monitored_barrier`` of Gloo, or a call of Ray Train."""
    row = waiting_row(one.stack)
    is_call = row is not None and not row.recorded
    return is_call and one.recorder is not None and one.wait is None and one.waits


def _is_alone_in_call(states: JobState, one: RankState) -> bool:
    """Whether a member of each group whose call it may be is not in the call; a call of one rank does not wait."""
    others = states.ranks.values()
    inside = {other.rank for other in others if is_unrecorded(other) and other.stack_wait == one.stack_wait}
    if len(inside) == 1:
        return True
    groups = [states.members.get(group.name, ()) for group in one.groups]
    groups = [members for members in groups if one.rank in members]
    return one.stack_wait not in OF_GROUPS and bool(groups) and all(set(members) - inside for members in groups)


def _peer_of(entry: Collective, members: Sequence[int]) -> int | None:
    return members[entry.peer] if entry.peer is not None and entry.peer < len(members) else None


def strong_components(graph: Graph) -> list[list[Node]]:
    """The strongly connected components of a graph, each after those that it has edges to.

    R. Tarjan, SIAM J. Comput. 1 (1972) 146, without recursion."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    open_nodes: list[Node] = []
    is_open: set[Node] = set()
    components: list[list[Node]] = []
    for start in graph:
        work = [(start, iter(graph[start]))] if start not in index else []
        while work:
            node, targets = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                open_nodes.append(node)
                is_open.add(node)
            for target in targets:
                if target not in index:
                    work.append((target, iter(graph.get(target, ()))))
                    break
                if target in is_open:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: list[Node] = []
                    while not component or component[-1] != node:
                        component.append(open_nodes.pop())
                    is_open.difference_update(component)
                    components.append(component)
    return components

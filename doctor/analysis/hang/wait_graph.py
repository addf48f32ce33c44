"""Who waits for whom: the graph of ranks and collectives, and who stands at its end.

A rank that has entered a collective waits for every member of the group that has not. A collective is a node of its
own, so that a thousand ranks that wait for one make a thousand edges and not a million.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.core.facts import Collective

Node = Hashable
Graph = Mapping[Node, Sequence[Node]]


class CollectiveNode(NamedTuple):
    """A collective of a group, as a node of the graph."""

    group: str
    sequence: int


class WaitRoot(NamedTuple):
    """Ranks at the end of the graph that wait for nobody, or only for one another; others wait for them."""

    ranks: tuple[int, ...]
    is_cycle: bool


class WaitSink(NamedTuple):
    """Nodes that lead nowhere but to one another; ``waiters``: how many others lead to them."""

    nodes: tuple[Node, ...]
    waiters: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks among the nodes."""
        return tuple(sorted(node for node in self.nodes if isinstance(node, int)))


def roots_of(scene: JobState) -> tuple[WaitRoot, ...]:
    """The ends of the graph that somebody waits for, most waited for first."""
    sinks = [sink for sink in sinks_of(wait_graph(scene)) if sink.ranks]
    found = [(-sink.waiters, WaitRoot(sink.ranks, len(sink.ranks) > 1)) for sink in sinks]
    return tuple(root for waiters, root in sorted(found) if root.is_cycle or waiters)


def sinks_of(graph: Graph) -> list[WaitSink]:
    """The ends of a graph."""
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


def wait_graph(scene: JobState) -> Graph:
    """Ranks by number and meetings: from a rank to the collectives that it waits in, from these to the members that
    have not come, and from a rank to the other end of a send or receive."""
    graph: dict[Node, list[Node]] = {rank: [] for rank in (*scene.ranks, *scene.unseen)}
    late: dict[CollectiveNode, list[int]] = {}
    for rank, standing in scene.ranks.items():
        if not standing.waits:
            continue
        for group, entry in standing.pending.items():
            meeting = CollectiveNode(group, entry.sequence)
            if meeting not in late:
                late[meeting] = missing_from(scene, meeting)
            if late[meeting]:
                graph[rank].append(meeting)
        graph[rank] += _other_ends(scene, standing)
    for meeting, ranks in late.items():
        if ranks:
            graph[meeting] = list(ranks)
    return graph


def missing_from(scene: JobState, meeting: CollectiveNode) -> list[int]:
    """The members of a group that have not entered a collective of it."""
    return [rank for rank in scene.members.get(meeting.group, ()) if _is_missing(scene.ranks.get(rank), meeting)]


def _is_missing(standing: RankState | None, meeting: CollectiveNode) -> bool:
    if standing is None:
        return True
    if standing.recorder is None:
        return not standing.waits and not standing.may_wait_in_backward
    return standing.entered(meeting.group) < meeting.sequence


def _other_ends(scene: JobState, standing: RankState) -> list[Node]:
    """The ranks that a send or receive waits for: those that have not its counterpart open."""
    found: list[Node] = []
    for entry in standing.transfers:
        members = scene.members.get(entry.group, ())
        other = other_end_of(entry, members)
        if other is None or other in found:
            continue
        theirs = scene.ranks.get(other)
        if theirs is None or not has_counterpart(theirs.transfers, entry, members, standing.rank):
            found.append(other)
    return found


def other_end_of(entry: Collective, members: Sequence[int]) -> int | None:
    """The rank at the other end of a send or receive, where the members of its group are known."""
    return members[entry.peer] if entry.peer is not None and entry.peer < len(members) else None


def has_counterpart(theirs: Iterable[Collective], entry: Collective, members: Sequence[int], rank: int) -> bool:
    """Whether one of the other end's calls is the counterpart of ``entry``, a send or receive of ``rank``."""
    wanted = {"send": "recv", "recv": "send"}.get(entry.operation)
    return any(
        one.group == entry.group and one.operation == wanted and other_end_of(one, members) == rank for one in theirs
    )


def strong_components(graph: Graph) -> list[list[Node]]:
    """Sets of nodes that can all be reached from one another (R. Tarjan, SIAM J. Comput. 1 (1972) 146), without
    recursion; a component comes after those that it leads to."""
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
            step = _next_unseen(targets, index, is_open, low, node)
            if step is not None:
                work.append((step, iter(graph.get(step, ()))))
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                components.append(_closed(node, open_nodes, is_open))
    return components


def _next_unseen(
    targets: Iterable[Node], index: Mapping[Node, int], is_open: set[Node], low: dict[Node, int], node: Node
) -> Node | None:
    for target in targets:
        if target not in index:
            return target
        if target in is_open:
            low[node] = min(low[node], index[target])
    return None


def _closed(node: Node, open_nodes: list[Node], is_open: set[Node]) -> list[Node]:
    component = []
    while True:
        last = open_nodes.pop()
        is_open.discard(last)
        component.append(last)
        if last == node:
            return component

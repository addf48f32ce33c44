"""The light probes, as a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from doctor.core.decoding import prepared
from doctor.core.facts import ReachFacts, Section
from doctor.core.job import Job
from doctor.probes.authorization import require_own_master, require_own_port, require_peer
from doctor.probes.base import ProbeContext, ProbeParticipant, StageOrders, StageResult
from doctor.probes.reachability.assignments import Agent, Assignment
from doctor.probes.reachability.connection_plan import plan_light
from doctor.probes.reachability.light_probe import MOST_AT_ONCE, probe_light
from doctor.probes.reachability.probe_cost import LIMIT_SECONDS, budget_of
from doctor.probes.runtime.cost_text import counted
from doctor.probes.runtime.deadline import ProbeDeadline


class LightStage:
    """See :class:`doctor.probes.base.Stage`. One step: everybody who speaks for a host, at the same time."""

    name: ClassVar[str] = "light"
    makes: ClassVar[tuple[type[Section], ...]] = ()  # a host that falls silent here is told as such (LastSeen)

    def __init__(self) -> None:
        self.most_seconds = LIMIT_SECONDS
        self._planned = False

    def plan(self, job: Job, posts: Sequence[ProbeParticipant]) -> StageOrders | None:
        """Assignments for all hosts, once; none where fewer than two take part."""
        speakers = [post for post in posts if post.speaks and post.port is not None]
        if self._planned or len(speakers) < 2:
            return None
        self._planned = True
        agents = [Agent(post.number, post.host, post.port, post.word) for post in speakers if post.port is not None]
        assignments = plan_light(job, agents)
        orders = {post.token: assignment for post, assignment in zip(speakers, assignments, strict=True)}
        return StageOrders.of(orders, LIMIT_SECONDS, _words(assignments)) if orders else None

    def take_part(self, order: bytes, bench: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Measure what this host was asked to."""
        task = msgspec.msgpack.decode(order, type=prepared(Assignment))
        for target in task.targets:
            require_peer(target.address, target.port)
        if task.master is not None:
            require_own_master(task.master.address, task.master.port, bench.surroundings)
        if task.hold_port is not None:
            require_own_port(task.hold_port, bench.surroundings)
        found = probe_light(task, bench.responder, seconds=max(1.0, deadline.left()), surroundings=bench.surroundings)
        sections: dict[str, Section] = {ReachFacts.key: found.reach, found.paths.key: found.paths}
        if found.clock is not None:
            sections[found.clock.key] = found.clock
        return StageResult(sections)


def _words(assignments: Sequence[Assignment]) -> str:
    """Such as ``light probes: 8 hosts, 64 connections, at most 3.0 MB in all and 10 s; all hosts at once, up to 8
    connections each``."""
    ways = max(len(one.targets) + (one.master is not None) for one in assignments)
    each = counted(min(ways, MOST_AT_ONCE), "connection")
    return f"{budget_of(assignments).words()}; all hosts at once, up to {each} each"

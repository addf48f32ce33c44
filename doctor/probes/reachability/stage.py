"""The light probes, as a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from doctor.core.decoding import prepared
from doctor.core.facts import ReachFacts, Section
from doctor.core.job import Job
from doctor.probes.authorization import require_own_master, require_own_port, require_peer
from doctor.probes.base import PlannedStage, ProbeContext, ProbeParticipant, StageOrders, StagePlan, StageResult
from doctor.probes.reachability.assignments import Agent, Assignment
from doctor.probes.reachability.connection_plan import plan_light
from doctor.probes.reachability.light_probe import MOST_AT_ONCE, probe_light
from doctor.probes.reachability.probe_cost import LIMIT_SECONDS, budget_of
from doctor.probes.runtime.cost_text import counted
from doctor.probes.runtime.deadline import ProbeDeadline


class LightStage(PlannedStage):
    """Stage of the light probes (:class:`doctor.probes.base.Stage`). One step: all hosts at the same time."""

    name: ClassVar[str] = "light"
    makes: ClassVar[tuple[type[Section], ...]] = ()  # a host that stops responding here is reported by LastSeen

    def __init__(self) -> None:
        self.most_seconds = LIMIT_SECONDS

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Yield assignments for all hosts; none for fewer than two hosts."""
        speakers = [process for process in processes if process.speaks and process.port is not None]
        if len(speakers) < 2:
            return
        agents = [
            Agent(process.number, process.host, process.port, process.word)
            for process in speakers
            if process.port is not None
        ]
        assignments = plan_light(job, agents)
        orders = {process.token: assignment for process, assignment in zip(speakers, assignments, strict=True)}
        if orders:
            yield StageOrders.of(orders, LIMIT_SECONDS, _words(assignments))

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Run the assignment of this host."""
        task = msgspec.msgpack.decode(order, type=prepared(Assignment))
        for target in task.targets:
            require_peer(target.address, target.port)
        if task.master is not None:
            require_own_master(task.master.address, task.master.port, context.machine)
        if task.hold_port is not None:
            require_own_port(task.hold_port, context.machine)
        found = probe_light(task, context.responder, seconds=max(1.0, deadline.left()), machine=context.machine)
        sections: dict[str, Section] = {ReachFacts.key: found.reach, found.paths.key: found.paths}
        if found.clock is not None:
            sections[found.clock.key] = found.clock
        return StageResult(sections)


def _words(assignments: Sequence[Assignment]) -> str:
    ways = max(len(one.targets) + (one.master is not None) for one in assignments)
    each = counted(min(ways, MOST_AT_ONCE), "connection")
    return f"{budget_of(assignments).words()}; all hosts at once, up to {each} each"

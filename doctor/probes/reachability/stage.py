"""The light probes, as a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from doctor.core.decoding import prepared
from doctor.core.facts import ReachFacts, Section
from doctor.core.job import Job
from doctor.probes.authorization import require_own_master, require_own_port, require_peers
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StagePlan, StageResult
from doctor.probes.reachability.assignments import Assignment
from doctor.probes.reachability.connection_plan import plan_light
from doctor.probes.reachability.light_probe import probe_light
from doctor.probes.reachability.probe_cost import LIMIT_SECONDS, cost_text
from doctor.probes.runtime.deadline import ProbeDeadline


class LightStage(Stage):
    """Stage of the light probes (:class:`doctor.probes.base.Stage`). One step: all hosts at the same time."""

    name: ClassVar[str] = "light"
    makes: ClassVar[tuple[type[Section], ...]] = ()  # a host that stops responding here is reported by LastSeen

    def __init__(self) -> None:
        self.most_seconds = LIMIT_SECONDS

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Yield assignments for all hosts; none for fewer than two hosts."""
        agents = {process.token: agent for process in processes if (agent := process.agent)}
        if len(agents) < 2:
            return
        assignments = plan_light(job, agents.values())
        if orders := dict(zip(agents, assignments, strict=True)):
            yield StageOrders.of(orders, LIMIT_SECONDS, cost_text(assignments))

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Run the assignment of this host."""
        task = msgspec.msgpack.decode(order, type=prepared(Assignment))
        require_peers((target.address, target.port) for target in task.targets)
        if task.master is not None:
            require_own_master(task.master.address, task.master.port, context.machine)
        if task.hold_port is not None:
            require_own_port(task.hold_port, context.machine)
        found = probe_light(task, context.responder, seconds=max(1.0, deadline.left()), machine=context.machine)
        sections: dict[str, Section] = {ReachFacts.key: found.reach, found.paths.key: found.paths}
        if found.clock is not None:
            sections[found.clock.key] = found.clock
        return StageResult(sections)

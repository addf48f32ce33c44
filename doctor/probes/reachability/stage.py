"""The light probes, as a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from doctor.core.decoding import prepared
from doctor.core.facts import ReachFacts, Section
from doctor.core.job import Job
from doctor.core.text import counted
from doctor.probes.authorization import require_own_master, require_own_port, require_peers
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StagePlan, StageResult
from doctor.probes.reachability.assignments import Assignment
from doctor.probes.reachability.connection_plan import plan_light
from doctor.probes.reachability.light_probe import MOST_AT_ONCE, probe_light
from doctor.probes.reachability.path_probe import ECHOES
from doctor.probes.responder.wire_format import GREETING_BYTES, LENGTH, TIMES, WELCOME_BYTES
from doctor.probes.runtime.deadline import ProbeDeadline

LIMIT_SECONDS = 10.0
"""For all light probes of a job, from the first connection to the last answer."""

BURSTS = 3
"""Of one path: a second and a third only if the first did not arrive."""


class LightStage(Stage):
    """Stage of the light probes (:class:`doctor.probes.base.Stage`). One step: all hosts at the same time."""

    name = "light"
    makes = ()  # a host that stops responding here is reported by LastSeen

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


def cost_text(assignments: Sequence[Assignment]) -> str:
    """Format as ``light probes: 8 hosts, 64 connections, at most 3.0 MB in all and 10 s; all hosts at once, up to 8
    connections each``. Connections are paths that are tried, again if one fails."""
    connections = [len(one.targets) + (one.master is not None) for one in assignments]
    each = counted(min(max(connections), MOST_AT_ONCE), "connection")
    return (
        f"light probes: {len(connections)} hosts, {sum(connections)} connections, "
        f"at most {most_bytes(assignments) / 1e6:.1f} MB in all and {LIMIT_SECONDS:g} s; "
        f"all hosts at once, up to {each} each"
    )


def most_bytes(assignments: Iterable[Assignment]) -> int:
    """Return the bytes of the data of all hosts, at most, without packet headers."""
    hello, message = GREETING_BYTES + WELCOME_BYTES, LENGTH.size + TIMES.size
    return sum(
        BURSTS * (hello + message + assignment.burst) + ECHOES * message if target.measured else hello
        for assignment in assignments
        for target in assignment.targets
    )

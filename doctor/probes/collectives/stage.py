"""Stage of the collectives: known values and timings, on the backend of the job, along the axes of its mesh."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from doctor.core.decoding import prepared
from doctor.core.facts import CollectiveFacts, Missing, MissingReason
from doctor.core.job import Job
from doctor.probes.authorization import require_peers
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StagePlan, StageResult
from doctor.probes.collectives.group_assembly import assemble
from doctor.probes.collectives.group_cost import most_sent
from doctor.probes.collectives.group_driver import MOST_AXES, PATIENCE, GroupDriver, seconds_of, set_up_seconds
from doctor.probes.collectives.group_steps import (
    GroupsNotRun,
    GroupStepResult,
    JoinGroup,
    LoadTorch,
    OpenStore,
    TorchCapabilities,
    ends_of,
    port_of,
)
from doctor.probes.collectives.mesh import Axis
from doctor.probes.collectives.mesh_layout import launcher_mesh
from doctor.probes.runtime.cost_text import in_seconds
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import ChildLost, WorkRefused
from doctor.probes.runtime.torch_startup import loaded_in

LOAD_SECONDS = 60.0
"""To import torch from a shared file system that all ranks read at once."""
OPEN_SECONDS = 5.0
MARGIN = 1.0
"""Seconds by which a child is killed before the end of the step, so that there is time to report it."""


class GroupsStage(Stage):
    """Stage of the collectives (:class:`doctor.probes.base.Stage`). All load torch; one creates a store; all join and
    use the group. ``mesh``: the axes of the job, empty if they are to be determined."""

    name = "groups"
    makes = (CollectiveFacts,)

    def __init__(self, mesh: tuple[Axis, ...] = ()) -> None:
        self.most_seconds = LOAD_SECONDS + OPEN_SECONDS + seconds_of("nccl", MOST_AXES)
        self._mesh = mesh[:MOST_AXES]

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Load, open, join; or report to all why there is nothing to join."""
        who = "one process loads torch" if len(processes) == 1 else f"{len(processes)} processes load torch at once"
        words = f"groups: {who}, at most {in_seconds(LOAD_SECONDS)}"
        load = LoadTorch(job.world_size)
        job, processes = yield StageOrders.of({process.token: load for process in processes}, LOAD_SECONDS, words)
        group = assemble(job, processes, self._mesh)
        if isinstance(group, GroupsNotRun):
            # Without words: a process records the reason, and nothing is sent or started.
            known = [process for process in processes if process.note or group.error]
            yield StageOrders.of({process.token: group for process in known}, OPEN_SECONDS)
        elif group is not None:
            words = (
                f"groups: one process, rank {group.first.number}, creates a rendezvous store for "
                f"{len(group.processes)} ranks, at most {in_seconds(OPEN_SECONDS)}"
            )
            job, processes = yield StageOrders.of({group.first.token: OpenStore(PATIENCE)}, OPEN_SECONDS, words)
            note = next((process.note for process in processes if process.token == group.first.token), b"")
            if (port := port_of(note)) is not None:
                seconds = seconds_of(group.backend, len(group.courses)) + MARGIN
                joins = group.join(job, port, set_up_seconds(group.backend), PATIENCE)
                most = max(map(most_sent, joins.values()))
                yield StageOrders.of(joins, seconds, group.words(seconds, most))

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Run the order of this process."""
        task = msgspec.msgpack.decode(order, type=prepared(LoadTorch | OpenStore | JoinGroup | GroupsNotRun))
        if isinstance(task, LoadTorch):
            return _loaded(task, context, deadline)
        if isinstance(task, GroupsNotRun):
            told = CollectiveFacts(error=task.error) if task.error else Missing(MissingReason.HIDDEN, task.reason)
            return StageResult({CollectiveFacts.key: told})
        if isinstance(task, OpenStore):
            try:
                done = context.torch_child().ask("group", task, GroupStepResult, deadline.left() - MARGIN)
            except (ChildLost, WorkRefused) as error:
                words = f"no store could be created for the group: {error}"
                return StageResult({CollectiveFacts.key: CollectiveFacts(error=words)})
            return StageResult({}, b"%d" % done.port)
        require_peers(ends_of(task), same_host=True)
        driver = GroupDriver(task, context.torch_child(), deadline.within(deadline.left() - MARGIN))
        return StageResult({CollectiveFacts.key: driver.facts()})


def _loaded(task: LoadTorch, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
    loaded = loaded_in(context.torch_child(), deadline.left() - MARGIN)
    if isinstance(loaded, Missing):
        return StageResult({CollectiveFacts.key: loaded})
    if not loaded.distributed:
        reason = f"torch {loaded.version} is built without torch.distributed"
        return StageResult({CollectiveFacts.key: Missing(MissingReason.HIDDEN, reason)})
    mesh = launcher_mesh(context.machine.environ, task.world)
    capabilities = TorchCapabilities(loaded.devices, loaded.nccl, loaded.backends, mesh)
    return StageResult({}, msgspec.msgpack.encode(capabilities))

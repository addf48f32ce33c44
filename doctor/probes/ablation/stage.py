"""Last stage: what failed or is slow is measured again with one change."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from doctor.core.decoding import prepared
from doctor.core.facts import Trial, TrialFacts
from doctor.core.job import Job
from doctor.core.text import counted
from doctor.probes.ablation.device_trials import DEVICE_SECONDS, DeviceOrder, device_orders, try_device
from doctor.probes.ablation.experiments import MOST_COLLECTIVES, MOST_REQUESTS, TrialRequest, trial_requests
from doctor.probes.ablation.group_trials import (
    PREPARE_SECONDS,
    RUN_SECONDS,
    GroupTrials,
    PrepareTrial,
    RunTrial,
    TrialSequence,
    group_plan,
)
from doctor.probes.ablation.path_trials import SIZES_AT_ONCE, try_connections, try_packets, try_speeds
from doctor.probes.ablation.setting_variants import MOST_VARIANTS
from doctor.probes.ablation.trial_planner import PATH_SECONDS, path_orders
from doctor.probes.ablation.trials import ROUNDS, PacketOrder, ReachOrder, RecordTrials, SpeedOrder
from doctor.probes.authorization import require_peers
from doctor.probes.bandwidth.schedule import outgoing_connections
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StagePlan, StageResult
from doctor.probes.collectives.group_cost import most_sent
from doctor.probes.collectives.group_steps import ends_of
from doctor.probes.devices.device_worker import COPIES, COPY_BYTES
from doctor.probes.responder.wire_format import GREETING_BYTES, WELCOME_BYTES
from doctor.probes.runtime.cost_text import in_bytes, in_seconds
from doctor.probes.runtime.deadline import ProbeDeadline

HELLO_BYTES = GREETING_BYTES + WELCOME_BYTES
"""Of a connection that is only opened; one without an answer sends less."""

OwnOrder = PacketOrder | ReachOrder | SpeedOrder | DeviceOrder | RecordTrials
"""Orders that a process executes by itself, or with one other."""


class WhyStage(Stage):
    """Stage of the trials (:class:`doctor.probes.base.Stage`). One request after the other, so that no trial disturbs
    another."""

    name = "why"
    makes = (TrialFacts,)

    def __init__(self) -> None:
        of_groups = MOST_COLLECTIVES * (1 + 2 * (1 + MOST_VARIANTS)) * (PREPARE_SECONDS + RUN_SECONDS)
        self.most_seconds = MOST_REQUESTS * max(PATH_SECONDS, DEVICE_SECONDS) + of_groups
        self._groups = GroupTrials()

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Yield the steps of one request after the other."""
        for question in trial_requests(job):
            plan = _plan_of(question, job, processes)
            orders = next(plan, None)
            while orders is not None:
                job, processes = yield orders._replace(words=_words(orders))
                try:
                    orders = plan.send(processes)
                except StopIteration:
                    break

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Run the trial of this process."""
        task = _read(order)
        require_peers(_ends(task), same_host=isinstance(task, RunTrial))
        if isinstance(task, PrepareTrial | RunTrial):
            return self._groups.take_part(task, context, deadline)
        trials = _trials(task, context, deadline)
        return StageResult({TrialFacts.key: TrialFacts(trials=trials)} if trials else {})


def _read(order: bytes) -> OwnOrder | PrepareTrial | RunTrial:
    task: OwnOrder | PrepareTrial | RunTrial = msgspec.msgpack.decode(
        order, type=prepared(OwnOrder | PrepareTrial | RunTrial)
    )
    return task


def _ends(task: OwnOrder | PrepareTrial | RunTrial) -> list[tuple[str | None, int]]:
    if isinstance(task, PacketOrder | ReachOrder):
        return [(way.address, task.peer.port) for way in (task.peer.way, *task.peer.others)]
    if isinstance(task, SpeedOrder):
        return outgoing_connections(task.itinerary)
    return ends_of(task.join) if isinstance(task, RunTrial) else []


def _words(orders: StageOrders) -> str:
    """Format the cost of a step: its own text and what that leaves open.

    :class:`RecordTrials` has none: a process records the trials of others, and nothing is sent or started.
    """
    tasks = [_read(order) for order in orders.by_token.values()]
    joins = [task.join for task in tasks if isinstance(task, RunTrial)]
    if joins:
        ranks, most = counted(len(joins), "rank"), in_bytes(max(map(most_sent, joins)))
        limits = f"at most {most} a rank and {in_seconds(orders.seconds)}"
        return f"why the collective is slow or fails: {ranks} at once, {limits}"
    more = next((words for task in tasks if (words := _rest(task, len(tasks)))), "")
    return f"{orders.words}; {more}" if more else orders.words


def _rest(task: OwnOrder | PrepareTrial | RunTrial, count: int) -> str:
    """Format the concurrency, and the bytes unless the text of an order names them; ``count``: number of orders."""
    if isinstance(task, PrepareTrial):
        return f"{count} processes load torch at the same time"
    if isinstance(task, DeviceOrder):
        words = "one child at a time"
        if task.on_gpu:
            # Unchanged, and with each change, ROUNDS times.
            children = 1 + bool(task.near) + (task.other is not None)
            most = in_bytes(ROUNDS * children * 2 * (COPIES + 1) * COPY_BYTES)
            words += f", at most {most} copied to and from the GPU"
        return words
    if isinstance(task, PacketOrder):
        # One more than the other paths: packets made smaller on the faulty path, and unchanged ones (try_packets).
        return f"{max(SIZES_AT_ONCE, 2 + len(task.peer.others))} connections at once"
    if isinstance(task, ReachOrder):
        ways = 1 + len(task.peer.others)
        return f"{ways} connections at once, at most {in_bytes(ROUNDS * ways * HELLO_BYTES)} in all"
    return "one connection at a time" if isinstance(task, SpeedOrder) else ""


def _plan_of(question: TrialRequest, job: Job, processes: Sequence[ProbeParticipant]) -> TrialSequence:
    if question.subject == "collective":
        yield from group_plan(question, job, processes)
        return
    is_device = question.subject == "device"
    orders = device_orders(question, processes) if is_device else path_orders(question, job, processes)
    if orders is not None:
        yield orders


def _trials(task: OwnOrder, context: ProbeContext, deadline: ProbeDeadline) -> tuple[Trial, ...]:
    if isinstance(task, RecordTrials):
        return task.trials
    if isinstance(task, DeviceOrder):
        return try_device(task, context, deadline)
    if isinstance(task, PacketOrder):
        return try_packets(task, deadline)
    if isinstance(task, ReachOrder):
        return try_connections(task, deadline)
    return try_speeds(task, context.responder.backlog, deadline) if context.responder is not None else ()

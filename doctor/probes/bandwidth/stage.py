"""Stage that measures the bandwidth between hosts: pairs in rounds, then slow pairs again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from doctor.analysis.fabric.localization.localizer import rounds
from doctor.analysis.fabric.localization.pairing_rounds import MOST_CONFIRMING_FEW
from doctor.analysis.fabric.transfer_matrix import (
    bandwidths,
    ordered_hosts,
    rounds_to_confirm,
    subnets_of,
)
from doctor.core.clock import monotonic
from doctor.core.decoding import prepared
from doctor.core.facts import TransferFacts
from doctor.core.job import Job
from doctor.probes.authorization import require_peers
from doctor.probes.bandwidth.schedule import TransferSchedule, outgoing_connections
from doctor.probes.bandwidth.transfer_plan import ROUND_SECONDS, Rounds, cost_of_rounds, transfer_schedules
from doctor.probes.bandwidth.transfer_worker import TransferWorker
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StagePlan, StageResult
from doctor.probes.reachability.connection_plan import ProbeNode, nodes_of
from doctor.probes.runtime.deadline import ProbeDeadline

MOST_ROUNDS = 16
"""Of the first step: enough to distinguish 65,536 hosts."""

PATIENCE = 8.0
"""Seconds of all rounds after which no more are planned for a host that is slow only at times: if rounds take long,
later ones do, too."""

LATE_START = 1.0
"""Maximum delay in seconds between the first and the last host that receives its order."""


class TransfersStage(Stage):
    """Stage of the transfers (:class:`doctor.probes.base.Stage`).

    First all hosts in rounds, then those that look slow, paired with healthy hosts.
    """

    name = "transfers"
    makes = (TransferFacts,)

    def __init__(self) -> None:
        self.most_seconds = (MOST_ROUNDS + MOST_CONFIRMING_FEW) * ROUND_SECONDS + (1 + MOST_CONFIRMING_FEW) * LATE_START

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Yield rounds for all hosts, then some for the suspects; none for fewer than two hosts."""
        began, first = monotonic(), 0
        for step in range(1 + MOST_CONFIRMING_FEW):
            nodes, tokens = _in_order(job, processes)
            if len(nodes) < 2:
                return
            asked: Rounds
            if step:
                known, places = bandwidths(job), {node.name: place for place, node in enumerate(nodes)}
                names, suspects = known.hosts, rounds_to_confirm(known, patient=monotonic() - began < PATIENCE)
                asked = [[(places[names[one]], places[names[other]]) for one, other in pairs] for pairs in suspects]
            else:
                asked = rounds(len(nodes), MOST_ROUNDS)
            if not asked:
                return
            schedules = transfer_schedules(nodes, asked, first=first, confirms=step > 0)
            first += len(asked)
            seconds, words = cost_of_rounds(asked, confirms=step > 0)
            orders = {tokens[place]: schedule for place, schedule in schedules.items()}
            job, processes = yield StageOrders.of(orders, seconds + LATE_START, words)

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Run the transfers of ``order``."""
        schedule = msgspec.msgpack.decode(order, type=prepared(TransferSchedule))
        require_peers(outgoing_connections(schedule))
        if context.responder is None:
            return StageResult({})
        sent = TransferWorker(schedule, context.responder.backlog, deadline).run()
        return StageResult({TransferFacts.key: TransferFacts(samples=sent)})


def _in_order(job: Job, processes: Sequence[ProbeParticipant]) -> tuple[list[ProbeNode], list[str]]:
    """Return the hosts in the order that follows the network, and the tokens of their processes."""
    agents = {process.token: agent for process in processes if (agent := process.agent)}
    tokens = {agent.host: token for token, agent in agents.items()}
    named = {node.name: node for node in nodes_of(job, agents.values())}
    nodes = [named[name] for name in ordered_hosts(named, subnets_of(job))]
    return nodes, [tokens[node.agent.host] for node in nodes]

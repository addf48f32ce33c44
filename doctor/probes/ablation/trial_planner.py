"""Plan the trials of a request about a path."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from doctor.analysis.interface_choice import choice_of
from doctor.core.job import Job, Rank
from doctor.probes.ablation.alternative_paths import (
    MOST_WAYS,
    AlternativePath,
    alternative_paths,
    endpoint_of,
    facing,
    mtu_between,
)
from doctor.probes.ablation.experiments import TrialRequest, members_by_host
from doctor.probes.ablation.path_trials import PACKET_SECONDS, REACH_SECONDS, SPEED_SECONDS, most_packet_bytes
from doctor.probes.ablation.trials import (
    MOST_ROUNDS,
    OFFLOADS,
    PacketOrder,
    ReachOrder,
    SpeedOrder,
    TrialPeer,
    not_tried,
    recording_orders,
)
from doctor.probes.bandwidth.schedule import TransferPairing, TransferSchedule
from doctor.probes.bandwidth.transfer import MOST_BYTES
from doctor.probes.bandwidth.transfer import MOST_SECONDS as FLOW_SECONDS
from doctor.probes.base import ProbeParticipant, StageOrders
from doctor.probes.reachability.connection_plan import USUAL_MTU

PATH_SECONDS = max(PACKET_SECONDS, REACH_SECONDS, MOST_ROUNDS * (1 + MOST_WAYS) * SPEED_SECONDS)


def path_orders(question: TrialRequest, job: Job, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
    """Return orders for a request about a path; ``None`` if the processes of its hosts do not take part."""
    speakers = {process.rank.host.name: process for process in reversed(processes) if process.agent}
    own, there = speakers.get(question.host), speakers.get(question.peer)
    if own is None or there is None or there.port is None or question.address is None:
        return None
    others = alternative_paths(own.rank, there.rank, question.address)
    mtu = mtu_between(facing(own.rank, there.rank, question.address), endpoint_of(there.rank, question.address))
    peer = TrialPeer(question.peer, there.port, there.word, AlternativePath("", "", question.address, mtu=mtu), others)
    if question.subject == "packet":
        return _for_packets(question, job, own, peer)
    if not peer.others:
        reason = f"another network: none leads from {question.host} to {question.peer} besides"
        return recording_orders((own,), tuple(not_tried("path", why, question.peer) for why in (reason, OFFLOADS)))
    if question.usual is not None:
        return _for_speed(question, own, there, peer)
    words = f"why {question.host} gets no connection to {peer.name}: {_ways(peer)}, at most {REACH_SECONDS:.0f} s"
    return StageOrders.of({own.token: ReachOrder(peer)}, REACH_SECONDS, words)


def _for_packets(question: TrialRequest, job: Job, own: ProbeParticipant, peer: TrialPeer) -> StageOrders:
    setting = _smaller_mtu(members_by_host(job), question.culprits)
    order = PacketOrder(peer, peer.way.mtu or USUAL_MTU, setting)
    others = f" and {_ways(peer)}" if peer.others else ""
    words = (
        f"why packets of {question.host} do not reach {peer.name}: smaller ones{others}, "
        f"at most {most_packet_bytes(order) / 1e6:.1f} MB and {PACKET_SECONDS:.0f} s"
    )
    return StageOrders.of({own.token: order}, PACKET_SECONDS, words)


def _ways(peer: TrialPeer) -> str:
    count = len(peer.others)
    return f"{count} other way{'' if count == 1 else 's'}"


def _smaller_mtu(members: Mapping[str, Rank], hosts: Sequence[str]) -> str:
    """Return the commands that reduce the MTU of ``hosts``: TCP sends no larger packets to such a host."""
    lines: dict[str, list[str]] = {}
    for name in hosts:
        choice = choice_of(members[name]) if name in members else None
        interface = choice.first.interface.name if choice is not None and choice.first is not None else "<interface>"
        lines.setdefault(f"sudo ip link set dev {interface} mtu {{}}", []).append(name)
    return "; ".join(f"{line}  # on {', '.join(names)}" for line, names in lines.items())


def _for_speed(question: TrialRequest, own: ProbeParticipant, there: ProbeParticipant, peer: TrialPeer) -> StageOrders:
    """Return an order for each end: the sender connects, because the address is what is tried."""
    ways = (peer.way, *peer.others) * MOST_ROUNDS
    survey = secrets.randbits(64)
    caller = TrialPeer(question.host, own.port or peer.port, own.word, peer.way, ())
    calls = _schedule(survey, 0, own.word, peer, ways)
    waits = _schedule(survey, 1, there.word, caller, ways)
    seconds = len(ways) * SPEED_SECONDS
    what = f"packets get lost from {question.host} to" if question.lossy else f"{question.host} sends slowly to"
    words = (
        f"why {what} {peer.name}: {_ways(peer)}, {MOST_ROUNDS} times, "
        f"at most {2 * len(ways) * MOST_BYTES / 1e9:.1f} GB and {seconds:.0f} s"
    )
    orders = {
        own.token: SpeedOrder(calls, peer.others, question.usual, question.lossy),
        there.token: SpeedOrder(waits),
    }
    return StageOrders.of(orders, seconds, words)


def _schedule(survey: int, place: int, word: str, peer: TrialPeer, ways: Sequence[AlternativePath]) -> TransferSchedule:
    """Return the transfers with ``peer`` of the caller, at ``place`` 0, or of the host that it calls."""
    pairings = tuple(
        TransferPairing(
            turn, 1 - place, peer.name, way.address, peer.port, peer.word, calls=place == 0, source=way.source
        )
        for turn, way in enumerate(ways)
    )
    return TransferSchedule(survey, place, word, pairings, 0, SPEED_SECONDS, MOST_BYTES, FLOW_SECONDS)

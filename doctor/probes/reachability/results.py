"""Convert the results of one agent to facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from doctor.collectors.network.master_address import Addresses, belongs_here, route_to
from doctor.core.facts import ClockFacts, PathFacts, PathSample, Reach
from doctor.core.facts.probe_results import ReachOutcome
from doctor.probes.reachability.assignments import Assignment, MasterTarget, ProbeTarget
from doctor.probes.reachability.dns_lookups import Lookups
from doctor.probes.reachability.path_probe import PathResult
from doctor.probes.reachability.tcp_info import TcpInfo


@dataclass
class TargetResult:
    """Results for one target so far. ``address``: the one that was connected to."""

    target: ProbeTarget
    address: str | None
    path: PathResult = field(default_factory=PathResult)
    lookups: Lookups = field(default_factory=Lookups)


def master_reach(
    master: MasterTarget, address: str, outcome: ReachOutcome, seconds: float | None, own: Addresses
) -> Reach:
    """Return an attempt to reach the master; ``own``: addresses of this host."""
    interface, source, _ = route_to((address,), own)
    return Reach(master.peer, address, master.port, outcome, "master", _rounded(seconds), interface, source)


def peer_reach(found: TargetResult, own: Addresses) -> Reach | None:
    """Return the attempt to reach a peer; ``None`` if nothing was learned."""
    target, address, outcome = found.target, found.address or "", found.path.outcome
    if outcome is None:
        return None
    if outcome == "refused" and belongs_here(address, own):
        # Nobody has refused but this host itself, which bears the same address.
        outcome = "stranger"
    interface, source, _ = route_to((address,), own) if address else (None, None, None)
    seconds = _rounded(found.path.seconds)
    return Reach(target.peer, address, target.port, outcome, "peer", seconds, interface, source, target.library)


def path_facts(every: Sequence[TargetResult], errors: int | None) -> PathFacts:
    """Return the measured paths. ``errors``: counted by the interfaces meanwhile."""
    samples = tuple(_sample(found) for found in every if found.target.measured)
    infos: list[TcpInfo] = [found.path.info for found in every if found.path.info is not None]
    return PathFacts(
        samples=samples,
        segments_sent=sum(info.sent for info in infos) if infos else None,
        segments_retransmitted=sum(info.retransmitted for info in infos) if infos else None,
        interface_errors=errors,
    )


def _sample(found: TargetResult) -> PathSample:
    path, lookups = found.path, found.lookups
    return PathSample(
        found.target.peer,
        found.address,
        round_trip=_rounded(path.round_trip),
        full_size_arrived=path.full_size_arrived,
        forward_lookup=lookups.forward,
        forward_error=lookups.forward_error,
        reverse_lookup=lookups.reverse,
        reverse_error=lookups.reverse_error,
        reverse_address=lookups.reverse_address,
    )


def clock_facts(assignment: Assignment, every: Sequence[TargetResult]) -> ClockFacts | None:
    """Return the clock of this host against that of the reference; ``None`` if that did not answer."""
    if assignment.reference is None:
        return ClockFacts(reference=assignment.host)
    moments = (
        found.path.moment
        for found in every
        if found.target.peer == assignment.reference and found.path.moment is not None
    )
    best = min(moments, key=lambda moment: moment.round_trip, default=None)
    if best is None:
        return None
    return ClockFacts(
        reference=assignment.reference, offset=round(-best.ahead, 6), uncertainty=round(best.round_trip / 2, 6)
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)

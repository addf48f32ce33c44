"""Point-to-point messages between ranks over the backend of the job, and the ranks whose messages are slow.

Only equivalent paths are compared. Ranks with the same place on their hosts share a rail and are compared with one
another, except ranks of one machine or NVLink domain. Within a host NVLink, bridges and PCIe make some pairs faster by
design; there each pair is compared with the same two GPUs, by model and slot, of other hosts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from doctor.analysis.fabric.bandwidth_suspects import SlowPart, slow_parts
from doctor.analysis.fabric.localization.localizer import BandwidthReading
from doctor.analysis.fabric.pairing import places_on_hosts
from doctor.analysis.fabric.sent_samples import touches
from doctor.analysis.fabric.transfer_matrix import LEAST_READINGS, MOST_WAITED, HostBandwidths
from doctor.analysis.visible_devices import device_of
from doctor.core.facts import CollectiveFacts
from doctor.core.job import Job

LEAST_HOSTS = 3
"""The minimum number of hosts with the same pair: of two hosts, which one is slow can't be determined."""
MOST_PAIRS = 0.75
"""The fraction of slow pairs of a host from which all its ranks are slow. Of three ranks, one is in two thirds of the
pairs."""
EXPLAINED = ("host", "sending", "receiving", "link")
"""Kinds of suspects that are reported for a rail. A boundary between hosts is caused by switches or NVLink, and the
bandwidth over TCP shows which."""


class P2PBandwidth(NamedTuple):
    """Bandwidth from rank ``source`` to rank ``target``: bytes per second of the time in which both had a processor."""

    source: int
    target: int
    value: float
    round: int


class Rail(NamedTuple):
    """Ranks with the same ``place`` on their hosts: their numbers by host name, and their measured bandwidths."""

    place: int
    ranks: Mapping[str, int]
    known: HostBandwidths


class SlowRail(NamedTuple):
    """A slow component of a rail, and the ``usual`` bandwidth of the rail in bytes per second."""

    rail: Rail
    part: SlowPart
    usual: float
    spread: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the slow component."""
        return tuple(self.rail.ranks[name] for name in self.part.hosts)


class SlowNeighbour(NamedTuple):
    """Ranks of one ``host`` whose messages within it are slow: one rank, a pair, or all of them.

    ``way``: both, sending or receiving. ``share``: of the bandwidth of the same pairs on other hosts; ``messages``: the
    slowest first, with the usual bandwidth of that pair."""

    host: str
    ranks: tuple[int, ...]
    way: str
    share: float
    confidence: float
    messages: tuple[tuple[P2PBandwidth, float], ...]


class _RankLocation(NamedTuple):
    """Where a rank is: index in ``Job.hosts``, host name, place on the host, machine, NVLink domain, and the GPU by
    model and slot (without a GPU, the place)."""

    host: int
    name: str
    place: int
    machine: Hashable
    domain: Hashable
    device: Hashable


def p2p_bandwidths(job: Job) -> tuple[P2PBandwidth, ...]:
    """The bandwidths of all messages that arrived."""
    return tuple(
        P2PBandwidth(one.source, rank, one.bytes / one.seconds / (1 - min(one.waited, MOST_WAITED)), one.round)
        for facts, same in job.facts(CollectiveFacts)
        for rank in same.ranks
        for one in facts.exchanges
        if one.seconds > 0 and one.source != rank
    )


def _rank_locations(job: Job) -> dict[int, _RankLocation]:
    found = {}
    places = places_on_hosts(job)
    for rank in job.ranks:
        facts, device, place = rank.find(CollectiveFacts), device_of(rank), places[rank.host.index][rank.number]
        of_gpu = facts is not None and (facts.device or "").startswith("cuda")
        fabric = device.gpu.fabric if device is not None else None
        domain = (fabric.cluster, fabric.clique) if fabric is not None and fabric.cluster else None
        # A rank that uses an unknown GPU is not compared.
        slot = (device.gpu.name, device.gpu.bus_id) if device is not None else (rank.number,) if of_gpu else (place,)
        machine = rank.host.machine if facts is not None and "nccl" in (facts.backend or "") else rank.host.index
        found[rank.number] = _RankLocation(rank.host.index, rank.host.name, place, machine, domain, slot)
    return found


def slow_rails(job: Job, *, least_share: float, least_confidence: float) -> tuple[SlowRail, ...]:
    """The slow components of each rail, compared within the rail."""
    found = []
    for rail in rails(job):
        slow = slow_parts(rail.known, least_share=least_share, least_confidence=least_confidence)
        found += [SlowRail(rail, part, slow.typical, slow.spread) for part in slow.parts if part.kind in EXPLAINED]
    return tuple(found)


def rails(job: Job) -> Iterator[Rail]:
    """The rails with enough messages to compare."""
    bandwidths = p2p_bandwidths(job)
    locations = _rank_locations(job) if bandwidths else {}
    by_place: dict[int, list[P2PBandwidth]] = {}
    for one in bandwidths:
        source, target = locations.get(one.source), locations.get(one.target)
        if source is None or target is None or source.place != target.place:
            continue
        same_domain = source.domain is not None and source.domain == target.domain
        if source.machine != target.machine and source.host != target.host and not same_domain:
            by_place.setdefault(source.place, []).append(one)
    for place, sent in sorted(by_place.items()):
        ends = dict.fromkeys(rank for one in sent for rank in (one.source, one.target))
        ranks = sorted(ends, key=lambda rank: locations[rank].host)
        known = _bandwidths(ranks, [locations[rank].name for rank in ranks], sent)
        if len(sent) >= LEAST_READINGS and len({*known.hosts}) == len(ranks):
            yield Rail(place, dict(zip(known.hosts, ranks, strict=True)), known)


def _bandwidths(ranks: Sequence[int], names: Iterable[str], sent: Iterable[P2PBandwidth]) -> HostBandwidths:
    places = {rank: number for number, rank in enumerate(ranks)}
    readings = (BandwidthReading(places[one.source], places[one.target], one.value, one.round) for one in sent)
    return HostBandwidths(tuple(names), tuple(readings), ())


def slow_neighbours(job: Job, *, least_share: float, least_confidence: float) -> Iterator[SlowNeighbour]:
    """Ranks that are slow within their hosts, if enough other hosts have the same pair of devices."""
    bandwidths = p2p_bandwidths(job)
    locations = _rank_locations(job) if bandwidths else {}
    inside: dict[int, list[P2PBandwidth]] = {}
    same: dict[tuple[Hashable, Hashable], dict[int, list[float]]] = {}
    for one in bandwidths:
        source, target = locations.get(one.source), locations.get(one.target)
        if source and target and source.host == target.host:
            inside.setdefault(source.host, []).append(one)
            same.setdefault((source.device, target.device), {}).setdefault(source.host, []).append(one.value)
    usual = {
        pair: median(median(values) for values in by_host.values())
        for pair, by_host in same.items()
        if len(by_host) >= LEAST_HOSTS
    }
    for host, own in inside.items():
        compared = [
            (one, usual[pair])
            for one in own
            if (pair := (locations[one.source].device, locations[one.target].device)) in usual
        ]
        if len(compared) > 1:
            yield from _slow_within(job.hosts[host].name, compared, least_share, least_confidence)


def _slow_within(
    host: str, compared: Sequence[tuple[P2PBandwidth, float]], least_share: float, least_confidence: float
) -> Iterator[SlowNeighbour]:
    ranks = sorted({rank for one, _ in compared for rank in (one.source, one.target)})
    # Relative to the usual value of the pair, so that all pairs of a healthy host have about 1.
    shares = [one._replace(value=one.value / usual) for one, usual in compared]
    share = sorted(one.value for one in shares)[int(MOST_PAIRS * (len(shares) - 1))]
    if share < least_share:
        yield SlowNeighbour(host, tuple(ranks), "both", share, 0.9, _slowest_first(compared))
        return
    if len(shares) < LEAST_READINGS:
        return
    known = _bandwidths(ranks, map(str, ranks), shares)
    slow = slow_parts(known, least_share=least_share, least_confidence=least_confidence)
    for part in slow.parts:
        if part.kind in EXPLAINED:
            own = tuple(int(name) for name in part.hosts)
            touched = (pair for pair in compared if touches(part.kind, frozenset(own), pair[0].source, pair[0].target))
            way = part.kind if part.kind in ("sending", "receiving") else "both"
            yield SlowNeighbour(host, own, way, part.share, part.suspect.confidence, _slowest_first(touched))


def _slowest_first(compared: Iterable[tuple[P2PBandwidth, float]]) -> tuple[tuple[P2PBandwidth, float], ...]:
    return tuple(sorted(compared, key=lambda pair: pair[0].value / pair[1]))

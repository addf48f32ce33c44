"""What a job should try once more with one thing changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from doctor.analysis.device_speed import What, compare_devices
from doctor.analysis.fabric.bandwidth_suspects import slow_parts
from doctor.analysis.fabric.group_timings import SMALL, broken_collectives, culprits_of, slow_groups, timed_groups
from doctor.analysis.fabric.p2p_bandwidth import SlowRail, p2p_bandwidths, slow_neighbours, slow_rails
from doctor.analysis.fabric.packet_loss import LEAST_SEGMENTS, PacketLoss, lossy_parts
from doctor.analysis.fabric.transfer_matrix import SentSample, bandwidths, sent_samples
from doctor.analysis.interface_choice import choice_of
from doctor.analysis.trial_conclusions import Subject
from doctor.core.facts import CollectiveFacts, CollectiveResult, PathFacts, ReachFacts
from doctor.core.job import Job, Rank
from doctor.probes.ablation.alternative_paths import alternative_paths

MOST_REQUESTS = 4
"""Of one job: each may take a quarter of a minute, and one fault is the cause of many symptoms."""

MOST_COLLECTIVES = 2
"""Of the questions: each trial of a collective starts all of its ranks anew."""

SLOW_SHARE = 0.6
"""Of what is usual: what is above that is no question."""

LEAST_CONFIDENCE = 0.5
"""That a part is to blame, more likely than not."""

SLOWER_TIMES, LEAST_SECONDS, SIGMAS = 2.5, 0.005, 4.0
"""By how much a group is slower than its siblings; see :func:`doctor.analysis.fabric.group_timings.slow_groups`."""

LOST_SHARE, LEAST_LOST = 0.01, 1000
"""Of the segments, and how many have to be sent; see :func:`doctor.analysis.fabric.packet_loss.lossy_parts`."""

LATE_SECONDS = 50e-6
"""For a small message on NCCL within a host; more is a finding (NET027)."""

_CLOSED = frozenset({"refused", "silent", "unroutable", "stranger"})
"""Outcomes of a connection that keep two hosts apart."""


class TrialRequest(NamedTuple):
    """What failed or is slow: ``host`` to ``peer`` (a path; names of hosts) or ``ranks``. ``address``: of the peer, as
    it was dialled; ``culprits``: hosts that all symptoms of this kind share; ``usual``: the value of others, bytes a
    second. ``backend`` and ``bytes``: of a collective; ``what``: a device is slow in. ``lossy``: the path loses
    packets, and ``usual`` counts segments for each one that is sent again. ``controls``: ranks that are well and sit as
    ``ranks`` do: their collective shows what is usual."""

    subject: Subject
    host: str = ""
    peer: str = ""
    address: str | None = None
    culprits: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    usual: float | None = None
    backend: str = ""
    bytes: int = 0
    what: What | None = None
    lossy: bool = False
    controls: tuple[int, ...] = ()

    @property
    def is_small(self) -> bool:
        """Whether it is about the latency of small messages."""
        return self.subject == "collective" and 0 < self.bytes <= SMALL


class _TriedPath(NamedTuple):
    host: str
    peer: str
    address: str | None


def trial_requests(job: Job) -> tuple[TrialRequest, ...]:
    """What to try, worst first: packets that vanish, closed paths, slow and lossy ones, collectives, devices; at most
    :data:`MOST_REQUESTS`. What follows from an earlier one is no question of its own."""
    found: list[TrialRequest] = []
    for question in _every(job):
        collectives = sum(one.subject == "collective" for one in found)
        has_room = len(found) < MOST_REQUESTS and (question.subject != "collective" or collectives < MOST_COLLECTIVES)
        if has_room and not any(_follows(job, question, earlier) for earlier in found):
            found.append(question)
    return tuple(found)


def _every(job: Job) -> Iterator[TrialRequest]:
    yield from _path_requests("packet", _vanishing(job))
    yield from _path_requests("path", _closed(job))
    yield from _slow(job)
    yield from _losing(job)
    yield from _broken(job)
    yield from _slow_collectives(job)
    yield from _slow_rails(job)
    yield from _slow_neighbours(job)
    yield from _late(job)
    yield from _slow_devices(job)


def _follows(job: Job, question: TrialRequest, earlier: TrialRequest) -> bool:
    """Whether ``earlier`` may be why: what goes over a path that loses packets, or is closed, fails too; and ranks
    have one collective that is slow, which the same settings mend or do not. Within a host nothing goes over paths."""
    if earlier.subject == "collective" == question.subject:
        is_broken = earlier.usual is None and not earlier.controls
        is_alike = is_broken or earlier.is_small == question.is_small
        return is_alike and not set(earlier.ranks).isdisjoint(question.ranks)
    if earlier.subject not in ("packet", "path"):
        return False
    hosts = {question.host, question.peer, *job.hosts_of(question.ranks)} - {""}
    return len(hosts) > 1 and bool(hosts.intersection(earlier.culprits)) and question.subject != "device"


def _vanishing(job: Job) -> list[_TriedPath]:
    return [
        _TriedPath(name, sample.peer, sample.address)
        for paths, identical in job.each(PathFacts)
        for name in identical.hosts
        for sample in paths.samples
        if sample.full_size_arrived is False
    ]


def _closed(job: Job) -> list[_TriedPath]:
    """Ways that nobody could open, where the peer has another address."""
    outcomes: dict[_TriedPath, str] = {}
    for reach, identical in job.each(ReachFacts):
        for attempt in reach.attempts:
            for name in identical.hosts if attempt.purpose == "peer" else ():
                way = _TriedPath(name, attempt.peer, attempt.address or None)
                if outcomes.get(way) != "open":
                    outcomes[way] = attempt.outcome
    members = members_by_host(job)
    closed = (way for way, outcome in outcomes.items() if outcome in _CLOSED)
    return [way for way in closed if _has_another(members, way)]


def _slow(job: Job) -> Iterator[TrialRequest]:
    """For every part of the network that is slow the slowest way that it has a part in."""
    slow = slow_parts(bandwidths(job), least_share=SLOW_SHARE, least_confidence=LEAST_CONFIDENCE)
    for part in slow.parts:
        host, peer, _ = part.readings[0]
        culprits = (*part.hosts, *part.others)
        yield TrialRequest("path", host, peer, _address_towards(job, host, peer), culprits, usual=slow.typical)


def _address_towards(job: Job, host: str, peer: str) -> str | None:
    """The address at which ``host`` reached ``peer``, or was reached from there."""
    samples = [(one.source, one.sample) for one in sent_samples(job) if one.sample.address]
    there = next((sample.address for source, sample in samples if (source, sample.peer) == (host, peer)), None)
    members = members_by_host(job)
    choice = choice_of(members[peer]) if there is None and peer in members else None
    return choice.first.address.address if choice is not None and choice.first is not None else there


def _losing(job: Job) -> Iterator[TrialRequest]:
    """For every part of the network that loses packets the way that loses most."""
    # The share of the usual that counts as well is then the share that may be lost.
    usual = 1 / (LOST_SHARE * SLOW_SHARE)
    for lossy in lossy_parts(job, share=LOST_SHARE, least=LEAST_LOST):
        worst = max(_paths_of(job, lossy), key=_lost_share)
        host, peer = worst.source, worst.sample.peer
        address = worst.sample.address or _address_towards(job, host, peer)
        yield TrialRequest("path", host, peer, address, lossy.hosts, usual=usual, lossy=True)


def _paths_of(job: Job, lossy: PacketLoss) -> Iterator[SentSample]:
    """All that went between its hosts, where there are several, else to and from the one."""
    touch = all if len(lossy.hosts) > 1 else any
    for one in sent_samples(job):
        is_of = touch(end in lossy.hosts for end in (one.source, one.sample.peer))
        if is_of and (one.sample.segments_sent or 0) >= LEAST_SEGMENTS:
            yield one


def _lost_share(sending: SentSample) -> float:
    return (sending.sample.segments_retransmitted or 0) / (sending.sample.segments_sent or 1)


def _has_another(members: dict[str, Rank], way: _TriedPath) -> bool:
    own, peer = members.get(way.host), members.get(way.peer)
    return own is not None and peer is not None and bool(alternative_paths(own, peer, way.address))


def members_by_host(job: Job) -> dict[str, Rank]:
    """The first rank of every host, by the host's name."""
    members: dict[str, Rank] = {}
    for rank in job.ranks:
        members.setdefault(rank.host.name, rank)
    return members


def _path_requests(subject: Subject, ways: Iterable[_TriedPath]) -> Iterator[TrialRequest]:
    """One question for all ways that share a host: the host with the most of them, then the next."""
    left = list(ways)
    while left:
        culprits = shared_hosts((way.host, way.peer) for way in left)
        touching = [way for way in left if {way.host, way.peer}.intersection(culprits)]
        yield TrialRequest(subject, *touching[0], culprits)
        left = [way for way in left if way not in touching]


def shared_hosts(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The host that most pairs share; all of these where several share as many."""
    counts = Counter(host for pair in pairs for host in dict.fromkeys(pair))
    most = max(counts.values(), default=0)
    return tuple(sorted(host for host, count in counts.items() if count == most))


def _broken(job: Job) -> Iterator[TrialRequest]:
    """The first collective that broke or brought something else than it had to; those to blame first."""
    broken = broken_collectives(job)
    if broken and broken[0].backend:
        blamed, timing = culprits_of(broken), broken[0]
        others = (rank.number for rank in job.ranks if rank.find(CollectiveFacts) is not None)
        yield TrialRequest("collective", ranks=_once((*blamed, *others)), backend=timing.backend)
        return
    for facts, identical in job.each(CollectiveFacts):
        wrong = next((result for result in facts.results if not is_right(result)), None)
        if wrong is not None:
            members = wrong.members or tuple(rank.number for rank in job.ranks)
            yield TrialRequest("collective", ranks=_once((*identical.ranks, *members)), backend=wrong.backend)
            return


def is_right(result: CollectiveResult) -> bool:
    """Whether a collective brought what it had to; sums of whole numbers in float32 are exact."""
    if result.received is None:
        return False
    exact = result.expected.is_integer() and result.dtype.endswith("32")
    return result.received == result.expected if exact else math.isclose(result.received, result.expected, rel_tol=0.02)


def _slow_collectives(job: Job) -> Iterator[TrialRequest]:
    slow = slow_groups(timed_groups(job), times=SLOWER_TIMES, least=LEAST_SECONDS, sigmas=SIGMAS)
    for one in sorted(slow, key=lambda one: one.usual / one.timed.seconds)[:1]:
        timed = one.timed
        yield TrialRequest(
            "collective",
            ranks=timed.members,
            usual=timed.bytes / one.usual,
            backend=timed.backend,
            bytes=timed.bytes,
        )


def _slow_rails(job: Job) -> Iterator[TrialRequest]:
    """The worst pair of ranks that is slow over the network on the back end of the job, with one of the same rail that
    is well: what two ranks send each other at a time says little of what a collective of them brings."""
    slow = slow_rails(job, least_share=SLOW_SHARE, least_confidence=LEAST_CONFIDENCE)
    for rail in sorted(slow, key=lambda rail: rail.part.share):
        worst, controls = rail.part.readings[0], _well_on(rail, slow)
        pair = (rail.rail.ranks[worst.first], rail.rail.ranks[worst.second])
        backend = _backend_of(job, pair)
        if controls and backend:
            yield TrialRequest("collective", ranks=pair, backend=backend, controls=controls)
            return


def _well_on(rail: SlowRail, slow: Iterable[SlowRail]) -> tuple[int, ...]:
    """The pair of the rail that is nearest to what is usual there, of those that nothing slow touches."""
    own, names = rail.rail, rail.rail.known.hosts
    touched = {
        frozenset((one.first, one.second))
        for other in slow
        if other.rail.place == own.place
        for one in other.part.readings
    }
    ways = [(names[one.source], names[one.target], one.value) for one in own.known.readings]
    well = [way for way in ways if frozenset(way[:2]) not in touched]
    if not well:
        return ()
    host, peer, _ = min(well, key=lambda way: abs(way[2] - rail.usual))
    return own.ranks[host], own.ranks[peer]


def _slow_neighbours(job: Job) -> Iterator[TrialRequest]:
    """The worst pair of ranks that is slow within its host, with the same pair of a host that is well."""
    slow = slow_neighbours(job, least_share=SLOW_SHARE, least_confidence=LEAST_CONFIDENCE)
    for near in sorted(slow, key=lambda near: near.share):
        worst, usual = near.messages[0]
        pair = (worst.source, worst.target)
        controls, backend = _same_places(job, pair, usual), _backend_of(job, pair)
        if controls and backend:
            yield TrialRequest("collective", ranks=pair, backend=backend, controls=controls)
            return


def _same_places(job: Job, pair: tuple[int, int], usual: float) -> tuple[int, ...]:
    """The ranks of another host that sit there as ``pair`` does, and send each other about what is usual."""
    there: dict[int, list[int]] = {}
    for rank in job.ranks:
        there.setdefault(rank.host.index, []).append(rank.number)
    own = next(ranks for ranks in there.values() if pair[0] in ranks)
    places, sent = (
        [sorted(own).index(rank) for rank in pair],
        {(one.source, one.target): one for one in p2p_bandwidths(job)},
    )
    for ranks in there.values():
        source, target = (sorted(ranks)[place] if place < len(ranks) else -1 for place in places)
        one = sent.get((source, target))
        if ranks is not own and one is not None and one.value >= SLOW_SHARE * usual:
            return source, target
    return ()


def _backend_of(job: Job, ranks: Iterable[int]) -> str:
    """On which they exchanged messages; empty where they did not on one."""
    own = set(ranks)
    backends = {
        facts.backend or "" for facts, identical in job.facts(CollectiveFacts) if own.intersection(identical.ranks)
    }
    return backends.pop() if len(backends) == 1 else ""


def _late(job: Job) -> Iterator[TrialRequest]:
    """The group within a host whose small messages on NCCL take longest."""
    late = [
        one
        for one in timed_groups(job)
        if one.backend == "nccl" and one.bytes <= SMALL and one.seconds > LATE_SECONDS
        if len(job.hosts_of(one.members)) == 1
    ]
    for one in sorted(late, key=lambda one: -one.seconds)[:1]:
        # The share of the usual that counts as well is then the time that is no finding.
        usual = one.bytes / (LATE_SECONDS * SLOW_SHARE)
        yield TrialRequest("collective", ranks=one.members, usual=usual, backend=one.backend, bytes=one.bytes)


def _slow_devices(job: Job) -> Iterator[TrialRequest]:
    """The slowest first; of a rank what it is slowest in."""
    asked: set[int] = set()
    for slow in sorted(compare_devices(job).slow, key=lambda slow: slow.value / slow.usual):
        if slow.rank not in asked:
            asked.add(slow.rank)
            yield TrialRequest("device", ranks=(slow.rank,), usual=slow.usual, what=slow.what)


def _once(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ranks))

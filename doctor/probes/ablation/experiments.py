"""Select what a job should try again with one change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from doctor.analysis.device_speed import What, compare_devices
from doctor.analysis.fabric.bandwidth_suspects import slow_parts
from doctor.analysis.fabric.group_timings import SMALL, broken_collectives, culprits_of, slow_groups, timed_groups
from doctor.analysis.fabric.p2p_bandwidth import SlowRail, p2p_bandwidths, slow_neighbours, slow_rails
from doctor.analysis.fabric.packet_loss import LEAST_SEGMENTS, lossy_parts
from doctor.analysis.fabric.sent_samples import sent_samples
from doctor.analysis.fabric.transfer_matrix import bandwidths
from doctor.analysis.interface_choice import choice_of
from doctor.analysis.trial_selection import Subject
from doctor.core.facts import CollectiveFacts, CollectiveResult, PathFacts, ReachFacts
from doctor.core.job import Job, Rank
from doctor.probes.ablation.alternative_paths import alternative_paths

MOST_REQUESTS = 4
"""Of one job: each may take a quarter of a minute, and one fault causes many symptoms."""

MOST_COLLECTIVES = 2
"""Of these: each trial of a collective restarts all of its ranks."""

SLOW_SHARE = 0.6
"""Share of the usual value from which on nothing is tried."""

LEAST_CONFIDENCE = 0.5
"""That a part is at fault: more likely than not."""

SLOWER_TIMES, LEAST_SECONDS, SIGMAS = 2.5, 0.005, 4.0
"""By how much a group is slower than its siblings; see :func:`doctor.analysis.fabric.group_timings.slow_groups`."""

LOST_SHARE, LEAST_LOST = 0.01, 1000
"""Of the segments, and how many have to be sent; see :func:`doctor.analysis.fabric.packet_loss.lossy_parts`."""

LATE_SECONDS = 50e-6
"""For a small message on NCCL within a host; more is a finding (NET027)."""

_CLOSED = frozenset({"refused", "silent", "unroutable", "stranger"})
"""Outcomes of a connection that separate two hosts."""


class TrialRequest(NamedTuple):
    """A failure or slowness: ``host`` to ``peer`` (a path; host names) or ``ranks``.

    ``address``: of the peer, as it was connected to; ``culprits``: hosts that all symptoms of this kind share;
    ``usual``: the value of others, in bytes per second. ``backend`` and ``bytes``: of a collective; ``what``: the slow
    operation of a device. ``lossy``: the path loses packets, and ``usual`` counts segments per retransmitted one.
    ``controls``: healthy ranks placed like ``ranks``, whose collective shows the usual value.
    """

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
        """Whether it concerns the latency of small messages."""
        return self.subject == "collective" and 0 < self.bytes <= SMALL


class _TriedPath(NamedTuple):
    host: str
    peer: str
    address: str | None


def trial_requests(job: Job) -> tuple[TrialRequest, ...]:
    """Return what to try, at most :data:`MOST_REQUESTS`, without consequences of earlier requests.

    The worst come first: lost large packets, closed paths, slow and lossy ones, collectives, devices.
    """
    found: list[TrialRequest] = []
    for question in _every(job):
        collectives = sum(one.subject == "collective" for one in found)
        has_room = len(found) < MOST_REQUESTS and (question.subject != "collective" or collectives < MOST_COLLECTIVES)
        if has_room and not any(_follows(job, question, earlier) for earlier in found):
            found.append(question)
    return tuple(found)


def _every(job: Job) -> Iterator[TrialRequest]:
    vanishing = (
        _TriedPath(name, sample.peer, sample.address)
        for paths, identical in job.each(PathFacts)
        for name in identical.hosts
        for sample in paths.samples
        if sample.full_size_arrived is False
    )
    yield from _path_requests("packet", vanishing)
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
    """Return whether ``earlier`` may be the cause.

    Traffic on a path that loses packets, or is closed, fails too; and ranks with one slow collective depend on the same
    settings. Traffic within a host uses no path.
    """
    if earlier.subject == "collective" == question.subject:
        is_broken = earlier.usual is None and not earlier.controls
        is_alike = is_broken or earlier.is_small == question.is_small
        return is_alike and not set(earlier.ranks).isdisjoint(question.ranks)
    if earlier.subject not in ("packet", "path"):
        return False
    hosts = {question.host, question.peer, *job.hosts_of(question.ranks)} - {""}
    return len(hosts) > 1 and bool(hosts.intersection(earlier.culprits)) and question.subject != "device"


def _closed(job: Job) -> list[_TriedPath]:
    """Return paths that no process could open, if the peer has another address."""
    outcomes: dict[_TriedPath, str] = {}
    for reach, identical in job.each(ReachFacts):
        for attempt in reach.attempts:
            for name in identical.hosts if attempt.purpose == "peer" else ():
                way = _TriedPath(name, attempt.peer, attempt.address or None)
                if outcomes.get(way) != "open":
                    outcomes[way] = attempt.outcome
    members = members_by_host(job)
    closed = (way for way, outcome in outcomes.items() if outcome in _CLOSED)
    known = [(way, members.get(way.host), members.get(way.peer)) for way in closed]
    return [way for way, own, peer in known if own and peer and alternative_paths(own, peer, way.address)]


def _slow(job: Job) -> Iterator[TrialRequest]:
    """Return the slowest path of every slow part of the network."""
    slow = slow_parts(bandwidths(job), least_share=SLOW_SHARE, least_confidence=LEAST_CONFIDENCE)
    for part in slow.parts:
        host, peer, _ = part.readings[0]
        culprits = (*part.hosts, *part.others)
        yield TrialRequest("path", host, peer, _address_towards(job, host, peer), culprits, usual=slow.typical)


def _address_towards(job: Job, host: str, peer: str) -> str | None:
    """Return the address at which ``host`` reached ``peer``, or was reached from there."""
    samples = [(one.source, one.sample) for one in sent_samples(job) if one.sample.address]
    there = next((sample.address for source, sample in samples if (source, sample.peer) == (host, peer)), None)
    members = members_by_host(job)
    choice = choice_of(members[peer]) if there is None and peer in members else None
    return choice.first.address.address if choice is not None and choice.first is not None else there


def _losing(job: Job) -> Iterator[TrialRequest]:
    """Return the most lossy path of every lossy part of the network."""
    # The share of the usual that counts as well is then the share that may be lost.
    usual = 1 / (LOST_SHARE * SLOW_SHARE)
    for lossy in lossy_parts(job, share=LOST_SHARE, least=LEAST_LOST):
        # All transfers between its hosts if there are several, else to and from the one.
        touch = all if len(lossy.hosts) > 1 else any
        worst = max(
            (
                one
                for one in sent_samples(job)
                if (one.sample.segments_sent or 0) >= LEAST_SEGMENTS
                and touch(end in lossy.hosts for end in (one.source, one.sample.peer))
            ),
            key=lambda one: (one.sample.segments_retransmitted or 0) / (one.sample.segments_sent or 1),
        )
        host, peer = worst.source, worst.sample.peer
        address = worst.sample.address or _address_towards(job, host, peer)
        yield TrialRequest("path", host, peer, address, lossy.hosts, usual=usual, lossy=True)


def members_by_host(job: Job) -> dict[str, Rank]:
    """Return the first rank of every host, by host name."""
    return {rank.host.name: rank for rank in reversed(job.ranks)}


def _path_requests(subject: Subject, ways: Iterable[_TriedPath]) -> Iterator[TrialRequest]:
    """Return one request for all paths that share a host: the host with the most of them, then the next."""
    left = list(ways)
    while left:
        culprits = shared_hosts((way.host, way.peer) for way in left)
        touching = [way for way in left if {way.host, way.peer}.intersection(culprits)]
        yield TrialRequest(subject, *touching[0], culprits)
        left = [way for way in left if way not in touching]


def shared_hosts(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the host that most pairs share; several if they tie."""
    counts = Counter(host for pair in pairs for host in dict.fromkeys(pair))
    most = max(counts.values(), default=0)
    return tuple(sorted(host for host, count in counts.items() if count == most))


def _broken(job: Job) -> Iterator[TrialRequest]:
    """Return the first collective that failed or gave a wrong result; the suspects first."""
    broken = broken_collectives(job)
    if broken and broken[0].backend:
        blamed, timing = culprits_of(broken), broken[0]
        others = (rank.number for rank in job.ranks if rank.find(CollectiveFacts) is not None)
        ranks = tuple(dict.fromkeys((*blamed, *others)))
        yield TrialRequest("collective", ranks=ranks, backend=timing.backend)
        return
    for facts, identical in job.each(CollectiveFacts):
        wrong = next((result for result in facts.results if not is_right(result)), None)
        if wrong is not None:
            members = wrong.members or tuple(rank.number for rank in job.ranks)
            ranks = tuple(dict.fromkeys((*identical.ranks, *members)))
            yield TrialRequest("collective", ranks=ranks, backend=wrong.backend)
            return


def is_right(result: CollectiveResult) -> bool:
    """Return whether the result of a collective is right; sums of integers in float32 are exact."""
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
    """Return the worst pair of ranks that is slow over the network on the backend of the job.

    A healthy pair of the same rail is the control: messages of two ranks predict little of their collective.
    """
    slow = slow_rails(job, least_share=SLOW_SHARE, least_confidence=LEAST_CONFIDENCE)
    for rail in sorted(slow, key=lambda rail: rail.part.share):
        worst, controls = rail.part.readings[0], _well_on(rail, slow)
        pair = (rail.rail.ranks[worst.first], rail.rail.ranks[worst.second])
        backend = _backend_of(job, pair)
        if controls and backend:
            yield TrialRequest("collective", ranks=pair, backend=backend, controls=controls)
            return


def _well_on(rail: SlowRail, slow: Iterable[SlowRail]) -> tuple[int, ...]:
    """Return the pair of the rail that is nearest to the usual value, of those that nothing slow affects."""
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
    """Return the worst pair of ranks that is slow within its host, with the same pair of a healthy host."""
    slow = slow_neighbours(job, least_share=SLOW_SHARE, least_confidence=LEAST_CONFIDENCE)
    for near in sorted(slow, key=lambda near: near.share):
        worst, usual = near.messages[0]
        pair = (worst.source, worst.target)
        controls, backend = _same_places(job, pair, usual), _backend_of(job, pair)
        if controls and backend:
            yield TrialRequest("collective", ranks=pair, backend=backend, controls=controls)
            return


def _same_places(job: Job, pair: tuple[int, int], usual: float) -> tuple[int, ...]:
    """Return the ranks in the places of ``pair`` on another host, if their messages are about as fast as usual."""
    there: dict[int, list[int]] = {}
    for rank in job.ranks:
        there.setdefault(rank.host.index, []).append(rank.number)
    own = next(ranks for ranks in there.values() if pair[0] in ranks)
    places = [sorted(own).index(rank) for rank in pair]
    sent = {(one.source, one.target): one for one in p2p_bandwidths(job)}
    for ranks in there.values():
        source, target = (sorted(ranks)[place] if place < len(ranks) else -1 for place in places)
        one = sent.get((source, target))
        if ranks is not own and one is not None and one.value >= SLOW_SHARE * usual:
            return source, target
    return ()


def _backend_of(job: Job, ranks: Iterable[int]) -> str:
    """Return the backend of their messages; empty if there is not exactly one."""
    own = set(ranks)
    backends = {facts.backend or "" for facts, same in job.facts(CollectiveFacts) if own.intersection(same.ranks)}
    return backends.pop() if len(backends) == 1 else ""


def _late(job: Job) -> Iterator[TrialRequest]:
    """Return the group within a host whose small messages on NCCL take longest."""
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
    """Return the slowest devices first; of a rank its slowest operation."""
    asked: set[int] = set()
    for slow in sorted(compare_devices(job).slow, key=lambda slow: slow.value / slow.usual):
        if slow.rank not in asked:
            asked.add(slow.rank)
            yield TrialRequest("device", ranks=(slow.rank,), usual=slow.usual, what=slow.what)

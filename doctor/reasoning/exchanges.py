"""Messages between single ranks over the back end of the job: which rank's way to others is slow.

Ranks in the same place of their hosts share a rail: they are compared with one another. Within a host NVLink, bridges
and PCIe make some pairs faster by design; there each pair is compared with the same pair on other hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from doctor.facts import CollectiveFacts
from doctor.job import Job
from doctor.reasoning.bandwidth import SlowPart, slow_parts
from doctor.reasoning.isolation import Reading
from doctor.reasoning.transfers import LEAST_READINGS, Bandwidths

LEAST_HOSTS = 3
"""That have the same pair: of two, which one is slow can't be told."""


class Message(NamedTuple):
    """That came from rank ``source`` to rank ``target``: ``value`` bytes a second."""

    source: int
    target: int
    value: float
    round: int


class Rail(NamedTuple):
    """Ranks in the same ``place`` of their hosts, their numbers by the host's name, and what they measured."""

    place: int
    ranks: Mapping[str, int]
    known: Bandwidths


class SlowRail(NamedTuple):
    """A slow part of a rail, and the ``usual`` bandwidth there, bytes a second."""

    rail: Rail
    part: SlowPart
    usual: float
    spread: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """That are at fault."""
        return tuple(self.rail.ranks[name] for name in (*self.part.hosts, *self.part.others))


class SlowNeighbour(NamedTuple):
    """Ranks of one ``host`` whose messages within it are slow: one, or both of a pair. ``share``: of what the same
    pairs of other hosts have; ``messages``: bytes a second by the ranks, slowest first, with what is usual."""

    host: str
    ranks: tuple[int, ...]
    share: float
    confidence: float
    messages: tuple[tuple[Message, float], ...]


class _Seat(NamedTuple):
    host: str
    place: int


def messages(job: Job) -> tuple[Message, ...]:
    """All that arrived."""
    return tuple(
        Message(one.source, rank, one.bytes / one.seconds, one.round)
        for facts, alike in job.facts(CollectiveFacts)
        for rank in alike.ranks
        for one in facts.exchanges
        if one.seconds > 0 and one.source != rank
    )


def _seats(job: Job) -> dict[int, _Seat]:
    """The host and the place there of every rank."""
    return {rank: _Seat(local.name, place) for local in job.by_host() for place, rank in enumerate(sorted(local.ranks))}


def slow_rails(job: Job, *, least_share: float, least_confidence: float) -> tuple[SlowRail, ...]:
    """Of each rail the parts that are slow, compared within the rail."""
    found = []
    for rail in _rails(job):
        slow = slow_parts(rail.known, least_share=least_share, least_confidence=least_confidence)
        found += [SlowRail(rail, part, slow.typical, slow.spread) for part in slow.parts]
    return tuple(found)


def _rails(job: Job) -> Iterator[Rail]:
    seats = _seats(job)
    by_place: dict[int, list[Message]] = {}
    for one in messages(job):
        source, target = seats.get(one.source), seats.get(one.target)
        if source and target and source.host != target.host and source.place == target.place:
            by_place.setdefault(source.place, []).append(one)
    order = {local.name: number for number, local in enumerate(job.by_host())}
    for place, sent in sorted(by_place.items()):
        ranks = {seats[rank].host: rank for one in sent for rank in (one.source, one.target)}
        names = sorted(ranks, key=lambda name: order[name])
        known = _bandwidths(names, [(seats[one.source].host, seats[one.target].host, one.value, one) for one in sent])
        if len(known.readings) >= LEAST_READINGS:
            yield Rail(place, ranks, known)


def _bandwidths(names: list[str], sent: list[tuple[str, str, float, Message]]) -> Bandwidths:
    places = {name: number for number, name in enumerate(names)}
    readings = (Reading(places[source], places[target], value, one.round) for source, target, value, one in sent)
    return Bandwidths(tuple(names), tuple(readings), ())


def slow_neighbours(job: Job, *, least_share: float, least_confidence: float) -> Iterator[SlowNeighbour]:
    """Ranks that are slow within their hosts, where enough other hosts have ranks in the same places."""
    seats = _seats(job)
    inside: dict[str, list[Message]] = {}
    alike: dict[tuple[int, int], dict[str, list[float]]] = {}
    for one in messages(job):
        source, target = seats.get(one.source), seats.get(one.target)
        if source and target and source.host == target.host:
            inside.setdefault(source.host, []).append(one)
            alike.setdefault((source.place, target.place), {}).setdefault(source.host, []).append(one.value)
    usual = {
        places: median(median(values) for values in by_host.values())
        for places, by_host in alike.items()
        if len(by_host) >= LEAST_HOSTS
    }
    for host, own in inside.items():
        compared = [
            (one, usual[places])
            for one in own
            if (places := (seats[one.source].place, seats[one.target].place)) in usual
        ]
        yield from _slow_within(host, compared, least_share, least_confidence)


def _slow_within(
    host: str, compared: list[tuple[Message, float]], least_share: float, least_confidence: float
) -> Iterator[SlowNeighbour]:
    if len(compared) < LEAST_READINGS:
        return
    ranks = sorted({rank for one, _ in compared for rank in (one.source, one.target)})
    names = [str(rank) for rank in ranks]
    # By what is usual for the pair: all of a host that is well have 1.
    shares = [(str(one.source), str(one.target), one.value / usual, one) for one, usual in compared]
    slow = slow_parts(_bandwidths(names, shares), least_share=least_share, least_confidence=least_confidence)
    for part in slow.parts:
        if part.kind != "boundary":
            own = tuple(int(name) for name in part.hosts)
            touched = [pair for pair in compared if _is_of(part, own, pair[0])]
            touched.sort(key=lambda pair: pair[0].value / pair[1])
            yield SlowNeighbour(host, own, part.share, part.suspect.confidence, tuple(touched))


def _is_of(part: SlowPart, ranks: tuple[int, ...], one: Message) -> bool:
    if part.kind == "link":
        return {one.source, one.target} == {*ranks}
    ends = {"sending": (one.source,), "receiving": (one.target,)}.get(part.kind, (one.source, one.target))
    return bool({*ranks}.intersection(ends))

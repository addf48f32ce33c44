"""Which two ranks exchange messages in which round, so that a slow one can be told from its partners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from doctor.analysis.fabric.localization.localizer import rounds
from doctor.core.job import Job

NO_PARTNER = -1
"""In place of a partner, for who rests."""

MOST_ROUNDS = 16
"""Between hosts, and as many within them."""
TURNS = 3
"""What was slow once only is nobody's fault, and of the 56 ways between eight ranks of a busy machine one may be slow
twice: seen in one of eight runs."""


class RankSlot(NamedTuple):
    """Where a rank sits: its ``host``, and its ``place`` among all ranks there, taking part or not."""

    host: int
    place: int


def places_on_hosts(job: Job) -> dict[int, dict[int, int]]:
    """By the host's place in ``Job.hosts``, the place of each of its ranks among them, by number."""
    there: dict[int, list[int]] = {}
    for rank in job.ranks:
        there.setdefault(rank.host.index, []).append(rank.number)
    return {host: {rank: place for place, rank in enumerate(sorted(own))} for host, own in there.items()}


def partners_of(seats: Sequence[RankSlot]) -> tuple[tuple[int, ...], ...]:
    """The partners of each rank, round by round; ranks are numbered as ``seats`` are, and all have as many rounds.

    First ranks that have the same place on their hosts, as a job's rings go over the network: each of them often has a
    card of its own. Where they share one, all pairs of two hosts have to be as many: hosts with another number of ranks
    than most rest. Then all ranks of a host among themselves. Everything :data:`TURNS` times.
    """
    there: dict[int, dict[int, int]] = {}
    for number, seat in enumerate(seats):
        there.setdefault(seat.host, {})[seat.place] = number
    hosts = [*there.values()]
    every = [*_between(_alike(hosts)), *_within(hosts)] * TURNS
    return tuple(tuple(pairs.get(number, NO_PARTNER) for pairs in every) for number in range(len(seats)))


def _alike(hosts: Sequence[Mapping[int, int]]) -> list[Mapping[int, int]]:
    """Those with the places that most of them have."""
    if not hosts:
        return []
    usual, _ = Counter(frozenset(own) for own in hosts).most_common(1)[0]
    return [own for own in hosts if frozenset(own) == usual]


def _between(hosts: Sequence[Mapping[int, int]]) -> Iterator[Mapping[int, int]]:
    for pairs in rounds(len(hosts), MOST_ROUNDS):
        yield _both_ways((hosts[one][place], hosts[other][place]) for one, other in pairs for place in hosts[one])


def _within(hosts: Sequence[Mapping[int, int]]) -> Iterator[Mapping[int, int]]:
    places = max((place + 1 for own in hosts for place in own), default=0)
    for pairs in rounds(places, MOST_ROUNDS):
        yield _both_ways((own[one], own[other]) for own in hosts for one, other in pairs if one in own and other in own)


def _both_ways(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for one, other in pairs:
        found[one], found[other] = other, one
    return found

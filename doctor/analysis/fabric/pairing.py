"""The partners of each rank in each round of message exchange, so that a slow rank can be distinguished from its
partners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from doctor.analysis.fabric.localization.localizer import rounds
from doctor.core.job import Job

NO_PARTNER = -1
"""The partner of a rank that rests."""

MOST_ROUNDS = 16
"""The maximum number of rounds between hosts, and also within them."""
TURNS = 3
"""The number of repetitions. On a busy machine one of the 56 directions between eight ranks may be slow by chance
twice."""


class RankSlot(NamedTuple):
    """The location of a rank: its ``host``, and its ``place`` among all ranks of the host."""

    host: int
    place: int


def places_on_hosts(job: Job) -> dict[int, dict[int, int]]:
    """The place of each rank on its host, by the index of the host in ``Job.hosts`` and the number of the rank."""
    there: dict[int, list[int]] = {}
    for rank in job.ranks:
        there.setdefault(rank.host.index, []).append(rank.number)
    return {host: {rank: place for place, rank in enumerate(sorted(own))} for host, own in there.items()}


def partners_of(locations: Sequence[RankSlot]) -> tuple[tuple[int, ...], ...]:
    """The partners of each rank, round by round; ranks have the order of ``locations`` and the same number of rounds.

    First ranks with the same place on their hosts, because the rings of a job use the network like that and each rank
    often has its own NIC. If ranks share a NIC, every two hosts need the same number of pairs, so hosts with an unusual
    number of ranks rest. Then all ranks of a host among themselves. All of it :data:`TURNS` times."""
    there: dict[int, dict[int, int]] = {}
    for number, location in enumerate(locations):
        there.setdefault(location.host, {})[location.place] = number
    every = [*_rounds_of_partners([*there.values()])] * TURNS
    return tuple(tuple(pairs.get(number, NO_PARTNER) for pairs in every) for number in range(len(locations)))


def _rounds_of_partners(hosts: Sequence[Mapping[int, int]]) -> Iterator[Mapping[int, int]]:
    usual = Counter(frozenset(own) for own in hosts).most_common(1)[0][0] if hosts else frozenset()
    alike = [own for own in hosts if frozenset(own) == usual]
    for pairs in rounds(len(alike), MOST_ROUNDS):
        yield _both_ways((alike[one][place], alike[other][place]) for one, other in pairs for place in usual)
    places = max((place + 1 for own in hosts for place in own), default=0)
    for pairs in rounds(places, MOST_ROUNDS):
        yield _both_ways((own[one], own[other]) for own in hosts for one, other in pairs if one in own and other in own)


def _both_ways(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for one, other in pairs:
        found[one], found[other] = other, one
    return found

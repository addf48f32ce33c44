"""Which two ranks exchange messages in which round, so that a slow one can be told from its partners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from doctor.reasoning.isolation import rounds

NOBODY = -1
"""In place of a partner, for who rests."""

MOST_ROUNDS = 16
"""Between hosts, and as many within them."""
TURNS = 2
"""What was slow once only is nobody's fault."""

Pair = tuple[int, int]


def partners_of(hosts: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
    """The partners of each rank, by its place; ``hosts`` has the host of each place.

    First ranks that have the same place on their hosts, as a job's rings go over the network: each of them often has a
    card of its own. Then all ranks of a host among themselves. Everything :data:`TURNS` times. Empty where there is
    nobody to meet.
    """
    there: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        there.setdefault(host, []).append(place)
    every = [*_between([*there.values()]), *_within([*there.values()])] * TURNS
    return {place: tuple(_partner(place, pairs) for pairs in every) for place in range(len(hosts))} if every else {}


def _partner(place: int, pairs: Mapping[int, int]) -> int:
    return pairs.get(place, NOBODY)


def _between(hosts: Sequence[Sequence[int]]) -> Iterator[Mapping[int, int]]:
    for pairs in rounds(len(hosts), MOST_ROUNDS):
        yield _both_ways(pair for one, other in pairs for pair in zip(hosts[one], hosts[other], strict=False))


def _within(hosts: Sequence[Sequence[int]]) -> Iterator[Mapping[int, int]]:
    for pairs in rounds(max(map(len, hosts), default=0), MOST_ROUNDS):
        yield _both_ways((own[one], own[other]) for own in hosts for one, other in pairs if max(one, other) < len(own))


def _both_ways(pairs: Iterable[Pair]) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for one, other in pairs:
        found[one], found[other] = other, one
    return found

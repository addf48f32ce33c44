"""The pairs to measure again before a suspect is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median_high

from doctor.analysis.fabric.localization.pairing_rounds import (
    ALL_PAIRS_UP_TO,
    Pairs,
    most_rounds_to_confirm,
    rounds_to_confirm,
)
from doctor.analysis.fabric.localization.suspects import BandwidthReading, Localization, Suspect

SAMPLED = 8
"""Pairs across a suspected boundary, and the same number beside it, in each of these rounds."""

ENOUGH = 2
"""Confirming rounds after which a host that was slow in all of them needs no more."""

CERTAIN = 0.999
WHOLE_HOSTS = ("host", "sending", "receiving")

SLOW = 0.6
"""Readings below this share of the usual value are measured again."""


def confirming(
    isolation: Localization, readings: Sequence[BandwidthReading], count: int, *, patient: bool = True
) -> tuple[Pairs, ...]:
    """Up to :func:`rounds_to_confirm` rounds that confirm the suspects.

    They pair suspected hosts with hosts whose readings are all usual (if possible with other ones than before), repeat
    slow pairs that no suspect explains, and measure both sides of suspected boundaries. With ``patient``, up to
    :func:`most_rounds_to_confirm` rounds if a host may be slow at times.

    Empty if nothing was slow, if all confirming rounds are in ``readings``, or if these left no doubt. Call it again
    after each round: the next one depends on the new readings. Pairs are repeated without a suspect in ``isolation``,
    too."""
    played = len({one.round for one in readings if one.confirms})
    plan = _ConfirmationPlan(isolation, readings, count)
    if played and plan.is_settled(isolation, played):
        return ()
    most = rounds_to_confirm(count)
    if patient and played >= most and plan.may_miss_intermittent(isolation):
        most = most_rounds_to_confirm(count)
    return tuple(pairs for turn in range(played, most) if (pairs := plan.round(turn)))


class _ConfirmationPlan:
    def __init__(self, isolation: Localization, readings: Sequence[BandwidthReading], count: int) -> None:
        # A host that is less than likely has one or two slow pairs, which are measured again first.
        self._suspects = [
            one
            for one in isolation.suspects
            if one.kind == "boundary" or (one.kind != "link" and one.confidence >= 0.5)
        ]
        self._paired = Counter(_pair(one.source, one.target) for one in readings)
        explained = [frozenset(one.members) for one in self._suspects]

        def is_explained(pair: tuple[int, int]) -> bool:
            return any(len(members & {*pair}) == 1 for members in explained)

        intermittent = _intermittent_pairs(isolation, readings)
        unexplained = [pair for pair in _slow_pairs(isolation, readings) if not is_explained(pair)]
        self._few = count <= 2 * ALL_PAIRS_UP_TO
        once_slow = {*unexplained}
        if self._few:  # Of many hosts dozens have had a slow moment.
            once_slow.update(pair for pair in intermittent if not is_explained(pair))
        often = Counter(host for pair in once_slow for host in pair)
        self._at_times = [
            host
            for host, times in often.most_common()
            if (times > 1 if self._few else any(host in pair for pair in intermittent))
        ]
        touched = {host for pair in once_slow for host in pair}
        touched.update(host for one in self._suspects if one.kind != "boundary" for host in one.members)
        self._unexplained = [pair for pair in unexplained if pair not in intermittent]
        self._good = [host for host in range(count) if host not in touched]
        self._count = count

    def is_settled(self, isolation: Localization, played: int) -> bool:
        """Whether all slow readings belong to hosts that were slow with every peer, ``played`` rounds included."""
        return (
            played >= ENOUGH
            and not self._unexplained
            and all(
                one.kind in WHOLE_HOSTS and one.confidence >= CERTAIN and one.slow == one.readings
                for one in isolation.suspects
            )
        )

    def may_miss_intermittent(self, isolation: Localization) -> bool:
        """Whether a host may be slow at times without being a suspect, or is part of a suspected link."""
        return any(
            (one.kind in WHOLE_HOSTS and one.confidence < CERTAIN)
            or (one.kind == "link" and not {*self._at_times}.isdisjoint(one.members))
            for one in isolation.suspects
        )

    def round(self, turn: int) -> Pairs:
        """Pairs for one round, the most certain suspects first; every host is in one pair at most."""
        busy: set[int] = set()
        found: list[tuple[int, int]] = []
        for pair in self._wanted(turn, busy):
            if not busy & {*pair}:
                busy.update(pair)
                found.append(pair)
        self._paired.update(found)
        return tuple(sorted(found))

    def _wanted(self, turn: int, busy: set[int]) -> Iterator[tuple[int, int]]:
        for one in self._suspects:
            yield from self._sides(one, turn) if one.kind == "boundary" else self._with_good(one.members[0], busy)
        if not self._few or (turn % 2 == 0 and turn < rounds_to_confirm(self._count)):
            yield from self._unexplained
        for host in self._at_times:
            yield from self._with_good(host, busy)
        yield from self._unexplained

    def _with_good(self, host: int, busy: set[int]) -> Iterator[tuple[int, int]]:
        """A suspected host and a good one, preferably one with which it was seldom paired."""
        free = [_pair(host, other) for other in self._good if other not in busy]
        yield from sorted(free, key=lambda pair: self._paired[pair])[:1]

    def _sides(self, boundary: Suspect, turn: int) -> Iterator[tuple[int, int]]:
        """In even rounds pairs within the smaller side, in odd rounds pairs across."""
        inside = boundary.members
        others = [host for host in range(self._count) if host not in {*inside}]
        if turn % 2 == 0:
            step = len(inside) // 2
            yield from self._fresh(zip(inside[:step], inside[len(inside) - step :], strict=True))
        else:
            yield from self._fresh(zip(inside, reversed(others), strict=False))

    def _fresh(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return sorted((_pair(*pair) for pair in pairs), key=lambda pair: self._paired[pair])[:SAMPLED]


def _intermittent_pairs(isolation: Localization, readings: Sequence[BandwidthReading]) -> frozenset[tuple[int, int]]:
    """Pairs that were slow in one round and normal, in both directions, in another.

    No link behaves like that, but one of the hosts may be slow at times; other peers show which one."""
    limit = SLOW * isolation.typical
    worst: dict[tuple[tuple[int, int], int], float] = {}
    for one in readings:
        key = (_pair(one.source, one.target), one.round)
        worst[key] = min(one.value, worst.get(key, one.value))
    slow = {pair for (pair, _), value in worst.items() if value < limit}
    return frozenset(pair for (pair, _), value in worst.items() if value >= limit and pair in slow)


def _slow_pairs(isolation: Localization, readings: Sequence[BandwidthReading]) -> list[tuple[int, int]]:
    """Pairs that were slow in one direction in most rounds; first those slow in both, which is seldom chance."""
    limit = SLOW * isolation.typical
    ways: dict[tuple[int, int], list[float]] = {}
    for one in readings:
        ways.setdefault((one.source, one.target), []).append(one.value)
    values = {way: median_high(own) for way, own in ways.items()}
    slow = {_pair(*way) for way, value in values.items() if value < limit}
    return sorted(slow, key=lambda pair: (max(values.get(pair, 0.0), values.get(pair[::-1], 0.0)), pair))


def _pair(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first < second else (second, first)

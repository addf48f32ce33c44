"""Which pairs to measure again before anybody is blamed."""

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
"""Pairs across a suspected boundary, and as many beside it, in each of these rounds."""

ENOUGH = 2
"""Rounds that confirm, after which a host that is slow in all of them needs no more."""

CERTAIN = 0.999
WHOLE_HOSTS = ("host", "sending", "receiving")

SLOW = 0.6
"""Readings below this share of the usual are measured again."""


def confirming(
    isolation: Localization, readings: Sequence[BandwidthReading], count: int, *, patient: bool = True
) -> tuple[Pairs, ...]:
    """Up to :func:`rounds_to_confirm` rounds that pair suspected hosts with hosts whose readings are all usual (other
    ones than before, where there are any), repeat slow pairs that no suspect explains, and look at both sides of
    suspected boundaries; up to :func:`most_rounds_to_confirm` where some host may still be slow at times and there is
    time for that (``patient``).

    Empty where nothing was slow, where all rounds that confirm are among ``readings``, or where these have left no
    doubt. Called again after each of its rounds, it plans the next one by what is known then, which finds more than
    playing all as planned. ``isolation`` may name nobody and something be left to repeat: what was slow once is no link
    yet.
    """
    played = len({one.round for one in readings if one.confirms})
    plan = _ConfirmationPlan(isolation, readings, count)
    if played and plan.leaves_no_doubt(isolation, played):
        return ()
    most = rounds_to_confirm(count)
    if patient and played >= most and plan.misses_one_at_times(isolation):
        most = most_rounds_to_confirm(count)
    return tuple(pairs for turn in range(played, most) if (pairs := plan.round(turn)))


class _ConfirmationPlan:
    def __init__(self, isolation: Localization, readings: Sequence[BandwidthReading], count: int) -> None:
        self._suspects = [one for one in isolation.suspects if one.kind == "boundary" or _is_likely_host(one)]
        self._met = Counter(_pair(one.source, one.target) for one in readings)
        explained = [frozenset(one.members) for one in self._suspects]

        def is_explained(pair: tuple[int, int]) -> bool:
            return any(len(members & {*pair}) == 1 for members in explained)

        wavering = _wavering(isolation, readings)
        unexplained = [pair for pair in _slow_pairs(isolation, readings) if not is_explained(pair)]
        self._few = count <= 2 * ALL_PAIRS_UP_TO
        once_slow = {*unexplained}
        if self._few:  # Of many hosts dozens have had a slow moment.
            once_slow.update(pair for pair in wavering if not is_explained(pair))
        often = Counter(host for pair in once_slow for host in pair)
        self._at_times = [
            host
            for host, times in often.most_common()
            if (times > 1 if self._few else any(host in pair for pair in wavering))
        ]
        touched = {host for pair in once_slow for host in pair}
        touched.update(host for one in self._suspects if one.kind != "boundary" for host in one.members)
        self._unexplained = [pair for pair in unexplained if pair not in wavering]
        self._good = [host for host in range(count) if host not in touched]
        self._count = count

    def leaves_no_doubt(self, isolation: Localization, played: int) -> bool:
        """Whether all that was slow is a host's that was slow with everybody it met, ``played`` rounds to confirm that
        among them."""
        return (
            played >= ENOUGH
            and not self._unexplained
            and all(
                one.kind in WHOLE_HOSTS and one.confidence >= CERTAIN and one.slow == one.readings
                for one in isolation.suspects
            )
        )

    def misses_one_at_times(self, isolation: Localization) -> bool:
        """Whether some host may be slow at times, and is not known to be; or is in a link that is blamed."""
        return any(
            (one.kind in WHOLE_HOSTS and one.confidence < CERTAIN)
            or (one.kind == "link" and not {*self._at_times}.isdisjoint(one.members))
            for one in isolation.suspects
        )

    def round(self, turn: int) -> Pairs:
        """Every host in one pair at most; the surest suspects first."""
        busy: set[int] = set()
        found: list[tuple[int, int]] = []
        for pair in self._wanted(turn, busy):
            if not busy & {*pair}:
                busy.update(pair)
                found.append(pair)
        self._met.update(found)
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
        """A suspected host and one that is known to be good, preferably one that it has seldom met."""
        free = [_pair(host, other) for other in self._good if other not in busy]
        yield from sorted(free, key=lambda pair: self._met[pair])[:1]

    def _sides(self, boundary: Suspect, turn: int) -> Iterator[tuple[int, int]]:
        """In one round pairs within the smaller side, in the next one pairs across."""
        inside = boundary.members
        others = [host for host in range(self._count) if host not in {*inside}]
        if turn % 2 == 0:
            step = len(inside) // 2
            yield from self._fresh(zip(inside[:step], inside[len(inside) - step :], strict=True))
        else:
            yield from self._fresh(zip(inside, reversed(others), strict=False))

    def _fresh(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return sorted((_pair(*pair) for pair in pairs), key=lambda pair: self._met[pair])[:SAMPLED]


def _is_likely_host(suspect: Suspect) -> bool:
    """A host that is less than likely has one or two slow pairs, which are to be measured again first."""
    return suspect.kind != "link" and suspect.confidence >= 0.5


def _wavering(isolation: Localization, readings: Sequence[BandwidthReading]) -> frozenset[tuple[int, int]]:
    """Pairs that were slow when they met and well, both ways, when they met again: no link is like that, but one of the
    hosts may be slow at times, and meeting others tells which."""
    limit = SLOW * isolation.typical
    worst: dict[tuple[tuple[int, int], int], float] = {}
    for one in readings:
        key = (_pair(one.source, one.target), one.round)
        worst[key] = min(one.value, worst.get(key, one.value))
    slow = {pair for (pair, _), value in worst.items() if value < limit}
    return frozenset(pair for (pair, _), value in worst.items() if value >= limit and pair in slow)


def _slow_pairs(isolation: Localization, readings: Sequence[BandwidthReading]) -> list[tuple[int, int]]:
    """Those of which a direction was slow, in more than half of the rounds that it was measured in; first those that
    are slow both ways, which is seldom chance."""
    limit = SLOW * isolation.typical
    ways: dict[tuple[int, int], list[float]] = {}
    for one in readings:
        ways.setdefault((one.source, one.target), []).append(one.value)
    values = {way: median_high(own) for way, own in ways.items()}
    slow = {_pair(*way) for way, value in values.items() if value < limit}
    return sorted(slow, key=lambda pair: (max(values.get(pair, 0.0), values.get(pair[::-1], 0.0)), pair))


def _pair(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first < second else (second, first)

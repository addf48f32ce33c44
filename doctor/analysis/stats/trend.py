"""Whether a series keeps rising, and when it reaches a limit.

The Theil-Sen slope, the median of the slopes between all pairs of points, is robust against a few outliers; its
interval follows from the order of these slopes alone (P. K. Sen, Journal of the American Statistical Association 63,
1968). The memory of a process does not vary around a line, though: it warms up, jumps, and falls when a cache is
emptied. :func:`steady_rise` does not count these as growth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, sqrt
from statistics import mean, median, stdev
from typing import NamedTuple

import msgspec

Point = tuple[float, float]

DEVIATIONS = 1.96
"""Standard deviations to either side that an interval of a slope spans: 95 %."""

MOST = 60
"""Maximum number of points, evenly chosen from more: 60 points have 1,770 pairs."""

LEAST = 6
"""Minimum number of points: an interval from fewer contains nearly any slope."""


class TrendLine(msgspec.Struct, frozen=True):
    """A line through the point ``x``, ``y``; ``low`` and ``high`` are the ends of the slope's interval.

    ``spread``: the median distance of the points from it."""

    slope: float
    low: float
    high: float
    x: float
    y: float
    spread: float

    def at(self, x: float) -> float:
        """The height of the line at ``x``."""
        return self.y + self.slope * (x - self.x)


class LevelChange(msgspec.Struct, frozen=True):
    """A change of level at ``x`` between two medians; ``spread``: the mean distance of the points from these."""

    x: float
    before: float
    after: float
    spread: float


class LimitForecast(NamedTuple):
    """How far a limit is, by the slope and by the ends of its interval."""

    expected: float
    soonest: float
    latest: float


def theil_sen(points: Iterable[Point]) -> TrendLine | None:
    """The Theil-Sen line through ``points``; ``None`` for fewer than three different x. Quadratic in :data:`MOST`."""
    chosen = thinned(sorted(points))
    if len({x for x, _ in chosen}) < 3:
        return None
    slopes = sorted(
        (after[1] - before[1]) / (after[0] - before[0])
        for position, before in enumerate(chosen)
        for after in chosen[position + 1 :]
        if after[0] > before[0]
    )
    half = DEVIATIONS * sqrt(_variance([y for _, y in chosen]))
    first = max(0, int((len(slopes) - half) / 2) - 1)
    last = min(len(slopes) - 1, ceil((len(slopes) + half) / 2))
    slope, x = median(slopes), median(x for x, _ in chosen)
    y = median(y - slope * (own - x) for own, y in chosen)
    spread = median(abs(own_y - y - slope * (own_x - x)) for own_x, own_y in chosen)
    return TrendLine(slope, slopes[first], slopes[last], x, y, spread)


def _variance(values: Sequence[float]) -> float:
    """The variance of Kendall's statistic under independence, corrected for ties (Sen, eq. 2.6)."""
    count = len(values)
    ties = (tied * (tied - 1) * (2 * tied + 5) for tied in Counter(values).values() if tied > 1)
    return max(0.0, (count * (count - 1) * (2 * count + 5) - sum(ties)) / 18)


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most ``most`` of ``points``, evenly chosen, including the last one."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(number * step)] for number in range(most)]


def change_of_level(points: Iterable[Point]) -> LevelChange | None:
    """The change of level that explains ``points`` best; ``None`` for fewer than four."""
    chosen = thinned(sorted(points))
    if len(chosen) < 4:
        return None
    values = [y for _, y in chosen]
    changes = (_change(chosen, values, position) for position in range(2, len(chosen) - 1))
    return min(changes, key=lambda change: change.spread)


def _change(points: Sequence[Point], values: Sequence[float], position: int) -> LevelChange:
    before, after = median(values[:position]), median(values[position:])
    apart = [abs(value - (before if number < position else after)) for number, value in enumerate(values)]
    return LevelChange(points[position][0], before, after, sum(apart) / len(apart))


def steady_rise(points: Iterable[Point], *, warm_up: float = 0.25, fading: float = 0.7) -> TrendLine | None:
    """The line of a series that rises and keeps rising, else ``None``.

    The first ``warm_up`` of the points are left out. The rest has to rise significantly (the whole interval of its
    slope is above 0), like a line rather than like one step, without a fall of half of the rise (a cache that is
    emptied now and then), and in its later half at ``fading`` of the earlier half's pace or more (the pace of a
    logarithm halves). Deviations of a process last, because what it keeps of each step adds up; Sen's interval assumes
    that they do not, so it is widened to that of a random walk with this drift."""
    rest = thinned(_warm(sorted(points), warm_up))
    line = theil_sen(rest) if len(rest) >= LEAST else None
    if line is None or line.low <= 0:
        return None
    risen = line.slope * (rest[-1][0] - rest[0][0])
    if _deepest_fall([y for _, y in rest]) > risen / 2 or _is_step(rest, line) or _is_fading(rest, fading):
        return None
    low, high = _drift(rest)
    return msgspec.structs.replace(line, low=min(line.low, max(low, line.low / 2)), high=max(line.high, high))


def _drift(points: Sequence[Point]) -> tuple[float, float]:
    """The interval of the slope if each step adds to the one before."""
    steps = ((before, after) for before, after in pairwise(points) if after[0] > before[0])
    slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in steps]
    half = DEVIATIONS * stdev(slopes) / sqrt(len(slopes))
    return mean(slopes) - half, mean(slopes) + half


def _is_fading(points: Sequence[Point], fading: float) -> bool:
    middle = len(points) // 2
    earlier, later = theil_sen(points[:middle]), theil_sen(points[middle:])
    return earlier is None or later is None or later.slope <= 0 or later.slope < fading * earlier.slope


def can_tell(points: Sequence[Point], *, warm_up: float = 0.25) -> bool:
    """Whether there are as many points as :func:`steady_rise` needs."""
    return len(_warm(points, warm_up)) >= LEAST


def _warm(points: Sequence[Point], warm_up: float) -> Sequence[Point]:
    return points[int(len(points) * warm_up) :]


def _deepest_fall(values: Iterable[float]) -> float:
    top, deepest = float("-inf"), 0.0
    for value in values:
        top = max(top, value)
        deepest = max(deepest, top - value)
    return deepest


def _is_step(points: Sequence[Point], line: TrendLine) -> bool:
    """Whether one change of level explains the points nearly as well as the line."""
    change = change_of_level(points)
    apart = [abs(y - line.at(x)) for x, y in points]
    return change is not None and sum(apart) / len(apart) > change.spread / 2


def reach(room: float, line: TrendLine) -> LimitForecast | None:
    """How far ``line`` has to go on to rise by ``room``; ``None`` without a significant rise."""
    if line.low <= 0 or line.slope <= 0:
        return None
    room = max(0.0, room)
    return LimitForecast(room / line.slope, room / line.high, room / line.low)

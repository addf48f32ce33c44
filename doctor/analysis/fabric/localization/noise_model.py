"""Readings as logarithms of shares of the usual value, and how they scatter where nothing is slow."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from doctor.analysis.fabric.localization.suspects import BandwidthReading
from doctor.analysis.fabric.slow_paths import MAD_TO_SIGMA

SLOWEST = math.log(0.01)
"""What is slower than a hundredth of the usual, or did not arrive at all, counts as this: how slow tells no more."""

WIDTH = 6.0
"""Readings that follow no rule lie anywhere in this range of logarithms (a factor of 400)."""

NARROWEST, WIDEST = 0.01, 0.5
"""Bounds of the standard deviation: equal readings prove no perfect instrument, and beyond 50 % nothing is told."""

OF_ONE_HOST = 0.6
"""Of all readings that follow no rule; by chance a host has a hand in a quarter of eight hosts' ones, and in half of
four hosts'."""

FEWEST_WILD, MOST_WILD = 0.02, 0.15
"""Bounds of the share of pairs, and of single readings, that follow no rule: something else was busy for a moment."""


class PairCell(NamedTuple):
    """One pair in one round: logarithms of what went from ``first`` to ``second`` and back, ``None`` if unmeasured."""

    first: int
    second: int
    round: int
    ahead: float | None
    back: float | None


class NoiseModel:
    """The density of a cell whose parts are known, heavy-tailed.

    Log-normal with standard deviation ``sigma``; but a share ``wild`` of single readings lies anywhere, and in as many
    cells something else was busy for a moment, which slowed both directions by one unknown factor.
    """

    def __init__(self, sigma: float, wild: float = FEWEST_WILD) -> None:
        self.sigma = min(max(sigma, NARROWEST), WIDEST)
        self.wild = wild
        self._scale = -0.5 / (self.sigma * self.sigma)
        self._peak = (1 - wild) / (self.sigma * math.sqrt(2 * math.pi))
        self._floor = wild / WIDTH
        self._moment = wild / (2 * math.sqrt(math.pi) * self.sigma) / WIDTH

    def log_density(self, ahead: float | None, back: float | None) -> float:
        """Of both differences between measured and expected logarithms in a cell."""
        if ahead is None or back is None:
            value = back if ahead is None else ahead
            assert value is not None
            return math.log(self._peak * math.exp(self._scale * value * value) + 2 * self._floor)
        both = self._peak * math.exp(self._scale * ahead * ahead) + self._floor
        both *= self._peak * math.exp(self._scale * back * back) + self._floor
        apart = ahead - back
        return math.log((1 - self.wild) * both + self._moment * math.exp(self._scale * apart * apart / 2))


def usual_level(cells: Sequence[PairCell], near: float) -> float:
    """The logarithm around which the better readings gather; ``near`` is a difference that does not matter.

    A pair is as slow as its slowest part, so that with half of the hosts slow only a quarter of the pairs is usual:
    the search starts among the best and climbs to the nearest gathering (mean shift, Fukunaga and Hostetler 1975,
    with the median in place of the mean).
    """
    values = sorted(value for cell in cells for value in (cell.ahead, cell.back) if value is not None)
    reach = max(near, 2.5 * pair_spread(cells))
    level = values[int(0.85 * (len(values) - 1))]
    for _ in range(30):
        window = values[bisect_left(values, level - reach) : bisect_right(values, level + reach)]
        previous, level = level, window[len(window) // 2]
        if level == previous:
            break
    return level


def pair_spread(cells: Iterable[PairCell]) -> float:
    """The standard deviation by the two directions of a pair, which most faults slow alike; 0 where there are none."""
    apart = [abs(cell.ahead - cell.back) for cell in cells if cell.ahead is not None and cell.back is not None]
    return MAD_TO_SIGMA * median(apart) / math.sqrt(2) if apart else 0.0


def upper_spread(cells: Iterable[PairCell], level: float) -> float:
    """The standard deviation by the readings better than ``level``: slow parts make none of them."""
    above = [
        value - level for cell in cells for value in (cell.ahead, cell.back) if value is not None and value > level
    ]
    return MAD_TO_SIGMA * median(above) if above else 0.0


def cells_of(readings: Sequence[BandwidthReading], typical: float = 1.0) -> list[PairCell]:
    """Readings by pair and round, against ``typical``."""
    found: dict[tuple[int, int, int, int], list[float | None]] = {}
    for one in readings:
        back = one.source > one.target
        first, second = (one.target, one.source) if back else (one.source, one.target)
        again = 0
        while (both := found.setdefault((first, second, one.round, again), [None, None]))[back] is not None:
            again += 1
        both[back] = math.log(one.value / typical) if one.value > 0 else -math.inf
    return [PairCell(first, second, turn, *both) for (first, second, turn, _), both in found.items()]


def shifted(cells: Iterable[PairCell], level: float) -> list[PairCell]:
    """The same cells against another usual value, none slower than :data:`SLOWEST`."""

    def against(value: float | None) -> float | None:
        return None if value is None else max(value - level, SLOWEST)

    return [cell._replace(ahead=against(cell.ahead), back=against(cell.back)) for cell in cells]


def refined(residuals: Sequence[PairCell], least_spread: float = 0.0) -> tuple[float, NoiseModel]:
    """How far the usual value is off, and the noise, by what is left of the readings after all blame."""
    values = [value for cell in residuals for value in (cell.ahead, cell.back) if value is not None]
    if not values:
        return 0.0, NoiseModel(WIDEST)
    middle = median(values)
    sigma = max(
        MAD_TO_SIGMA * median(abs(value - middle) for value in values), pair_spread(residuals), least_spread, NARROWEST
    )
    wild = _wild_share(residuals, middle, 4 * sigma)
    return middle, NoiseModel(sigma, min(max(wild, FEWEST_WILD), MOST_WILD))


def _wild_share(cells: Sequence[PairCell], middle: float, far: float) -> float:
    """Of readings that are ``far`` from the middle. Where nearly all of them are one host's, of the readings of the
    others: what gathers at one host follows a rule, which is not found yet."""
    wild = [sum(value is not None and abs(value - middle) > far for value in (cell.ahead, cell.back)) for cell in cells]
    at_host: Counter[int] = Counter()
    for cell, count in zip(cells, wild, strict=True):
        at_host.update({cell.first: count, cell.second: count})
    worst = max(at_host, key=lambda host: at_host[host])
    left_out = worst if at_host[worst] >= OF_ONE_HOST * sum(wild) else None
    others = [
        (count, (cell.ahead is not None) + (cell.back is not None))
        for cell, count in zip(cells, wild, strict=True)
        if left_out not in (cell.first, cell.second)
    ]
    readings = sum(count for _, count in others)
    return sum(count for count, _ in others) / readings if readings else 0.0

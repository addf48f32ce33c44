"""Readings as log shares of the usual value, and their noise."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from doctor.analysis.fabric.localization.suspects import BandwidthReading
from doctor.analysis.stats.outliers import MAD_TO_SIGMA

SLOWEST = math.log(0.01)
"""Smaller shares count as a hundredth, and so does a transfer that did not arrive."""

WIDTH = 6.0
"""The range of logarithms of outliers, uniformly distributed (a factor of 400)."""

NARROWEST, WIDEST = 0.01, 0.5
"""Bounds of the standard deviation: equal readings do not prove a noiseless measurement, and beyond 50 % nothing can be
inferred."""

OF_ONE_HOST = 0.6
"""The share of all outliers from which they belong to one host. By chance a host is in a quarter of those of eight
hosts, and in half of those of four."""

FEWEST_OUTLIERS, MOST_OUTLIERS = 0.02, 0.15
"""Bounds of the fraction of outliers among pairs and among single readings."""


class PairCell(NamedTuple):
    """One pair in one round: log shares from ``first`` to ``second`` and back, ``None`` if unmeasured."""

    first: int
    second: int
    round: int
    ahead: float | None
    back: float | None


class NoiseModel:
    """The heavy-tailed density of a cell whose components are known.

    Log-normal with standard deviation ``sigma``; a fraction ``outliers`` of single readings has an arbitrary value. In
    the same fraction of cells other load slowed both directions by one unknown factor."""

    def __init__(self, sigma: float, outliers: float = FEWEST_OUTLIERS) -> None:
        self.sigma = min(max(sigma, NARROWEST), WIDEST)
        self.outliers = outliers
        self._scale = -0.5 / (self.sigma * self.sigma)
        self._peak = (1 - outliers) / (self.sigma * math.sqrt(2 * math.pi))
        self._floor = outliers / WIDTH
        self._moment = outliers / (2 * math.sqrt(math.pi) * self.sigma) / WIDTH

    def log_density(self, ahead: float | None, back: float | None) -> float:
        """The log density of both differences between measured and expected logarithms in a cell."""
        if ahead is None or back is None:
            value = back if ahead is None else ahead
            assert value is not None
            return math.log(self._peak * math.exp(self._scale * value * value) + 2 * self._floor)
        both = self._peak * math.exp(self._scale * ahead * ahead) + self._floor
        both *= self._peak * math.exp(self._scale * back * back) + self._floor
        apart = ahead - back
        return math.log((1 - self.outliers) * both + self._moment * math.exp(self._scale * apart * apart / 2))


def usual_level(cells: Sequence[PairCell], near: float) -> float:
    """The mode of the better readings (a logarithm); ``near`` is a difference that does not matter.

    A pair is as slow as its slowest component, so that with half of the hosts slow only a quarter of the pairs is
    usual. The search starts among the best readings and climbs to the nearest mode (mean shift, Fukunaga and Hostetler
    1975, with the median instead of the mean)."""
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
    """The standard deviation from the two directions of pairs, which most faults slow equally; 0 without any."""
    apart = [abs(cell.ahead - cell.back) for cell in cells if cell.ahead is not None and cell.back is not None]
    return MAD_TO_SIGMA * median(apart) / math.sqrt(2) if apart else 0.0


def upper_spread(cells: Iterable[PairCell], level: float) -> float:
    """The standard deviation from the readings above ``level``, which slow components do not affect."""
    above = [
        value - level for cell in cells for value in (cell.ahead, cell.back) if value is not None and value > level
    ]
    return MAD_TO_SIGMA * median(above) if above else 0.0


def cells_of(readings: Sequence[BandwidthReading], typical: float = 1.0) -> list[PairCell]:
    """Readings by pair and round, relative to ``typical``."""
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
    """The cells relative to another usual value, none below :data:`SLOWEST`."""

    def against(value: float | None) -> float | None:
        return None if value is None else max(value - level, SLOWEST)

    return [cell._replace(ahead=against(cell.ahead), back=against(cell.back)) for cell in cells]


def refined(residuals: Sequence[PairCell], least_spread: float = 0.0) -> tuple[float, NoiseModel]:
    """The error of the usual value, and the noise, from the residuals."""
    values = [value for cell in residuals for value in (cell.ahead, cell.back) if value is not None]
    if not values:
        return 0.0, NoiseModel(WIDEST)
    middle = median(values)
    sigma = max(
        MAD_TO_SIGMA * median(abs(value - middle) for value in values), pair_spread(residuals), least_spread, NARROWEST
    )
    outliers = _outlier_share(residuals, middle, 4 * sigma)
    return middle, NoiseModel(sigma, min(max(outliers, FEWEST_OUTLIERS), MOST_OUTLIERS))


def _outlier_share(cells: Sequence[PairCell], middle: float, far: float) -> float:
    """The fraction of readings that are ``far`` from the middle.

    If nearly all of them belong to one host, the fraction among the other readings: that host is not explained yet."""
    outliers = [
        sum(value is not None and abs(value - middle) > far for value in (cell.ahead, cell.back)) for cell in cells
    ]
    at_host: Counter[int] = Counter()
    for cell, count in zip(cells, outliers, strict=True):
        at_host.update({cell.first: count, cell.second: count})
    worst = max(at_host, key=lambda host: at_host[host])
    left_out = worst if at_host[worst] >= OF_ONE_HOST * sum(outliers) else None
    others = [
        (count, (cell.ahead is not None) + (cell.back is not None))
        for cell, count in zip(cells, outliers, strict=True)
        if left_out not in (cell.first, cell.second)
    ]
    readings = sum(count for _, count in others)
    return sum(count for count, _ in others) / readings if readings else 0.0

"""Which of several peers stand out in a number, by the median of the others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property
from statistics import median

import msgspec

MAD_TO_SIGMA = 1.4826
"""Factor from the median absolute deviation of normally distributed values to their standard deviation."""

MANY = 16
"""Number of peers from which on a single value does not change the median of the deviations."""


class Outlier(msgspec.Struct, frozen=True):
    """A rank whose ``value`` is far from ``typical``, the median of its peers."""

    rank: int
    value: float
    typical: float

    @property
    def excess(self) -> float:
        """How much more the rank has than its peers; negative for less."""
        return self.value - self.typical


class PeerValues:
    """Values of peers, each to be compared with those of all others."""

    def __init__(self, values: Iterable[float]) -> None:
        self._sorted = sorted(values)

    def median(self, value: float) -> float:
        """The median of all values except one ``value``; the value itself without peers."""
        count = len(self._sorted) - 1
        if count < 1:
            return value
        place = bisect_left(self._sorted, value)
        low, high = ((count - 1) // 2, count // 2)
        return (self._sorted[low + (low >= place)] + self._sorted[high + (high >= place)]) / 2

    def spread(self, value: float) -> float:
        """The median absolute deviation of all values except one ``value``; 0 without peers."""
        if len(self._sorted) > MANY:
            return self._spread_of_all
        place = bisect_left(self._sorted, value)
        rest = self._sorted[:place] + self._sorted[place + 1 :]
        typical = self.median(value)
        return median(abs(other - typical) for other in rest) if rest else 0.0

    @cached_property
    def _spread_of_all(self) -> float:
        typical = median(self._sorted)
        return median(abs(value - typical) for value in self._sorted)


def outliers(
    values: Mapping[int, float], *, share: float, least: float = 0.0, deviations: float = 4.0
) -> tuple[Outlier, ...]:
    """The ranks whose value differs from the median of the others, the farthest first.

    It has to differ by more than ``share`` of the median, by more than ``least``, and by more than ``deviations``
    robust standard deviations of the others. Of two ranks only the larger one is returned, which reaches a limit
    first."""
    peers = PeerValues(values.values())
    found = []
    for rank, value in values.items():
        typical = peers.median(value)
        apart = abs(value - typical)
        if apart > max(least, share * abs(typical)) and (len(values) > 2 or value > typical):
            if apart > deviations * MAD_TO_SIGMA * peers.spread(value):
                found.append(Outlier(rank, value, typical))
    return tuple(sorted(found, key=lambda outlier: -abs(outlier.excess)))

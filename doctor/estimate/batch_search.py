"""Searches for the largest batch that fits, with few traces.

The peak as a function of the batch is the maximum of a few straight lines (one per phase of the step), so two batches
give a good guess; the guess is traced, and the next batch, too. The result has always been traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from doctor.estimate.data_model import MOST_SAMPLES

FARTHEST = 64
"""Limit of a guess, as a multiple of the largest traced batch: a line through two small batches says little of far
larger ones."""

STUBBORN = 3
"""Guesses along the line from the same side, after which the midpoint is tried."""

Peak = Callable[[int], "int | None"]
"""Returns the peak in bytes with a batch of that many samples; ``None`` if it is unknown, or the time is up."""


class BatchSearchResult(NamedTuple):
    """``batch``: the largest that was traced and fits, or 0. ``exact``: the next one was traced, too, and does not fit.
    ``settled``: exact, or within the slack. ``points``: all traces, batch -> bytes."""

    batch: int
    exact: bool
    points: Mapping[int, int]
    settled: bool = False


def largest_batch(
    peak: Peak, limit: int, known: Mapping[int, int], *, traces: int, slack: float = 0.0, sample: int = 0
) -> BatchSearchResult:
    """Search for the largest batch whose peak is at most ``limit`` bytes, from one or more ``known`` ones.

    ``traces``: how many more are allowed. ``slack``: the relative accuracy at which the search ends. ``sample``:
    expected bytes per sample, for the first guess."""
    search = _Search(dict(known), limit, slack, sample)
    for _ in range(traces):
        if search.is_done:
            break
        guess = search.guess()
        value = peak(guess)
        if value is None:
            break
        search.learn(guess, value)
    return BatchSearchResult(search.fits or 0, search.is_exact, search.points, search.is_done)


class _Search:
    """The traces so far: ``fits`` is the largest batch that fits, ``exceeds`` the smallest that does not."""

    def __init__(self, points: dict[int, int], limit: int, slack: float, sample: int) -> None:
        self.points, self._limit, self._slack, self._sample = points, limit, slack, sample
        self._same_side = 0
        self._last_fitted: bool | None = None

    @property
    def fits(self) -> int | None:
        return max((batch for batch, value in self.points.items() if value <= self._limit), default=None)

    @property
    def exceeds(self) -> int | None:
        return min((batch for batch, value in self.points.items() if value > self._limit), default=None)

    @property
    def is_exact(self) -> bool:
        return self.exceeds == (self.fits or 0) + 1 or self.fits == MOST_SAMPLES

    @property
    def is_done(self) -> bool:
        if self.is_exact:
            return True
        fits, exceeds = self.fits, self.exceeds
        if not fits or not self._slack or len(self.points) < 2:
            return False
        return (exceeds or self._upwards(fits)) - fits <= self._slack * fits

    def learn(self, batch: int, value: int) -> None:
        fitted = value <= self._limit
        self._same_side = self._same_side + 1 if fitted is self._last_fitted else 0
        self._last_fitted = fitted
        self.points[batch] = value

    def guess(self) -> int:
        fits, exceeds = self.fits, self.exceeds
        if exceeds is None:
            return min(self._upwards(fits or 1), MOST_SAMPLES)
        if fits is None:
            slope = self._slope(sorted(self.points)[:2])
            if not slope:
                return max(1, exceeds // 2)
            aim = exceeds - 1 - int((self.points[exceeds] - self._limit) / slope)
            return max(1, min(aim, exceeds - 1))
        if self._same_side >= STUBBORN:
            return (fits + exceeds) // 2
        low, high = self.points[fits], self.points[exceeds]
        aim = fits + int((self._limit - low) * (exceeds - fits) / (high - low))
        if self._last_fitted is False:  # peaks rise in steps, and guesses from above converge slowly
            aim -= int(aim * self._slack / 2)
        return max(fits + 1, min(aim, exceeds - 1))

    def _upwards(self, fits: int) -> int:
        slope = self._slope(sorted(self.points)[-2:])
        if not slope:
            return fits * 2 if len(self.points) == 1 else fits * 4
        aim = fits + int((self._limit - self.points[fits]) / slope)
        return max(fits + 1, min(aim, fits * FARTHEST))

    def _slope(self, batches: list[int]) -> float:
        if len(batches) < 2:
            return float(self._sample)
        low, high = batches
        return max(0.0, (self.points[high] - self.points[low]) / (high - low))


def bytes_a_sample(points: Mapping[int, int]) -> int | None:
    """Return the bytes per sample between the two largest batches, or ``None`` if there are fewer."""
    batches = sorted(points)[-2:]
    if len(batches) < 2:
        return None
    low, high = batches
    return max(0, round((points[high] - points[low]) / (high - low)))

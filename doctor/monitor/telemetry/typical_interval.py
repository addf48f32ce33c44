"""How long a point of a run usually takes, by the passes that it has made."""

from __future__ import annotations

FACTOR = 4.0
"""A point may take this many times what it usually takes,"""
SLACK = 1.5
"""and this many times what it took at its longest, be that as rare as it may."""
OUTLIERS = 3
"""Passes that may be far longer than the others and do not count as usual: a kernel that is compiled anew, a file
server that was busy."""
WORTH = 1.0
"""Seconds of a pass below which it is not kept: no limit is as low as :data:`FACTOR` times as much."""


class TypicalInterval:
    """Of one point. The first pass is no measure: kernels are compiled, communicators built, workers started."""

    __slots__ = ("_first", "_longest")

    def __init__(self, first: float) -> None:
        self._first = first
        self._longest: list[float] = []

    def add(self, seconds: float) -> None:
        """A later pass of at least :data:`WORTH`."""
        self._longest = sorted((*self._longest, seconds), reverse=True)[: OUTLIERS + 1]

    def most(self, *, young: bool) -> float:
        """Seconds that a pass may take. ``young``: the run is, and outliers can't be told from what is usual."""
        if not self._longest:
            return FACTOR * self._first if young else 0.0
        usual = self._longest[-1] if len(self._longest) > OUTLIERS else 0.0
        return max(FACTOR * (self._longest[0] if young else usual), SLACK * self._longest[0])

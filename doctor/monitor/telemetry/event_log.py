"""What the training thread tells as it goes: one append a point, read later by who wants to know.

Between two points a step fills the caches, so that every frame and every object that a hook touches costs a multiple of
what it takes in a loop. Counting and timing are therefore left to the reader, who does them for many points at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

KEPT = 512
"""Moments that wait for a reader, who comes twice a second: all of a run of up to 150 steps a second, and of a faster
one as many steps as tell how it goes."""


class StageEntered(NamedTuple):
    """A stage is entered, or gone back to; ``epoch``: where a new one begins."""

    stage: str
    epoch: int | None = None


BatchMark = tuple[int | None, int | None, int]
"""A batch is there: its number, that of its loader, and how many batches of training came before it; -1 in another
stage. A plain tuple, which is made several times as fast as a named one."""
ENDED = True
"""The batch of training is over."""
LoggedEvent = tuple[float, str, BatchMark | StageEntered | bool | None]
"""Seconds of the monotonic clock, the point that was reached then, and what else happened at it."""


class EventLog:
    """The moments of one rank. One thread notes; of others, one at a time reads."""

    def __init__(self, kept: int = KEPT) -> None:
        self._moments: deque[LoggedEvent] = deque(maxlen=kept)
        self.note: Callable[[LoggedEvent], None] = self._moments.append
        """Add a moment. (step path)"""

    def read(self) -> tuple[list[LoggedEvent], bool]:
        """The moments that were not read yet, in order, and whether these are all: the oldest ones are lost where
        nobody read for long."""
        moments = self._moments
        count = len(moments)
        take = moments.popleft
        return [take() for _ in range(count)], count < (moments.maxlen or 0)

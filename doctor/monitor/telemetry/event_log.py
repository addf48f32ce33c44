"""Events of the training thread: one append per event, evaluated later by a reader.

Between two events a step fills the CPU caches, so that every frame and object that a hook touches costs a multiple of
what it takes in a loop. Counting and timing are therefore left to the reader, for many events at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

KEPT = 512
"""Events kept for a reader, which polls twice a second: all of a run of up to 150 steps a second, and a sufficient
sample of a faster one."""


class StageEntered(msgspec.Struct, frozen=True):
    """A stage is entered or resumed; ``epoch``: if a new one begins."""

    stage: str
    epoch: int | None = None


BatchMark = tuple[int | None, int | None, int]
"""The start of a batch: its number, that of its loader, and the number of earlier training batches, -1 in other
stages. A plain tuple, which is created several times as fast as a named one."""
ENDED = True
"""The training batch is done."""
LoggedEvent = tuple[float, str, BatchMark | StageEntered | bool | None]
"""Seconds of the monotonic clock, the point reached, and further details."""


class EventLog:
    """The events of one rank. One thread writes; of the others, one at a time reads."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[LoggedEvent] = deque(maxlen=kept)
        self.note: Callable[[LoggedEvent], None] = self._events.append
        """Append an event. (step path)"""

    def read(self) -> tuple[list[LoggedEvent], bool]:
        """Return the unread events in order, and whether the oldest were not lost meanwhile."""
        events = self._events
        count = len(events)
        take = events.popleft
        return [take() for _ in range(count)], count < (events.maxlen or 0)

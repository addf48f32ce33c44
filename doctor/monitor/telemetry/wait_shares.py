"""The share of the time in which the training thread waits for other ranks, from samples of its stack.

Where ranks wait for one another in the middle of a forward and a backward pass, as sharded parameters are gathered, the
durations of the parts of a step are equal on all ranks, and do not show which of them the others wait for.
"""

from __future__ import annotations

from collections import deque

from doctor.core.clock import monotonic
from doctor.monitor.telemetry.stacks.live_stacks import is_waiting_in_collective

EVERY = 0.1
"""Mean seconds between two samples, each of which takes some 30 µs of the watchdog's thread."""
GOLDEN = 0.6180339887
"""Multiples of it are spread evenly over the remainders of division by 1, in no order that repeats."""
SLOT, KEPT = 5.0, 12
"""Seconds that are counted together, and how many of these are kept."""


class WaitShares:
    """The shares of one rank."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=KEPT)
        self._samples = self._waits = 0
        self._since: float | None = None
        self._turn = 0.0

    def pause(self) -> float:
        """Return the seconds until the next sample: never in step with the training, whose steps may be as long."""
        self._turn = (self._turn + GOLDEN) % 1.0
        return EVERY * (0.5 + self._turn)

    def sample(self, thread: int, *, trains: bool) -> None:
        """Look at the training thread; samples outside of training are left out."""
        if not trains:
            return
        now = monotonic()
        if self._since is None:
            self._since = now
        if now - self._since >= SLOT:
            if self._samples * EVERY >= SLOT / 2:
                self._shares.append(round(self._waits / self._samples, 3))
            self._samples, self._waits, self._since = 0, 0, now
        self._samples += 1
        self._waits += is_waiting_in_collective(thread)

    def facts(self) -> tuple[float, ...]:
        """Return the share of each slot that is over, newest last."""
        return tuple(self._shares)

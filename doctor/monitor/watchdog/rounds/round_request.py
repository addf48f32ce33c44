"""A request of the training thread to the watchdog's thread, with a time limit."""

from __future__ import annotations

import threading

from doctor.core.clock import monotonic
from doctor.monitor.watchdog.decision import Decision, Trigger

RESERVE, SHARE = 5.0, 0.3
"""Seconds, and maximum share of the time limit, that are reserved for the evaluation."""


class RoundRequest:
    """A request for a decision. ``seconds``: how long the caller waits."""

    def __init__(self, trigger: Trigger, seconds: float) -> None:
        self.trigger = trigger
        self.seconds = max(0.0, seconds)
        self.until = monotonic() + self.seconds
        self._decision: Decision | None = None
        self._answered = threading.Event()

    @property
    def collection_time(self) -> float:
        """Seconds that may pass until all ranks have reported."""
        return self.seconds - min(RESERVE, SHARE * self.seconds)

    def collection_time_left(self, now: float) -> float:
        """Return the remaining seconds of :attr:`collection_time`."""
        return max(0.0, self.until - self.seconds + self.collection_time - now)

    def answer(self, decision: Decision | None) -> None:
        """Release the caller. Only the first answer counts."""
        if not self._answered.is_set():
            self._decision = decision
            self._answered.set()

    def wait(self) -> Decision | None:
        """Wait for the decision; ``None`` if there was none in time."""
        self._answered.wait(max(0.0, self.until - monotonic()))
        return self._decision

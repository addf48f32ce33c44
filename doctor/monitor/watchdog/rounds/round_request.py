"""What the training thread asks of the sentinel's, and waits for with a limit."""

from __future__ import annotations

import threading
import time

from doctor.monitor.watchdog.decision import Decision, Trigger

RESERVE, SHARE = 5.0, 0.3
"""Seconds, and the share of the time at most, that are kept for judging."""


class RoundRequest:
    """For a ruling on one occasion. ``seconds``: how long the one who asks waits."""

    def __init__(self, occasion: Trigger, seconds: float) -> None:
        self.occasion = occasion
        self.seconds = max(0.0, seconds)
        self.until = time.monotonic() + self.seconds
        self._ruling: Decision | None = None
        self._answered = threading.Event()

    @property
    def gathering(self) -> float:
        """Seconds that may pass until all ranks are there."""
        return self.seconds - min(RESERVE, SHARE * self.seconds)

    def gathering_left(self, now: float) -> float:
        """How many of these are left."""
        return max(0.0, self.until - self.seconds + self.gathering - now)

    def is_gathered(self, now: float) -> bool:
        """Whether nobody is to be waited for any more."""
        return self.gathering_left(now) == 0.0

    def answer(self, ruling: Decision | None) -> None:
        """Let the one who asks go on. The first answer counts."""
        if not self._answered.is_set():
            self._ruling = ruling
            self._answered.set()

    def wait(self) -> Decision | None:
        """The ruling; ``None`` where there was none in time."""
        self._answered.wait(max(0.0, self.until - time.monotonic()))
        return self._ruling

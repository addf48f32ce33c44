"""How much is said at once: a run in which everything breaks must not flood the log that tells why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from doctor.monitor.sinks.finding_sink import FindingEvent

BURST = 5
"""Findings that are told in full at once."""

ALIKE = 2
"""Findings of one check that go before those of others."""

REGAIN = 60.0
"""Seconds after which one more may be told in full."""


class RateLimit:
    """Lets ``burst`` findings through at once, and one more for every ``regain`` seconds that pass (a token bucket)."""

    def __init__(self, burst: int = BURST, regain: float = REGAIN) -> None:
        self._burst = burst
        self._regain = regain
        self._left = float(burst)
        self._since = time.monotonic()

    def split(self, news: Iterable[FindingEvent]) -> tuple[list[FindingEvent], list[FindingEvent]]:
        """Those to tell and those to keep back: causes go before consequences, the first few of each check before the
        rest of them, errors before warnings. What is not loud is in neither."""
        self._refill()
        ordered = _in_order([one for one in news if one.is_loud])
        count = int(self._left)
        self._left -= min(count, len(ordered))
        return ordered[:count], ordered[count:]

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(float(self._burst), self._left + (now - self._since) / self._regain)
        self._since = now


def _in_order(news: Sequence[FindingEvent]) -> list[FindingEvent]:
    seen: Counter[str] = Counter()
    keys = []
    for one in news:
        seen[one.result.id] += 1
        is_consequence = one.finding.explained_by is not None
        keys.append((is_consequence, seen[one.result.id] > ALIKE, -one.finding.severity.weight))
    return [news[position] for position in sorted(range(len(news)), key=keys.__getitem__)]

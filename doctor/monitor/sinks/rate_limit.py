"""Limits the rate of reports, so that findings do not flood the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from doctor.core.clock import monotonic
from doctor.monitor.sinks.finding_sink import FindingEvent

BURST = 5
"""Findings that are reported in full at once."""

PER_CHECK = 2
"""Findings of one check that take precedence over those of other checks."""

REGAIN = 60.0
"""Seconds after which one more finding may be reported in full."""


class RateLimit:
    """Token bucket: ``burst`` findings at once, and one more every ``regain`` seconds."""

    def __init__(self, burst: int = BURST, regain: float = REGAIN) -> None:
        self._burst = burst
        self._regain = regain
        self._left = float(burst)
        self._since = monotonic()

    def split(self, events: Iterable[FindingEvent]) -> tuple[list[FindingEvent], list[FindingEvent]]:
        """Split findings into those to report and those to hold back; omit those that are not loud.

        Causes precede consequences, the first few findings of each check precede the rest, errors precede warnings.
        """
        now = monotonic()
        self._left = min(float(self._burst), self._left + (now - self._since) / self._regain)
        self._since = now
        ordered = _in_order([one for one in events if one.is_loud])
        count = int(self._left)
        self._left -= min(count, len(ordered))
        return ordered[:count], ordered[count:]


def _in_order(events: Sequence[FindingEvent]) -> list[FindingEvent]:
    seen: Counter[str] = Counter()
    keys = []
    for one in events:
        seen[one.result.id] += 1
        is_consequence = one.finding.explained_by is not None
        keys.append((is_consequence, seen[one.result.id] > PER_CHECK, -one.finding.severity.weight))
    return [events[position] for position in sorted(range(len(events)), key=keys.__getitem__)]

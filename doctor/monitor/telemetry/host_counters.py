"""What happened on a host since a run began: how far the kernel's counters moved."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from doctor.collectors.base import Machine, parse_int, read_text
from doctor.collectors.host.cgroup import read_cgroup
from doctor.collectors.network.routes import read_segments
from doctor.core.facts import HostUseFacts

COLUMNS = (2, 3, 10, 11)
"""Of /proc/net/dev: errors and drops of what was received, errors and drops of what was sent."""


class HostCounters:
    """The counters of this process's control group and network namespace as they were when it was made."""

    def __init__(self, surroundings: Machine | None = None) -> None:
        self._surroundings = surroundings or Machine()
        self._since = time.monotonic()
        self._before = read_counters(self._surroundings)

    def facts(self) -> HostUseFacts:
        """How far they moved since. Reads a handful of files of /proc and /sys, and must stay off the step path."""
        before, now = self._before, read_counters(self._surroundings)
        errors = ((name, _moved(before.errors.get(name, 0), count)) for name, count in now.errors.items())
        return HostUseFacts(
            seconds=round(time.monotonic() - self._since, 3),
            cpu_periods=_moved(before.cpu_periods, now.cpu_periods),
            cpu_throttled_periods=_moved(before.cpu_throttled, now.cpu_throttled),
            segments=_moved(before.segments, now.segments),
            retransmitted=_moved(before.retransmitted, now.retransmitted),
            interface_errors=tuple(sorted((name, count) for name, count in errors if count)),
        )


@dataclass(frozen=True)
class CounterReadings:
    """Readings of one moment; ``None`` for what is not shown here. ``errors``: by interface, drops included."""

    cpu_periods: int | None = None
    cpu_throttled: int | None = None
    segments: int | None = None
    retransmitted: int | None = None
    errors: dict[str, int] = field(default_factory=dict)


def read_counters(surroundings: Machine) -> CounterReadings:
    """All counters now."""
    group = read_cgroup(surroundings)
    segments, again = read_segments(surroundings)
    return CounterReadings(group.cpu_periods, group.cpu_throttled, segments, again, read_interface_errors(surroundings))


def read_interface_errors(surroundings: Machine) -> dict[str, int]:
    """Errors and drops of each interface in /proc/net/dev, both ways; see proc_net(5)."""
    rows = (line.partition(":") for line in (read_text(surroundings.proc / "net" / "dev") or "").splitlines())
    found = {}
    for name, colon, rest in rows:
        columns = rest.split()
        if colon and len(columns) > max(COLUMNS):
            found[name.strip()] = sum(parse_int(columns[column]) or 0 for column in COLUMNS)
    return found


def _moved(before: int | None, now: int | None) -> int | None:
    """``None`` where it is not shown, or began anew (another control group, an interface that was made again)."""
    return now - before if before is not None and now is not None and now >= before else None

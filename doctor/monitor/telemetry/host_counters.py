"""Increase of the kernel's counters on a host since the start of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from doctor.collectors.base import Machine, parse_int, read_text
from doctor.collectors.host.cgroup import read_cgroup
from doctor.collectors.network.routes import read_segments
from doctor.core.facts import HostUseFacts

COLUMNS = (2, 3, 10, 11)
"""Columns of /proc/net/dev: errors and drops of received, errors and drops of transmitted packets."""


class HostCounters:
    """The counters of this process's cgroup and network namespace at creation time."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._since = time.monotonic()
        self._before = read_counters(self._machine)

    def facts(self) -> HostUseFacts:
        """Return the increase since then. Reads some files of /proc and /sys; not for the step path."""
        before, now = self._before, read_counters(self._machine)
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
    """Counters at one moment, or ``None``. ``errors``: by interface, including drops."""

    cpu_periods: int | None = None
    cpu_throttled: int | None = None
    segments: int | None = None
    retransmitted: int | None = None
    errors: dict[str, int] = field(default_factory=dict)


def read_counters(machine: Machine) -> CounterReadings:
    """Read all counters."""
    group = read_cgroup(machine)
    segments, again = read_segments(machine)
    return CounterReadings(group.cpu_periods, group.cpu_throttled, segments, again, read_interface_errors(machine))


def read_interface_errors(machine: Machine) -> dict[str, int]:
    """Return errors and drops of each interface in both directions; see proc_net(5)."""
    rows = (line.partition(":") for line in (read_text(machine.proc / "net" / "dev") or "").splitlines())
    found = {}
    for name, colon, rest in rows:
        columns = rest.split()
        if colon and len(columns) > max(COLUMNS):
            found[name.strip()] = sum(parse_int(columns[column]) or 0 for column in COLUMNS)
    return found


def _moved(before: int | None, now: int | None) -> int | None:
    """Return the increase; ``None`` if unavailable or reset, as by a recreated interface."""
    return now - before if before is not None and now is not None and now >= before else None

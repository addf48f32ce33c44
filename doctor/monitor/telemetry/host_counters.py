"""Increase of the kernel's counters on a host since the start of a run."""

from __future__ import annotations

import time

import msgspec

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
        self._before = _read_counters(self._machine)

    def facts(self) -> HostUseFacts:
        """Return the increase since then. Reads some files of /proc and /sys; not for the step path."""
        before, now = self._before, _read_counters(self._machine)
        errors = ((name, _increase(before.errors.get(name, 0), count)) for name, count in now.errors.items())
        return HostUseFacts(
            seconds=round(time.monotonic() - self._since, 3),
            cpu_periods=_increase(before.cpu_periods, now.cpu_periods),
            cpu_throttled_periods=_increase(before.cpu_throttled, now.cpu_throttled),
            segments=_increase(before.segments, now.segments),
            retransmitted=_increase(before.retransmitted, now.retransmitted),
            interface_errors=tuple(sorted((name, count) for name, count in errors if count)),
        )


class _Readings(msgspec.Struct, frozen=True):
    """Counters at one moment. ``errors``: by interface, including drops; see proc_net(5)."""

    cpu_periods: int | None
    cpu_throttled: int | None
    segments: int | None
    retransmitted: int | None
    errors: dict[str, int]


def _read_counters(machine: Machine) -> _Readings:
    group = read_cgroup(machine, ("cpu",))
    segments, again = read_segments(machine)
    errors = {}
    for line in (read_text(machine.proc / "net" / "dev") or "").splitlines():
        name, colon, rest = line.partition(":")
        columns = rest.split()
        if colon and len(columns) > max(COLUMNS):
            errors[name.strip()] = sum(parse_int(columns[column]) or 0 for column in COLUMNS)
    return _Readings(group.cpu_periods, group.cpu_throttled, segments, again, errors)


def _increase(before: int | None, now: int | None) -> int | None:
    """Return the increase; ``None`` if unavailable or reset, as by a recreated interface."""
    return now - before if before is not None and now is not None and now >= before else None

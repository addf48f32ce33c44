"""Increase of the kernel's counters on a host since the start of a run."""

from __future__ import annotations

import msgspec

from doctor.collectors.base import Machine, parse_int, read_text
from doctor.collectors.host.cgroup import CgroupReader
from doctor.collectors.network.routes import read_segments
from doctor.core.clock import monotonic
from doctor.core.facts import HostUseFacts

_RECEIVE_DROPS = 3
COLUMNS = (2, 3, 10, 11)
"""Columns of /proc/net/dev: errors and drops of received, errors and drops of transmitted packets."""


class HostCounters:
    """The counters of this process's cgroup and network namespace at creation time."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._since = monotonic()
        self._cgroup = CgroupReader(self._machine, ("cpu",))
        self._before = _read_counters(self._machine, self._cgroup)

    def facts(self) -> HostUseFacts:
        """Return the increase since then. Reads some files of /proc and /sys; not for the step path."""
        before, now = self._before, _read_counters(self._machine, self._cgroup)
        return HostUseFacts(
            seconds=round(monotonic() - self._since, 3),
            cpu_periods=_increase(before.cpu_periods, now.cpu_periods),
            cpu_throttled_periods=_increase(before.cpu_throttled, now.cpu_throttled),
            segments=_increase(before.segments, now.segments),
            retransmitted=_increase(before.retransmitted, now.retransmitted),
            interface_errors=_increases(before.errors, now.errors),
            receive_drops=_increases(before.receive_drops, now.receive_drops),
        )


class _Readings(msgspec.Struct, frozen=True):
    """Counters at one moment. ``errors``: by interface, including drops; see proc_net(5). ``receive_drops``:
    of these, the dropped packets that were received."""

    cpu_periods: int | None
    cpu_throttled: int | None
    segments: int | None
    retransmitted: int | None
    errors: dict[str, int]
    receive_drops: dict[str, int]


def _read_counters(machine: Machine, cgroup: CgroupReader) -> _Readings:
    group = cgroup.read()
    segments, again = read_segments(machine)
    errors, drops = {}, {}
    for line in (read_text(machine.proc / "net" / "dev") or "").splitlines():
        name, colon, rest = line.partition(":")
        columns = rest.split()
        if colon and len(columns) > max(COLUMNS):
            errors[name.strip()] = sum(parse_int(columns[column]) or 0 for column in COLUMNS)
            drops[name.strip()] = parse_int(columns[_RECEIVE_DROPS]) or 0
    return _Readings(group.cpu_periods, group.cpu_throttled, segments, again, errors, drops)


def _increases(before: dict[str, int], now: dict[str, int]) -> tuple[tuple[str, int], ...]:
    increases = ((name, _increase(before.get(name, 0), count)) for name, count in now.items())
    return tuple(sorted((name, count) for name, count in increases if count))


def _increase(before: int | None, now: int | None) -> int | None:
    """Return the increase; ``None`` if unavailable or reset, as by a recreated interface."""
    return now - before if before is not None and now is not None and now >= before else None

"""What keeps a whole rank from running: the CPU quota of its control group, and a lock of the interpreter that is held.

Nothing here is on the step path: counters of the kernel are read when facts are, and delays are those of the watchdog's
own waits, which end late if native code or another thread keeps the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable

from doctor.collectors.base import Machine
from doctor.collectors.host.cgroup import CgroupLimits, CgroupReader
from doctor.core.clock import monotonic
from doctor.core.facts import RankPausesFacts

LEAST_DELAY = 0.5
"""Seconds by which a wait must end late to count: threads of a busy host are scheduled late by tenths of that."""
BUSY = 0.8
"""Share of a delay for which the training thread is busy from which it is its own work."""
HINT, HINT_LASTS = 0.1, 60.0
"""Seconds by which a wait must end late to suggest more delays, and seconds for which it does: what begins in the
middle of a wait seems shorter by the rest of that wait, so that waits are then short."""


class RankPauses:
    """The pauses of this rank since creation.

    ``busy``: returns the nanoseconds for which the training thread ran or was ready to run; ``passed``: the points that
    the rank has passed."""

    def __init__(
        self,
        machine: Machine | None = None,
        busy: Callable[[], int | None] = lambda: None,
        passed: Callable[[], int] = lambda: 0,
    ) -> None:
        self._busy, self._passed = busy, passed
        self._computed_at = -1
        self._busy_before: int | None = None
        self._cgroup = CgroupReader(machine or Machine(), ("cpu",))
        self._since = monotonic()
        self._before: CgroupLimits | None = None
        self._delays = 0
        self._delayed = 0.0
        self._likely_until = 0.0

    def open(self) -> None:
        """Read the counters at the start."""
        self._before = self._cgroup.read()

    def note_delay(self, seconds: float) -> None:
        """Record by how many seconds a wait of the watchdog's thread ended late.

        If the training thread itself was busy meanwhile, its own work kept the lock. That counts once at a point of the
        run: again and again, as of the garbage collector in each step, it is a cost; in a piece of work between two
        steps, it is part of that.
        """
        before, now = self._busy_before, self._busy()
        self._busy_before = now
        if seconds >= HINT:
            self._likely_until = monotonic() + HINT_LASTS
        computed = before is not None and now is not None and now - before >= BUSY * seconds * 1e9
        if seconds >= LEAST_DELAY and not (computed and self._is_counted()):
            self._delays += 1
            self._delayed += seconds

    def _is_counted(self) -> bool:
        """Return whether a delay by the rank's own work was counted since it passed its last point."""
        before, self._computed_at = self._computed_at, self._passed()
        return before == self._computed_at

    @property
    def are_likely(self) -> bool:
        """Whether a wait ended late recently, so that the watchdog's thread should wait for short times only."""
        return monotonic() < self._likely_until

    def facts(self) -> RankPausesFacts:
        """Return the pauses until now. Reads some files of /proc and /sys."""
        before, now = self._before or CgroupLimits(), self._cgroup.read()
        return RankPausesFacts(
            seconds=round(monotonic() - self._since, 3),
            cpu_quota=now.cpu_quota,
            periods=_count(_increase(before.cpu_periods, now.cpu_periods)),
            throttled_periods=_count(_increase(before.cpu_throttled, now.cpu_throttled)),
            throttled_seconds=_increase(before.cpu_throttled_seconds, now.cpu_throttled_seconds),
            delays=self._delays,
            delayed_seconds=round(self._delayed, 3),
        )


def _count(number: float | None) -> int | None:
    return None if number is None else int(number)


def _increase(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else max(0.0, round(now - before, 3))

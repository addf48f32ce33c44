"""Time in which a thread was runnable but had no processor: what was slow meanwhile says nothing about the network.

Sources: Documentation/scheduler/sched-stats.rst (the second number of /proc/PID/schedstat: nanoseconds spent waiting on
a run queue) and proc_stat(5) (``steal``: ticks in which the hypervisor ran another guest).
"""

from __future__ import annotations

import os
from pathlib import Path

from doctor.core.clock import perf_counter

OWN = Path("/proc/thread-self/schedstat")
MACHINE = Path("/proc/stat")
STEAL = 8
"""Column of /proc/stat."""


class RunQueueDelay:
    """Measures the calling thread from its creation on."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._queued = _queued()
        self._stolen = _stolen()

    def share(self) -> float:
        """Return the share of the time, 0 to 1, that the thread waited for a processor; 0 if the kernel does not report
        it."""
        seconds = perf_counter() - self._began
        if seconds <= 0:
            return 0.0
        return min(1.0, max(0.0, (_queued() - self._queued + _stolen() - self._stolen) / seconds))


def _queued() -> float:
    """Return the seconds that this thread has waited in a run queue."""
    try:
        return int(OWN.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _stolen() -> float:
    """Return the seconds that the hypervisor has taken from one processor, on average."""
    try:
        with MACHINE.open("rb") as lines:
            ticks = int(lines.readline().split()[STEAL])
    except (OSError, IndexError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)

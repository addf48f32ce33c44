"""How long a thread had something to do and no processor to do it on: what was slow meanwhile tells of no network.

Sources: Documentation/scheduler/sched-stats.rst (the second number of /proc/PID/schedstat: nanoseconds spent waiting on
a run queue) and proc_stat(5) (``steal``: ticks in which the hypervisor ran somebody else).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

OWN = Path("/proc/thread-self/schedstat")
MACHINE = Path("/proc/stat")
STEAL = 8
"""The column of /proc/stat."""


class RunQueueDelay:
    """Starts to count for the thread that makes it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._queued = _queued()
        self._stolen = _stolen()

    def share(self) -> float:
        """Of the time since then in which this thread waited for a processor, or its processors were taken from the
        machine: 0 to 1, and 0 where the kernel does not tell."""
        seconds = time.perf_counter() - self._began
        if seconds <= 0:
            return 0.0
        return min(1.0, max(0.0, (_queued() - self._queued + _stolen() - self._stolen) / seconds))


def _queued() -> float:
    """Seconds that this thread has stood in a run queue."""
    try:
        return int(OWN.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _stolen() -> float:
    """Seconds that the hypervisor has taken from one processor, on average."""
    try:
        with MACHINE.open("rb") as lines:
            ticks = int(lines.readline().split()[STEAL])
    except (OSError, IndexError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)

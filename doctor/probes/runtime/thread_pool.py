"""Run tasks concurrently in a limited number of threads, and return in time even if they block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from doctor.core.background import start_daemon
from doctor.probes.runtime.deadline import ProbeDeadline


def start_side_by_side(
    tasks: Iterable[Callable[[], None]], workers: int, deadline: ProbeDeadline
) -> list[threading.Thread]:
    """Start ``tasks`` in order, ``workers`` at a time; none begins after ``deadline``.

    There are fewer threads if the container allows no more (pids.max, RLIMIT_NPROC).
    """
    waiting = deque(tasks)
    threads: list[threading.Thread] = []
    for _ in range(min(workers, len(waiting))):
        try:
            threads.append(start_daemon("doctor-probe", _work, waiting, deadline))
        except RuntimeError:
            break
    return threads


def wait_for(threads: Iterable[threading.Thread], deadline: ProbeDeadline) -> None:
    """Wait until all threads have ended, or until ``deadline``."""
    for thread in threads:
        thread.join(deadline.left())


def _work(waiting: deque[Callable[[], None]], deadline: ProbeDeadline) -> None:
    while not deadline.is_over:
        try:
            task = waiting.popleft()
        except IndexError:
            return
        task()

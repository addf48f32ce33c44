"""Runs tasks side by side in a limited number of threads, and comes back in time whatever they do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from doctor.probes.runtime.deadline import ProbeDeadline


def start_side_by_side(
    tasks: Iterable[Callable[[], None]], workers: int, deadline: ProbeDeadline
) -> list[threading.Thread]:
    """Start ``tasks`` in their order, ``workers`` at a time; none begins after ``deadline``.

    The threads are fewer where no more can be had: a container may allow few (pids.max, RLIMIT_NPROC).
    """
    waiting = deque(tasks)
    threads: list[threading.Thread] = []
    for _ in range(min(workers, len(waiting))):
        thread = threading.Thread(target=_work, args=(waiting, deadline), name="doctor-probe", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
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

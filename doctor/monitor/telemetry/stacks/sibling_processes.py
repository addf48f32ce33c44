"""Whether processes work from which a rank of Ray may get the result that it waits for.

Ray runs tasks and actors in processes beside that of the rank, which the same process (the raylet) has started, and
names them by class and function (``ray::Scorer.score``). One that computes is running, or ready to run, at each look;
one that waits for a task or a timer is not. Processes of the rank's own class are its peers, whose waits in a
collective may poll.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from doctor.collectors.base import listed, read_text
from doctor.core.clock import sleep
from doctor.core.facts.telemetry import AT_WORK
from doctor.monitor.telemetry.child_processes import MOST, PROC, children_of

_RESULT = "a result of another process ("
_LOOKS, _PAUSE = 4, 0.1
"""Looks in each of which a thread has to be running, and seconds between them: longer than what timers do at a time."""
_MOST_THREADS = 128


def work_in_siblings(blocked: str, parent: int | None = None, proc: Path = PROC) -> str:
    """Return :data:`AT_WORK` if a rank waits for a result of Ray and another process of its node computes; else empty.

    ``parent``: of this process by default.
    """
    if _RESULT not in blocked:
        return ""
    own = _class_of(proc / str(os.getpid()))
    siblings = (proc / str(pid) for pid in children_of(os.getppid() if parent is None else parent, proc)[:MOST])
    running = {thread for one in siblings if _class_of(one) != own for thread in _threads(one)}
    for number in range(_LOOKS):
        sleep(_PAUSE if number else 0.0)
        running = {thread for thread in running if _is_running(thread)}
        if not running:
            return ""
    return AT_WORK


def _class_of(process: Path) -> str:
    """The name of a process up to that of its function."""
    return (read_text(process / "cmdline", limit=256) or "").partition("\0")[0].partition(".")[0].strip()


def _threads(process: Path) -> Iterator[Path]:
    for thread in listed(process / "task")[:_MOST_THREADS]:
        yield process / "task" / thread


def _is_running(thread: Path) -> bool:
    """Whether a thread runs or is ready to, see proc(5)."""
    return (read_text(thread / "stat") or "").rpartition(")")[2].strip().startswith("R")

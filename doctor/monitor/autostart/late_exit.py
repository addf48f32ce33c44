"""A process that does not end although its training has ended: what it does at the interpreter's exit.

The run of a rank ends when the default process group is destroyed, and its report is final. A function registered with
:mod:`atexit` may wait without a limit after that, and so does the interpreter for threads that are not daemons. The
launcher waits for the process, and ``doctor run`` has been replaced by the launcher, so nothing else shows why the job
does not end. What such a function waits for is not judged: an upload may take long. One line shows where the process
is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from doctor.core.background import start_daemon
from doctor.core.clock import monotonic, sleep
from doctor.monitor.telemetry.stacks.live_stacks import thread_stack

AFTER = 60.0
"""Seconds in the interpreter's exit from which it is reported."""
POLL = 10.0
"""Seconds between two looks whether the exit has begun."""
MOST_THREADS = 4
_watching: list[int] = []
"""The process that is watched, which is another one after a fork."""


def watch_late_exit(rank: int, tell: Callable[[str], None]) -> None:
    """Have ``tell`` called with where this process is if it stays long in the interpreter's exit. Only once."""
    if os.getpid() not in _watching:
        _watching[:] = [os.getpid()]
        with contextlib.suppress(RuntimeError):  # no memory for a thread
            start_daemon("doctor-exit", _watch, rank, tell)


def _watch(rank: int, tell: Callable[[str], None]) -> None:
    ended, main = monotonic(), threading.main_thread()
    while main.is_alive():
        sleep(POLL)
    sleep(AFTER)
    tell(describe(rank, monotonic() - ended))


def describe(rank: int, seconds: float) -> str:
    """Return where the main thread is, and which other threads the interpreter waits for."""
    stack = thread_stack(threading.main_thread().ident or 0)
    own = next((frame for frame in stack if frame.user), None)
    threads = [one.name for one in threading.enumerate() if one.is_alive() and not one.daemon]
    where = f"in {own.function}() at {own.file}:{own.line}" if own is not None else "in the interpreter's exit"
    if own is None and threads:
        where = f"waiting for threads that are not daemons: {', '.join(threads[:MOST_THREADS])}"
    return (
        f"rank {rank} ended its training {seconds:.0f} s ago, and its process is still {where}; if it does not end, "
        f"see py-spy dump --pid {os.getpid()}"
    )

"""Ensures that a process that was read is not left stopped.

py-spy stops its target by ptrace(2) while it reads. If py-spy is killed, the kernel detaches it and lets the target
run: at once after PTRACE_SEIZE (py-spy 0.4). After PTRACE_ATTACH (older releases) the target may receive the SIGSTOP
that attaching sends, and then stays stopped until somebody continues it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from doctor.collectors.base import listed, parse_int, read_pairs
from doctor.collectors.host.local_processes import GONE, process_state

SETTLE = 0.5
"""Seconds after the end of a reader within which a target may still stop."""
_TICK = 0.01
_MOST_THREADS = 4096
_SIGSTOP_BIT = 1 << (signal.SIGSTOP - 1)
_PROC = Path("/proc")


class StopState(NamedTuple):
    """Whether a process is stopped, and the tracer's PID (0: it is not traced)."""

    letter: str
    tracer: int

    @property
    def runs_freely(self) -> bool:
        """Whether it is neither stopped nor traced."""
        return self.letter not in ("T", "t") and not self.tracer


def stop_state(pid: int) -> StopState | None:
    """Return the state of the main thread of a process; ``None`` if the process is gone."""
    rows = read_pairs(_PROC / str(pid) / "status", ":", limit=1 << 16)
    return StopState(rows["State"][:1], parse_int(rows.get("TracerPid")) or 0) if rows.get("State") else None


def continue_if_left_stopped(pid: int, started: float | None, before: StopState | None) -> bool:
    """Continue a process that a reader of ours left stopped; return whether that was necessary.

    To be called after a reader that ended abnormally has been reaped. A process that was stopped or traced ``before``
    stays as it is, and so does one that another debugger traces by now.
    """
    if before is None or not before.runs_freely:
        return False
    until = time.monotonic() + SETTLE
    while (now := stop_state(pid)) is not None:
        if not now.tracer and now.letter == "T":
            return _send_continue(pid, started)
        if (not now.tracer and not _is_about_to_stop(pid)) or time.monotonic() > until:
            return False
        time.sleep(_TICK)
    return False


def _is_about_to_stop(pid: int) -> bool:
    """Return whether a SIGSTOP is pending for a thread."""
    tasks = _PROC / str(pid) / "task"
    for thread in islice(listed(tasks), _MOST_THREADS):
        rows = read_pairs(tasks / thread / "status", ":", limit=1 << 16)
        for name in ("SigPnd", "ShdPnd"):
            with contextlib.suppress(ValueError):
                if int(rows.get(name, "0"), 16) & _SIGSTOP_BIT:
                    return True
    return False


def _send_continue(pid: int, started: float | None) -> bool:
    """Send SIGCONT to the process that started at ``started``, not to one that reused its PID."""
    handle = None
    with contextlib.suppress(AttributeError, OSError):  # a kernel before 5.3
        handle = os.pidfd_open(pid)
    try:
        if process_state(pid, started)[0] == GONE:
            return False
        if handle is None:
            os.kill(pid, signal.SIGCONT)
        else:
            signal.pidfd_send_signal(handle, signal.SIGCONT)
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True

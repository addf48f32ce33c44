"""What the kernel says of another process of this host that does not answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

State = Literal["gone", "stopped", "silent"]
GONE: Final = "gone"
STOPPED: Final = "stopped"
SILENT: Final = "silent"
_START_TIME = 19
"""Of the fields after a process's name in /proc/PID/stat (proc(5): field 22, in clock ticks since the boot)."""
_TICKS = os.sysconf("SC_CLK_TCK")
_SAME = 0.02
"""Seconds by which two readings of one start may differ: the kernel counts in hundredths."""


def process_state(pid: int, started: float | None) -> tuple[State, str | None]:
    """What has become of a process of this host, and the kernel's letter for its state.

    ``gone``: there is no such process, it is a zombie, or the number belongs to another one by now; ``stopped``: by
    SIGSTOP or a debugger; else ``silent``. ``started``: when it started as :func:`process_start_time` told it on this
    host, ``None`` where nobody knows. Processes of other PID namespaces can't be asked after: they look gone.
    """
    fields = _fields(pid)
    if fields is None:
        return GONE, None
    letter = fields[0]
    if letter in "ZXx" or (started is not None and abs(_seconds(fields) - started) > _SAME):
        return GONE, letter if letter in "ZXx" else None
    return (STOPPED if letter in "Tt" else SILENT), letter


def process_start_time(pid: int | None = None) -> float | None:
    """When a process (this one) started, seconds since the host's boot; ``None`` where it can't be seen."""
    fields = _fields(os.getpid() if pid is None else pid)
    return _seconds(fields) if fields else None


def _seconds(fields: list[str]) -> float:
    return int(fields[_START_TIME]) / _TICKS


def _fields(pid: int) -> list[str] | None:
    """The fields after the name, which may hold blanks and brackets itself."""
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > _START_TIME else None

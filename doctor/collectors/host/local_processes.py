"""The kernel's view of another process on this host that does not respond."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from doctor.collectors.base import parse_int, read_bytes, read_pairs
from doctor.core.process import KILLS

State = Literal["gone", "stopped", "silent"]
GONE: Final = "gone"
STOPPED: Final = "stopped"
SILENT: Final = "silent"
_START_TIME = 19
"""Index among the fields after the name in /proc/PID/stat (proc(5): field 22, in clock ticks since boot)."""
_EXIT_CODE = 49
"""Likewise of the wait status (field 52)."""
_TICKS = os.sysconf("SC_CLK_TCK")
_SAME = 0.02
"""Tolerance in seconds between two readings of one start time: the kernel counts in hundredths."""


def process_state(pid: int, started: float | None) -> tuple[State, str | None]:
    """Return the state of a process on this host, and the kernel's state code.

    ``gone``: it does not exist, is a zombie, or its pid was reused; ``stopped``: by SIGSTOP or a debugger; else
    ``silent``. ``started``: its start time from :func:`process_start_time` on this host, ``None`` if unknown. Processes
    of other PID namespaces are not visible and appear gone.
    """
    fields = _fields(pid)
    if fields is None:
        return GONE, None
    letter = fields[0]
    began = int(fields[_START_TIME]) / _TICKS
    if letter in "ZXx" or (started is not None and abs(began - started) > _SAME):
        return GONE, letter if letter in "ZXx" else None
    return (STOPPED if letter in "Tt" else SILENT), letter


def zombie_exit_code(pid: int, started: float) -> int | None:
    """Return how a zombie of this user, or any zombie if this process is root, ended; negative for a signal.

    ``None`` if it is none, or if it belongs to another user: the kernel then shows 0 (proc(5), field 52).
    """
    data = read_bytes(f"/proc/{pid}/stat") or b""
    if not data.rpartition(b")")[2].startswith(b" Z"):  # of most, because each watchdog looks at one twice a second
        return None
    fields = _fields_in(data)
    if fields is None or len(fields) <= _EXIT_CODE:
        return None
    if abs(int(fields[_START_TIME]) / _TICKS - started) > _SAME:
        return None
    owner = parse_int(read_pairs(Path("/proc") / str(pid) / "status", ":").get("Uid", "").partition("\t")[0])
    status = parse_int(fields[_EXIT_CODE])
    if status is None or os.geteuid() not in (0, owner):
        return None
    return os.waitstatus_to_exitcode(status)


def signal_that_killed(pid: int, started: float | None) -> int:
    """Return which of :data:`KILLS` ended a zombie; 0 if it is none, or ended in another way."""
    code = zombie_exit_code(pid, started) if started is not None else None
    return -code if code is not None and -code in KILLS else 0


def process_start_time(pid: int | None = None) -> float | None:
    """Return the start time of a process (this one) in seconds since boot, if visible."""
    fields = _fields(os.getpid() if pid is None else pid)
    return int(fields[_START_TIME]) / _TICKS if fields else None


def _fields(pid: int) -> list[str] | None:
    """Return the fields after the name, which may itself contain blanks and brackets."""
    return _fields_in(read_bytes(f"/proc/{pid}/stat") or b"")


def _fields_in(data: bytes) -> list[str] | None:
    fields = data.decode("utf-8", "replace").rpartition(")")[2].split()
    return fields if len(fields) > _START_TIME else None

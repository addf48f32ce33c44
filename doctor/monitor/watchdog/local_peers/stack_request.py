"""Asks another rank of this host for its stacks, by a signal: never any other process, and never another signal.

Which process a rank is comes from a message, and a message may be wrong: another process may have its number by now, or
somebody else may have written it. What counts is what the kernel says of that process at this moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from doctor.monitor.telemetry.local_processes import SILENT, process_state
from doctor.monitor.watchdog.local_peers.stack_dump import StackSignal

PIDFD_THREAD = os.O_EXCL
"""Of pidfd_open(2), since Linux 6.9: a descriptor of one thread. A signal to it can't reach another one that got the
same number since."""
MOST_FILES = 1 << 16
"""Open files of a process that are looked at."""


class LocalPeer(NamedTuple):
    """What a rank said of its process: ``started`` as in
    :func:`doctor.monitor.telemetry.local_processes.process_start_time`; ``how``: the thread and the signal by which
    it can be asked; ``file``: where its stacks go then."""

    pid: int
    started: float | None
    how: StackSignal
    file: Path


def request_stacks(one: LocalPeer) -> bool:
    """Ask it for its stacks; whether it was asked. Nothing is sent unless :func:`accepts_stack_signal` holds."""
    handle = _thread_handle(one.how.thread)
    try:
        return accepts_stack_signal(one) and _send(one, handle)
    finally:
        if handle is not None:
            os.close(handle)


def accepts_stack_signal(one: LocalPeer) -> bool:
    """Whether that process is a rank of this run that waits for this very signal.

    It started when it said, it is this user's, it catches the signal, which is a real-time one, in a thread of its own
    that is not its main one; and it holds the file open to which the stacks of that rank of this run go, which no
    process does that is not this rank.
    """
    thread, number = one.how
    if one.started is None or not signal.SIGRTMIN <= number <= signal.SIGRTMAX or thread in (0, one.pid):
        return False
    proc = Path("/proc") / str(one.pid)
    return (
        one.pid != os.getpid()
        and process_state(one.pid, one.started)[0] == SILENT
        and (proc / "task" / str(thread)).is_dir()
        and _is_own_and_catches(proc, number)
        and _holds(proc, one.file)
    )


def _is_own_and_catches(proc: Path, number: int) -> bool:
    """Whether the process is this user's, by its real and effective id, and catches the signal."""
    try:
        lines = (proc / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        real, effective = fields["Uid"].split()[:2]
        caught = int(fields["SigCgt"], 16)
    except (OSError, KeyError, ValueError):
        return False
    return (int(real), int(effective)) == (os.getuid(), os.geteuid()) and bool(caught >> (number - 1) & 1)


def _holds(proc: Path, file: Path) -> bool:
    """Whether the process has that file open; the file is a regular one of this user's, and no link."""
    try:
        own = file.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(own.st_mode) or own.st_uid != os.geteuid():
        return False
    return any(os.path.samestat(own, held) for held in _held(proc, file))


def _held(proc: Path, file: Path) -> Iterator[os.stat_result]:
    """Open files of the process that bear the name of ``file``. Links are read first: looking at a file may block."""
    with contextlib.suppress(OSError), os.scandir(proc / "fd") as entries:
        for entry in islice(entries, MOST_FILES):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).endswith(f"/{file.parent.name}/{file.name}"):  # noqa: PTH115 - a name
                    yield os.stat(entry.path)  # noqa: PTH116 - of the open file, which may have no path here


def _thread_handle(thread: int) -> int | None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # an older kernel, or no such thread
        return os.pidfd_open(thread, PIDFD_THREAD)
    return None


def _send(one: LocalPeer, handle: int | None) -> bool:
    thread, number = one.how
    if handle is not None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, number)
            return True
        return False
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # since glibc 2.30
    return tgkill is not None and tgkill(one.pid, thread, number) == 0

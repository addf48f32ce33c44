"""Requests stacks from another rank on this host by a signal, and from no other process.

The process of a rank is taken from a message, which may be outdated or forged: the PID may have been reused. So the
kernel's view of that process at this moment decides.
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

import msgspec

from doctor.collectors.host.local_processes import SILENT, process_state
from doctor.monitor.watchdog.local_peers.stack_dump import StackSignal

PIDFD_THREAD = os.O_EXCL
"""Flag of pidfd_open(2) since Linux 6.9: a descriptor of one thread. A signal through it cannot reach a thread that
reused the id."""
MOST_FILES = 1 << 16
"""Maximum number of open files of a process that are examined."""


class LocalPeer(msgspec.Struct, frozen=True):
    """The process of a rank, as it announced itself.

    ``started``: as in :func:`doctor.collectors.host.local_processes.process_start_time`; ``stack_signal``: thread and
    signal that request its stacks; ``file``: its stack file.
    """

    pid: int
    started: float | None
    stack_signal: StackSignal
    file: Path


def request_stacks(peer: LocalPeer) -> bool:
    """Send the stack signal if :func:`accepts_stack_signal` holds; return whether it was sent."""
    handle = None
    with contextlib.suppress(AttributeError, OSError, ValueError):  # older kernel, or no such thread
        handle = os.pidfd_open(peer.stack_signal.thread, PIDFD_THREAD)
    try:
        return accepts_stack_signal(peer) and _send(peer, handle)
    finally:
        if handle is not None:
            os.close(handle)


def accepts_stack_signal(peer: LocalPeer) -> bool:
    """Return whether the process is a rank of this run that expects this signal.

    It has the announced start time, belongs to this user, catches the signal, which is a real-time signal, in a thread
    other than its main thread, and has the stack file of that rank open, which no other process does.
    """
    thread, number = peer.stack_signal
    if peer.started is None or not signal.SIGRTMIN <= number <= signal.SIGRTMAX or thread in (0, peer.pid):
        return False
    proc = Path("/proc") / str(peer.pid)
    return (
        peer.pid != os.getpid()
        and process_state(peer.pid, peer.started)[0] == SILENT
        and (proc / "task" / str(thread)).is_dir()
        and _is_own_and_catches(proc, number)
        and _has_open(proc, peer.file)
    )


def _is_own_and_catches(proc: Path, number: int) -> bool:
    """Return whether the process has this user's real and effective id and catches the signal."""
    try:
        lines = (proc / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        real, effective = fields["Uid"].split()[:2]
        caught = int(fields["SigCgt"], 16)
    except (OSError, KeyError, ValueError):
        return False
    return (int(real), int(effective)) == (os.getuid(), os.geteuid()) and bool(caught >> (number - 1) & 1)


def _has_open(proc: Path, file: Path) -> bool:
    """Return whether the process has the file open, a regular file of this user and not a link."""
    try:
        own = file.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(own.st_mode) or own.st_uid != os.geteuid():
        return False
    return any(os.path.samestat(own, opened) for opened in _open_files(proc, file))


def _open_files(proc: Path, file: Path) -> Iterator[os.stat_result]:
    """Yield the process's open files with the name of ``file``; stat of others may block."""
    with contextlib.suppress(OSError), os.scandir(proc / "fd") as entries:
        for entry in islice(entries, MOST_FILES):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).endswith(f"/{file.parent.name}/{file.name}"):  # noqa: PTH115 - a name
                    yield os.stat(entry.path)  # noqa: PTH116 - of the open file, which may have no path here


def _send(peer: LocalPeer, handle: int | None) -> bool:
    thread, number = peer.stack_signal
    if handle is not None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, number)
            return True
        return False
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # since glibc 2.30
    return tgkill is not None and tgkill(peer.pid, thread, number) == 0

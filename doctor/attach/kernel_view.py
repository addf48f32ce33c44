"""The kernel's view of a process: what ``/proc`` shows without the help of the process and without stopping it.

Sources: proc(5). ``wchan``, ``syscall``, ``io`` and ``fd`` are readable for the user of the process and for root.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from doctor.collectors.base import link_target, parse_int, read_pairs, read_text
from doctor.core.facts import KernelView

MOST_FILES = 4096
"""Open files of a process that are examined for sockets."""
LARGEST_TABLE = 8 << 20
"""Maximum bytes of a table of sockets that are read: about 50,000 sockets."""
LONGEST_WCHAN = 64
_TICKS = os.sysconf("SC_CLK_TCK")
_USER_TIME, _SYSTEM_TIME = 11, 12
"""Indexes among the fields after the name in /proc/PID/stat."""
_ESTABLISHED = "01"
"""TCP_ESTABLISHED of include/net/tcp_states.h; the receive queue of a listening socket counts connections."""
_SOCKET = re.compile(r"socket:\[(\d{1,20})\]")


class SocketQueues:
    """Bytes in the receive queues of established TCP connections, by inode; each network namespace is read once."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._tables: dict[str, dict[int, int]] = {}

    def of_process(self, pid: int) -> int | None:
        """Return the bytes that a process has received and not read; ``None`` if its files may not be seen."""
        folder = self._proc / str(pid)
        inodes = _socket_inodes(folder / "fd")
        if inodes is None:
            return None
        namespace = link_target(folder / "ns" / "net") or str(pid)
        if namespace not in self._tables:
            self._tables[namespace] = _receive_queues(folder / "net")
        queues = self._tables[namespace]
        return sum(queues.get(inode, 0) for inode in inodes)


def read_kernel_view(
    pid: int, queues: SocketQueues, proc: Path = Path("/proc"), thread: int | None = None
) -> KernelView:
    """Return what ``/proc`` shows of a process; empty if it is gone. ``thread``: that stands for the main thread."""
    folder = proc / str(pid)
    main = folder / "task" / str(thread or pid)
    fields = _stat_fields(main / "stat")
    if not fields:
        return KernelView()
    counters = read_pairs(folder / "io", ":", limit=4096)
    transferred = [parse_int(counters.get(name)) for name in ("rchar", "wchar")]
    return KernelView(
        state=fields[0][:1],
        wchan=_wchan(main / "wchan"),
        syscall=_system_call(main / "syscall"),
        cpu=_cpu_seconds(_stat_fields(folder / "stat")),
        main_cpu=_cpu_seconds(fields),
        switches=parse_int(read_pairs(main / "status", ":", limit=1 << 16).get("voluntary_ctxt_switches")),
        transferred=None if None in transferred else sum(filter(None, transferred)),
        queued=queues.of_process(pid),
    )


def thread_number(pid: int, native_id: int, proc: Path = Path("/proc")) -> int | None:
    """Return the kernel id, in this PID namespace, of the thread that has ``native_id`` in that of its process."""
    folder = proc / str(pid) / "task"
    for name in (str(native_id), *_names(folder)):
        inner = read_pairs(folder / name / "status", ":", limit=1 << 16).get("NSpid", "").split()
        if inner and parse_int(inner[-1]) == native_id:
            return parse_int(name)
    return None


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, MOST_FILES)]
    except OSError:
        return []


def _stat_fields(path: Path) -> list[str]:
    """Return the fields after the name, which may itself contain blanks and brackets."""
    return (read_text(path, limit=4096) or "").rpartition(")")[2].split()


def _cpu_seconds(fields: list[str]) -> float | None:
    if len(fields) <= _SYSTEM_TIME:
        return None
    ticks = parse_int(fields[_USER_TIME]), parse_int(fields[_SYSTEM_TIME])
    return None if None in ticks else sum(filter(None, ticks)) / _TICKS


def _wchan(path: Path) -> str:
    text = read_text(path, limit=256) or ""
    return text[:LONGEST_WCHAN] if re.fullmatch(r"[A-Za-z_][\w.]*", text, re.ASCII) else ""


def _system_call(path: Path) -> int | None:
    """Return the number of the system call; ``None`` if the thread runs, or is blocked outside of one (-1)."""
    number = parse_int((read_text(path, limit=256) or "").partition(" ")[0])
    return number if number is not None and number >= 0 else None


def _socket_inodes(folder: Path) -> set[int] | None:
    try:
        with os.scandir(folder) as entries:
            links = [link_target(Path(entry.path)) or "" for entry in islice(entries, MOST_FILES)]
    except OSError:
        return None
    return {int(found[1]) for link in links if (found := _SOCKET.fullmatch(link))}


def _receive_queues(folder: Path) -> dict[int, int]:
    """Return the receive queues of a network namespace, from ``/proc/PID/net/tcp`` and ``tcp6``."""
    found: dict[int, int] = {}
    for name in ("tcp", "tcp6"):
        for row in (read_text(folder / name, limit=LARGEST_TABLE) or "").splitlines()[1:]:
            fields = row.split(None, 10)
            if len(fields) >= 10 and fields[3] == _ESTABLISHED:
                queued = _hexadecimal(fields[4].partition(":")[2])
                if queued and (inode := parse_int(fields[9])):
                    found[inode] = queued
    return found


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0

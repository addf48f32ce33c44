"""The kernel's view of a process: what ``/proc`` shows without the help of the process and without stopping it.

Sources: proc(5). ``wchan``, ``syscall``, ``io`` and ``fd`` are readable for the user of the process and for root,
``stack`` for root alone. No file of the process is opened, and no link is followed: its file system may not answer.
"""

from __future__ import annotations

import os
import platform
import re
from itertools import islice
from pathlib import Path

from doctor.collectors.base import link_target, parse_int, read_pairs, read_text
from doctor.core.facts import KernelView, OpenFile
from doctor.core.masking import mask_text
from doctor.core.text import lazy_compile

MOST_FILES = 4096
"""Open files of a process that are examined for sockets."""
LARGEST_TABLE = 8 << 20
"""Maximum bytes of a table of sockets that are read: about 50,000 sockets."""
LONGEST_WCHAN = 64
MOST_FUNCTIONS = 24
"""Functions of a kernel stack that are kept, innermost first."""
MOST_SHOWN_FILES = 16
"""Regular files of a process whose positions are read."""
_FUNCTION = lazy_compile(r"\[<\w{1,16}>\] ([A-Za-z_][\w.]{0,63})\+0x", re.ASCII)
_FILE_CALLS = {
    "x86_64": frozenset({0, 1, 16, 17, 18, 19, 20, 72, 73, 74, 75, 217}),
    "aarch64": frozenset({25, 29, 32, 61, 63, 64, 65, 66, 67, 68, 82, 83}),
}
"""Numbers of system calls whose first argument is a file (read, write, ioctl, pread64, pwrite64, readv, writev, fcntl,
flock, fsync, fdatasync, getdents64): arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h."""
_NO_DATA = ("/dev/", "/proc/", "/sys/", "/memfd:")
_TICKS = os.sysconf("SC_CLK_TCK")
_USER_TIME, _SYSTEM_TIME = 11, 12
"""Indexes among the fields after the name in /proc/PID/stat."""
_QUEUED = lazy_compile(
    r" 01 [0-9A-F]{8}:(?!0{8})(?P<bytes>[0-9A-F]{8}) [0-9A-F:]{11} [0-9A-F]{8}"
    r" {1,8}\d{1,10} {1,16}\d{1,10} (?P<inode>\d{1,18}) ",
    re.ASCII,
)
"""A row of a connection with bytes in its receive queue, from the state on: 01 is TCP_ESTABLISHED of
include/net/tcp_states.h; the receive queue of a listening socket counts connections. A table has thousands of rows."""
_SOCKET = lazy_compile(r"socket:\[(\d{1,20})\]")


class SocketQueues:
    """Bytes in the receive queues of established TCP connections, by inode; each network namespace is read once."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._tables: dict[str, dict[int, int]] = {}

    def of_process(self, pid: int) -> int | None:
        """Return the bytes that a process has received and not read; ``None`` if its files may not be seen."""
        links = open_links(self._proc / str(pid) / "fd")
        return None if links is None else self.of_links(pid, links)

    def of_links(self, pid: int, links: dict[int, str]) -> int:
        """The same, by the targets of its open files."""
        folder = self._proc / str(pid)
        inodes = {int(found[1]) for link in links.values() if (found := _SOCKET.fullmatch(link))}
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
    links = open_links(folder / "fd")
    call, arguments = system_call(main / "syscall")
    argument = arguments[0] if arguments else None
    files = _OpenFiles(folder, links or {})
    return KernelView(
        state=fields[0][:1],
        wchan=_wchan(main / "wchan"),
        syscall=call,
        cpu=_cpu_seconds(_stat_fields(folder / "stat")),
        main_cpu=_cpu_seconds(fields),
        switches=parse_int(read_pairs(main / "status", ":", limit=1 << 16).get("voluntary_ctxt_switches")),
        transferred=None if None in transferred else sum(filter(None, transferred)),
        queued=None if links is None else queues.of_links(pid, links),
        stack=_kernel_stack(main / "stack"),
        file=files.of_call(call, argument),
        files=files.regular(),
    )


def thread_number(pid: int, native_id: int, proc: Path = Path("/proc")) -> int | None:
    """Return the kernel id, in this PID namespace, of the thread that has ``native_id`` in that of its process."""
    folder = proc / str(pid) / "task"
    for name in (str(native_id), *_names(folder)):
        inner = read_pairs(folder / name / "status", ":", limit=1 << 16).get("NSpid", "").split()
        if inner and parse_int(inner[-1]) == native_id:
            return parse_int(name)
    return None


def plain(text: str, longest: int = 200) -> str:
    """Return text of a process for facts: bounded, without secrets, control and other unprintable characters."""
    return mask_text("".join(letter if letter.isprintable() else "\ufffd" for letter in text[:longest]))


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


def system_call(path: Path) -> tuple[int | None, tuple[int | None, ...]]:
    """Return the number of the system call and its arguments; ``None`` and none if the thread runs, or is blocked
    outside of one (-1)."""
    fields = (read_text(path, limit=256) or "").split()
    number = parse_int(fields[0]) if fields else None
    if number is None or number < 0:
        return None, ()
    return number, tuple(map(_hexadecimal, fields[1:7]))


def _kernel_stack(path: Path) -> tuple[str, ...]:
    lines = (read_text(path, limit=1 << 16) or "").splitlines()[:MOST_FUNCTIONS]
    return tuple([found[1] for line in lines if (found := _FUNCTION.match(line))])


class _OpenFiles:
    """The open files of a process, by the links in ``/proc/PID/fd``."""

    def __init__(self, folder: Path, links: dict[int, str]) -> None:
        self._folder = folder
        self._links = links
        self._kinds: dict[str, str] | None = None

    def of_call(self, call: int | None, argument: int | None) -> OpenFile | None:
        """Return the file that a system call is about, if it is one about a file and no socket."""
        link = self._links.get(argument, "") if argument is not None else ""
        if call not in _FILE_CALLS.get(platform.machine(), ()) or not link.startswith(("/", "pipe:")):
            return None
        return self._file(argument or 0, link)

    def regular(self) -> tuple[OpenFile, ...]:
        """Return the files that may hold data, in the order of their numbers."""
        chosen = [number for number, link in sorted(self._links.items()) if _holds_data(link)]
        return tuple([self._file(number, self._links[number]) for number in chosen[:MOST_SHOWN_FILES]])

    def _file(self, number: int, link: str) -> OpenFile:
        info = read_pairs(self._folder / "fdinfo" / str(number), ":", limit=4096)
        return OpenFile(plain(link), self._kind(info.get("mnt_id", "").strip()), parse_int(info.get("pos")))

    def _kind(self, mount: str) -> str:
        """The kind of a file system by the number of its mount."""
        if self._kinds is None:
            lines = (read_text(self._folder / "mountinfo", LARGEST_TABLE) or "").splitlines()
            rows = [(line.partition(" ")[0], line.partition(" - ")[2].partition(" ")[0]) for line in lines]
            self._kinds = {number: plain(kind) for number, kind in rows}
        return self._kinds.get(mount, "")


def _holds_data(link: str) -> bool:
    return link.startswith("/") and not link.startswith(_NO_DATA)


def open_links(folder: Path) -> dict[int, str] | None:
    """Return the targets of the open files of a process by their numbers; ``None`` if they may not be seen."""
    try:
        with os.scandir(folder) as entries:
            found = [(parse_int(entry.name), link_target(Path(entry.path))) for entry in islice(entries, MOST_FILES)]
    except OSError:
        return None
    return {number: link for number, link in found if number is not None and link}


def _receive_queues(folder: Path) -> dict[int, int]:
    """Return the receive queues of a network namespace, from ``/proc/PID/net/tcp`` and ``tcp6``."""
    tables = [read_text(folder / name, LARGEST_TABLE) or "" for name in ("tcp", "tcp6")]
    return {int(row["inode"]): int(row["bytes"], 16) for table in tables for row in _QUEUED.finditer(table)}


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0

"""The processes of this host as ``/proc`` shows them, read in one bounded pass.

Everything read here was written by the owners of the processes: names, arguments and variables may hold any bytes and
any claim. Sizes are limited, and a process that ends or is replaced while it is read is left out. Reading the arguments
or the environment of a process waits for its memory map (``mmap_lock``), which a process stuck in the kernel may hold
forever: these reads have a deadline.

Source: proc(5), fs/proc/base.c and fs/proc/array.c of Linux.
"""

from __future__ import annotations

import os
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from doctor.collectors.base import link_target, parse_int
from doctor.collectors.host.processes import owner
from doctor.core.background import PendingCall, start_daemon

PROC = Path("/proc")
MOST_PROCESSES = 32_768
"""Processes that are read; the limit of PIDs of 32-bit Linux. Hosts of training jobs have a few thousand."""
ENVIRON_BYTES = 128 << 10
"""Bytes of an environment that are read; a single variable may have as many (MAX_ARG_STRLEN)."""
ARGUMENT_BYTES = 32 << 10
"""Bytes of a command line that are read."""
TABLE_BYTES = 256 << 20
"""Characters of all arguments and environments that are kept."""
PASS_SECONDS = 5.0
"""Seconds in which the arguments and environments of all processes are read."""
READ_SECONDS = 0.5
"""Seconds that one process may take."""
DEEPEST = 64
"""Maximum of parents that are followed."""
_TICKS = os.sysconf("SC_CLK_TCK")
_START_TIME = 19
_T = TypeVar("_T")


class Process(msgspec.Struct, frozen=True):
    """A process. ``pid`` and ``parent`` are those of this PID namespace, ``inner_pid`` the one it has in its own.

    ``started``: seconds since boot; ``user``: effective user id; ``name``: at most 15 characters (comm in proc(5));
    ``state``: the kernel's letter; ``terminal``: it has a controlling terminal. ``arguments`` and ``environ`` are those
    of its last ``execve``, ``None`` if they could not be read; ``executable`` is empty then. ``network``: its network
    namespace, empty if unknown."""

    pid: int
    parent: int
    started: float
    user: int
    name: str = ""
    state: str = ""
    terminal: bool = False
    inner_pid: int = 0
    arguments: tuple[str, ...] | None = None
    environ: Mapping[str, str] | None = None
    executable: str = ""
    network: str = ""

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended, and its parent has not waited for it."""
        return self.state in ("Z", "X", "x")


class ProcessTable(msgspec.Struct, frozen=True, dict=True):
    """The processes by PID. ``own``: the process that attaches, which is never a target, nor are
    its children; ``proc``: the folder that was read; ``complete``: the arguments
    and environments of all processes that this user may read are in the table."""

    processes: Mapping[int, Process]
    own: int | None = None
    complete: bool = True
    proc: Path = PROC

    @cached_property
    def _children(self) -> Mapping[int, tuple[Process, ...]]:
        found: defaultdict[int, list[Process]] = defaultdict(list)
        for process in self.processes.values():
            found[process.parent].append(process)
        return {parent: tuple(sorted(group, key=start_order)) for parent, group in found.items()}

    def get(self, pid: int) -> Process | None:
        """Return the process, or ``None`` if it was not seen."""
        return self.processes.get(pid)

    def children(self, pid: int) -> tuple[Process, ...]:
        """Return the children of a process in the order in which they were started."""
        return self._children.get(pid, ())

    def ancestors(self, process: Process) -> Iterator[Process]:
        """Return the parents of a process, nearest first."""
        for _ in range(DEEPEST):
            parent = self.get(process.parent)
            if parent is None or parent.started > process.started + 1 / _TICKS:
                return  # A parent that started later has the reused PID of the real one.
            yield parent
            process = parent

    def descendants(self, pid: int) -> Iterator[Process]:
        """Return the children of a process and theirs, parents before children."""
        waiting, seen = list(self.children(pid)), {pid}
        while waiting:
            process = waiting.pop(0)
            if process.pid not in seen:
                seen.add(process.pid)
                yield process
                waiting.extend(self.children(process.pid))


def start_order(process: Process) -> tuple[float, int]:
    """Return the sort key of processes in the order in which they were started (resolution: 10 ms, then by PID)."""
    return process.started, process.pid


def own_users(environ: Mapping[str, str] | None = None) -> frozenset[int]:
    """Return the users whose processes are attached to without an option: this one, and who called sudo."""
    user = os.geteuid()
    caller = parse_int((os.environ if environ is None else environ).get("SUDO_UID"))
    return frozenset((user, caller)) if user == 0 and caller is not None else frozenset((user,))


def process_table(proc: Path = PROC, *, seconds: float = PASS_SECONDS) -> ProcessTable:
    """Read the processes of this host, those of this user first: nobody else's can take their place.

    ``seconds``: the deadline after which no further arguments and environments are read.
    """
    until = time.monotonic() + seconds
    pids, users = _pids(proc), own_users()
    left_out = len(pids) > MOST_PROCESSES
    if left_out:
        pids = sorted(pids, key=lambda pid: (owner(proc / str(pid)) not in users, pid))[:MOST_PROCESSES]
    seen = [process for pid in pids if (process := _identity(proc, pid)) is not None]
    found = {process.pid: process for process in seen}
    readable = [one for one in seen if not (_is_kernel_thread(one) or one.is_zombie)]
    reader, budget = BlockingReader(), TABLE_BYTES
    for process in sorted(readable, key=lambda one: (one.user not in users, one.pid)):
        if time.monotonic() >= until or budget <= 0:
            left_out = True
            break
        whole = _with_details(proc, process, reader)
        if whole is None:
            del found[process.pid]
        else:
            found[process.pid] = whole
            budget -= _size(whole)
    reader.close()
    return ProcessTable(found, os.getpid(), not left_out, proc)


def _size(process: Process) -> int:
    variables = process.environ or {}
    return sum(map(len, process.arguments or ())) + sum(len(name) + len(variables[name]) for name in variables)


def is_running(process: Process, proc: Path = PROC) -> bool:
    """Return whether the process still exists: neither ended nor replaced by another one of the same PID."""
    now = _identity(proc, process.pid)
    return now is not None and not now.is_zombie and now.started == process.started


def _pids(proc: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(proc) if name.isascii() and name.isdecimal())  # noqa: PTH208
    except OSError:
        return []


def _is_kernel_thread(process: Process) -> bool:
    return 2 in (process.pid, process.parent) and process.user == 0


def _identity(proc: Path, pid: int) -> Process | None:
    """Read what the kernel itself maintains, which any user may read."""
    stat = read_bytes(proc / str(pid) / "stat", 4096)
    status = read_bytes(proc / str(pid) / "status", 16384)
    if not stat or status is None:
        return None
    start, _, end = stat.partition(b"(")[2].rpartition(b")")
    fields = end.split()
    rows = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
    users, inner = rows.get(b"Uid", b"").split(), rows.get(b"NSpid", b"").split()
    if len(fields) <= _START_TIME or len(users) < 2:
        return None
    return Process(
        pid,
        parent=int(fields[1]),
        started=int(fields[_START_TIME]) / _TICKS,
        user=int(users[1]),
        name=start.decode("utf-8", "replace"),
        state=fields[0].decode("ascii", "replace"),
        terminal=fields[4] != b"0",
        inner_pid=(parse_int(inner[-1].decode("ascii", "replace")) or pid) if inner else pid,
    )


def _with_details(proc: Path, process: Process, reader: BlockingReader) -> Process | None:
    folder = proc / str(process.pid)
    arguments, environ = reader.call(lambda: (_arguments(folder), _environ(folder))) or (None, None)
    whole = msgspec.structs.replace(
        process,
        arguments=arguments,
        environ=environ,
        executable=link_target(folder / "exe") or "",
        network=link_target(folder / "ns" / "net") or "",
    )
    now = _identity(proc, process.pid)
    if now is None or now.started != process.started:
        return None
    # A process that ended while it was read, or was replaced by execve, has no arguments of its own any more.
    return now if now.is_zombie else msgspec.structs.replace(whole, name=now.name, parent=now.parent, state=now.state)


def _arguments(folder: Path) -> tuple[str, ...] | None:
    raw = read_bytes(folder / "cmdline", ARGUMENT_BYTES)
    # A process that sets its title fills the rest of the area with zeros (setproctitle).
    return None if raw is None else tuple(part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0"))


def _environ(folder: Path) -> dict[str, str] | None:
    raw = read_bytes(folder / "environ", ENVIRON_BYTES)
    if raw is None:
        return None
    whole = raw if len(raw) < ENVIRON_BYTES else raw.rpartition(b"\0")[0]
    found: dict[str, str] = {}
    for entry in whole.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name:
            # The first of several wins, as in getenv(3) and os.environ.
            found.setdefault(name.decode("utf-8", "replace"), value.decode("utf-8", "replace"))
    return found


def read_bytes(path: Path, limit: int) -> bytes | None:
    """Return at most ``limit`` bytes of a file of ``/proc``; ``None`` if it is gone or access is denied."""
    try:
        with path.open("rb", buffering=0) as stream:
            parts, left = [], limit
            while left > 0 and (part := stream.read(left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
    except OSError:
        return None


class BlockingReader:
    """Makes calls that may block in a daemon thread, which is abandoned and replaced if one does."""

    def __init__(self) -> None:
        self._start()

    def call(self, work: Callable[[], _T]) -> _T | None:
        """Return the result of ``work``, or ``None`` if it does not return in time."""
        call = PendingCall(work)
        self._calls.put(call.run)
        try:
            return call.result(READ_SECONDS)
        except TimeoutError:
            self.close()
            self._start()
            return None

    def close(self) -> None:
        """End the thread when its call returns."""
        self._calls.put(None)

    def _start(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        start_daemon("doctor-processes", self._work, self._calls)

    @staticmethod
    def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            call()

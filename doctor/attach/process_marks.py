"""Marks of training that the variables of a process do not show: threads, libraries and connections.

Names of threads may be read of any process; libraries and open files only of processes that may be traced. Nothing is
read twice, and only of the processes that are asked about.

Source: proc(5); include/net/tcp_states.h.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from doctor.attach.processes import PROC, BlockingReader, Process, read_bytes
from doctor.collectors.network.listeners import LISTEN
from doctor.knowledge.training_processes import (
    GROUP_THREADS,
    STORE_THREADS,
    TORCH_LIBRARIES,
    TORCH_THREADS,
)

MOST_THREADS = 1024
MOST_FILES = 4096
MOST_MAP_BYTES = 8 << 20
MOST_TABLE_BYTES = 16 << 20
MARK_SECONDS = 5.0
_ESTABLISHED = "01"
_PYTHON_LIBRARY = b"/libpython3."


class _Socket(NamedTuple):
    """A TCP socket: its own end and the other one, as written in /proc/PID/net/tcp."""

    local: str
    remote: str
    state: str


class ProcessMarks(AbstractContextManager["ProcessMarks"]):
    """The marks of the processes below ``proc``, each read once.

    After ``seconds`` no more are read, and ``complete`` is false."""

    def __init__(self, proc: Path = PROC, *, seconds: float = MARK_SECONDS) -> None:
        self._proc = proc
        self._until = time.monotonic() + seconds
        self.complete = True
        self._reader = BlockingReader()
        self._libraries = cache(self._loaded_libraries)
        self.threads = cache(self._thread_names)
        self._open_sockets = cache(self._socket_inodes)
        self._table = cache(self._socket_table)
        self._tables: dict[str, dict[str, _Socket]] = {}

    def __exit__(self, *_: object) -> None:
        """End the reading thread."""
        self._reader.close()

    def has_interpreter(self, process: Process) -> bool:
        """Return whether the library of Python is loaded: a program under another name may embed it."""
        return _PYTHON_LIBRARY in self._libraries(process.pid)

    def has_torch(self, process: Process) -> bool:
        """Return whether torch is loaded, as far as that can be seen."""
        if any(name.startswith(TORCH_THREADS) for name in self.threads(process.pid)):
            return True
        return not self._libraries(process.pid).isdisjoint(TORCH_LIBRARIES)

    def is_member(self, process: Process) -> bool:
        """Return whether the process has a thread of a process group."""
        return any(name.startswith(GROUP_THREADS) for name in self.threads(process.pid))

    def serves_store(self, process: Process) -> bool:
        """Return whether the process has the thread of a TCPStore server."""
        return any(name.startswith(STORE_THREADS) for name in self.threads(process.pid))

    def links(self, processes: Iterable[Process]) -> frozenset[tuple[int, int]]:
        """Return the pairs of PIDs, the lower one first, that have a TCP connection with each other.

        A socket that several of the processes hold was inherited by a fork, so it does not tell them apart.
        """
        held = {process.pid: self._open_sockets(process.pid) for process in processes}
        holders = Counter(inode for inodes in held.values() for inode in inodes)
        ends: dict[tuple[str, str], int] = {}
        for pid, inodes in held.items():
            table = self._table(pid)
            for inode in inodes:
                socket = table.get(inode)
                if socket is not None and socket.state == _ESTABLISHED and holders[inode] == 1:
                    ends[socket.local, socket.remote] = pid
        pairs = ((pid, ends.get((remote, local), pid)) for (local, remote), pid in ends.items())
        return frozenset(pair for pair in pairs if pair[0] < pair[1])

    def listens_for(self, process: Process, others: Iterable[Process]) -> bool:
        """Return whether all of ``others`` are connected to a port on which the process listens."""
        own = self._sockets(process)
        ports = {socket.local.rpartition(":")[2] for socket in own if socket.state == LISTEN}
        return bool(ports) and all(
            any(socket.remote.rpartition(":")[2] in ports for socket in self._sockets(other)) for other in others
        )

    def _sockets(self, process: Process) -> list[_Socket]:
        table = self._table(process.pid)
        return [table[inode] for inode in self._open_sockets(process.pid) if inode in table]

    def _in_time(self) -> bool:
        self.complete = self.complete and time.monotonic() < self._until
        return self.complete

    def _thread_names(self, pid: int) -> frozenset[str]:
        folder = self._proc / str(pid) / "task"
        threads = _listed(folder, MOST_THREADS) if self._in_time() else []
        raw = (read_bytes(folder / thread / "comm", 64) for thread in threads)
        return frozenset(name.rstrip(b"\n").decode("utf-8", "replace") for name in raw if name)

    def _loaded_libraries(self, pid: int) -> frozenset[bytes]:
        """Return those of the libraries that this module knows."""
        if not self._in_time():
            return frozenset()
        maps = self._reader.call(lambda: read_bytes(self._proc / str(pid) / "maps", MOST_MAP_BYTES)) or b""
        return frozenset(library for library in (*TORCH_LIBRARIES, _PYTHON_LIBRARY) if library in maps)

    def _socket_inodes(self, pid: int) -> frozenset[str]:
        folder = self._proc / str(pid) / "fd"
        names = _listed(folder, MOST_FILES) if self._in_time() else []
        links = (_link(folder / name) for name in names)
        return frozenset(link[8:-1] for link in links if link.startswith("socket:["))

    def _socket_table(self, pid: int) -> dict[str, _Socket]:
        """Return the TCP sockets of the network namespace of a process by their inodes."""
        folder = self._proc / str(pid)
        network = _link(folder / "ns" / "net")
        if network not in self._tables:
            rows = (
                line.split()
                for name in ("tcp", "tcp6")
                for line in (read_bytes(folder / "net" / name, MOST_TABLE_BYTES) or b"")
                .decode("ascii", "replace")
                .splitlines()[1:]
            )
            self._tables[network] = {
                row[9]: _Socket(_plain_address(row[1]), _plain_address(row[2]), row[3]) for row in rows if len(row) > 9
            }
        return self._tables[network]


def _plain_address(text: str) -> str:
    """Return an address of /proc/net/tcp6 that IPv6 maps from IPv4 as /proc/net/tcp writes it."""
    return text.removeprefix("0000000000000000FFFF0000")


def _listed(folder: Path, most: int) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(most))]  # noqa: B905 - the shorter one ends it
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""

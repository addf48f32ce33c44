"""The processes that /proc shows: their parents, namespaces and open files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from doctor.collectors.base import link_target, listed, parse_int, read_pairs

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
INITIAL_IPC_NAMESPACE = "ipc:[4026531839]"
INITIAL_UTS_NAMESPACE = "uts:[4026531838]"
"""Inode numbers that Linux fixes for the initial namespaces (include/linux/proc_ns.h)."""
DEEPEST = 64
"""Maximum of parents that are followed. Real chains have about ten."""


class ParentProcess(msgspec.Struct, frozen=True):
    """A process in /proc: pid, name (at most 15 characters, comm in proc(5)), pid of its parent."""

    pid: int
    name: str
    parent: int


def read_process(proc: Path, pid: int | str) -> ParentProcess | None:
    """Return the process from ``proc/<pid>/status``, or ``None`` if it may not be read (hidepid in proc(5))."""
    rows = read_pairs(proc / str(pid) / "status", ":", limit=4096)
    number, parent = parse_int(rows.get("Pid")), parse_int(rows.get("PPid"))
    return None if number is None or parent is None else ParentProcess(number, rows.get("Name", ""), parent)


def ancestors_of(proc: Path, pid: int | str = "self") -> Iterator[ParentProcess]:
    """Return the parents of ``pid``, nearest first, up to process 1 or the first that may not be read.

    A parent outside the PID namespace shows as 0 (pid_namespaces(7)) and ends the chain.
    """
    process = read_process(proc, pid)
    for _ in range(DEEPEST):
        if process is None or process.parent <= 0:
            return
        process = read_process(proc, process.parent)
        if process is not None:
            yield process


def is_initial(proc: Path, kind: str, initial: str) -> bool:
    """Return whether this process is in the initial namespace of ``kind``; ``False`` if that is not shown."""
    return link_target(proc / "self" / "ns" / kind) == initial


def process_folders(proc: Path) -> Iterator[Path]:
    """Return the folder of every visible process."""
    yield from (proc / name for name in listed(proc) if name.isdecimal())


def held_files(process: Path) -> set[str] | None:
    """Return the paths that a process has open or mapped; ``None`` if this user may not see that."""
    try:
        held = {link for handle in (process / "fd").iterdir() if (link := link_target(handle)) is not None}
        with (process / "maps").open("rb") as maps:
            rows = (line.decode("utf-8", "replace").split(None, 5) for line in maps)
            held.update(row[5].rstrip("\n") for row in rows if len(row) == 6)
    except (FileNotFoundError, ProcessLookupError):
        return set()
    except OSError:
        return None
    return held


def owner(path: Path) -> int | None:
    """Return the user id that owns ``path``."""
    try:
        return path.stat().st_uid
    except OSError:
        return None


def files_held_open(proc: Path, users: Collection[int]) -> tuple[set[str], bool]:
    """Return the paths that visible processes of ``users`` and root hold, and whether that is complete.

    Process 1 may be unreadable even for its own user; it starts others and holds no files of the job.
    """
    held: set[str] = set()
    complete = True
    for process in process_folders(proc):
        user = owner(process)
        if user is None or (user != 0 and user not in users):
            continue
        files = held_files(process)
        held.update(files or ())
        complete = complete and (files is not None or user not in users or process.name == "1")
    return held, complete

"""The parents of a process, as far as /proc shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from doctor.collectors.base import parse_int, read_text

DEEPEST = 64
"""Parents that are followed. Real chains have about ten."""


class ParentProcess(NamedTuple):
    """A process in /proc: its number, its name (at most 15 characters, comm in proc(5)), the number of its parent."""

    pid: int
    name: str
    parent: int


def read_process(proc: Path, pid: int | str) -> ParentProcess | None:
    """What ``proc/<pid>/status`` says, or ``None`` where it is gone or may not be read (hidepid in proc(5))."""
    text = read_text(proc / str(pid) / "status", limit=4096)
    if text is None:
        return None
    rows = {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    number, parent = parse_int(rows.get("Pid")), parse_int(rows.get("PPid"))
    return None if number is None or parent is None else ParentProcess(number, rows.get("Name", ""), parent)


def ancestors_of(proc: Path, pid: int | str = "self") -> Iterator[ParentProcess]:
    """The parents of ``pid``, nearest first, up to process 1 or the first that may not be read.

    A parent outside the PID namespace shows as 0 (pid_namespaces(7)) and ends the chain.
    """
    process = read_process(proc, pid)
    for _ in range(DEEPEST):
        if process is None or process.parent <= 0:
            return
        process = read_process(proc, process.parent)
        if process is not None:
            yield process

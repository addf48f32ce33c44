"""The child processes of a rank: data loader workers and others, with state and memory.

Reads files of /proc, so never call it on the step path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from doctor.collectors.base import listed, parse_int, read_bytes, read_text
from doctor.collectors.launch.rank_variables import RANK_VARIABLES
from doctor.core.clock import monotonic
from doctor.core.facts import ChildProcess
from doctor.monitor.telemetry.stacks.stillness import NAPS, POLLING_SHARE, nanoseconds_run

MOST = 256
"""Maximum number of children that are examined."""
MOST_THREADS = 64
"""Maximum number of threads of a child whose context switches are counted."""
STATM_RESIDENT = 1

PROC = Path("/proc")


class ChildStillness:
    """For how long the children of this process have not run, from one look to the next.

    A process that waits for a server or a disk is woken by each answer, which its context switches show
    (proc_pid_status(5)); one that sleeps or waits for a lock is not, and one that looks for something now and then is
    woken at most :data:`NAPS` times a second to do next to nothing.
    """

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc = proc
        self._since: dict[int, tuple[_Runs, float]] = {}

    def look(self) -> tuple[ChildProcess, ...]:
        """Return the children with the seconds since the first look from which on they have hardly run."""
        now, before, self._since = monotonic(), self._since, {}
        found = []
        for child in child_processes(proc=self._proc):
            runs = _runs(self._proc / str(child.pid))
            if runs is not None:
                earlier, since = before.get(child.pid, (runs, now))
                if not runs.is_idle_since(earlier, now - since):
                    earlier, since = runs, now
                self._since[child.pid] = earlier, since
                child = msgspec.structs.replace(child, still=round(now - since, 3))
            found.append(child)
        return tuple(found)


class _Runs(NamedTuple):
    """How often the threads of a process have run, and for how many nanoseconds (``None``: unknown)."""

    switches: int
    nanoseconds: int | None

    def is_idle_since(self, earlier: _Runs, seconds: float) -> bool:
        switches = self.switches - earlier.switches
        if switches == 0 or self.nanoseconds is None or earlier.nanoseconds is None:
            return switches == 0
        ran = self.nanoseconds - earlier.nanoseconds
        return switches <= NAPS * (seconds + 1.0) and ran <= POLLING_SHARE * (seconds + 1.0) * 1e9


def _runs(folder: Path) -> _Runs | None:
    """Return how often all threads of a process have run; ``None`` if it is unreadable, or if they are too many."""
    threads = listed(folder / "task")
    if not 0 < len(threads) <= MOST_THREADS:
        return None
    total, nanoseconds = 0, 0
    for thread in threads:
        lines = (read_text(folder / "task" / thread / "status") or "").splitlines()
        counts = [parse_int(line.partition(":")[2]) for line in lines if "ctxt_switches:" in line]
        known = [count for count in counts if count is not None]
        if len(known) != 2:  # voluntary ones, and those at the end of a time slice
            return None
        total += sum(known)
        ran = nanoseconds_run(thread, folder / "task")
        nanoseconds = -1 if ran is None or nanoseconds < 0 else nanoseconds + ran
    return _Runs(total, nanoseconds if nanoseconds >= 0 else None)


def child_processes(pid: int | None = None, *, proc: Path = PROC) -> tuple[ChildProcess, ...]:
    """Return the descendants of ``pid`` (this process) by pid, at most :data:`MOST`.

    Other ranks and their children are left out. A child that ended and was not waited for has state ``Z``.
    """
    parent = os.getpid() if pid is None else pid
    own: dict[str, set[str]] = {}
    found: dict[int, ChildProcess] = {}
    waiting = [parent]
    while waiting and len(found) < MOST:
        for child in children_of(waiting.pop(), proc):
            if child in found:
                continue
            own = own or _own_ranks(proc / str(parent), os.environ if pid is None else {})
            # One that was started as another rank (by Lightning's launcher); a mere fork shows its parent's number.
            started = _environ(proc / str(child))
            is_other_rank = any(started[name] not in own[name] for name in RANK_VARIABLES if name in started)
            one = None if is_other_rank else _read_child(proc, child)
            if one is not None:
                found[child] = one
                waiting.append(child)
    return tuple(found[child] for child in sorted(found)[:MOST])


def _own_ranks(folder: Path, environ: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the values by which the parent may be known as a rank, in its first environment or the present one."""
    environments = (_environ(folder), environ)
    return {name: {one[name] for one in environments if name in one} or {"0"} for name in RANK_VARIABLES}


def _read_child(proc: Path, pid: int) -> ChildProcess | None:
    """Return one process, see proc(5): a name in ``stat`` may contain blanks and brackets."""
    folder = proc / str(pid)
    before, bracket, after = (read_text(folder / "stat") or "").rpartition(")")
    if not bracket or not after.split():
        return None
    name, state = before.partition("(")[2], after.split()[0]
    return ChildProcess(pid, state, name, memory=resident_bytes(folder), private=_private(folder))


def resident_bytes(folder: Path) -> int | None:
    """Return the resident memory of the process that a folder of /proc describes."""
    columns = (read_text(folder / "statm") or "").split()
    pages = parse_int(columns[STATM_RESIDENT]) if len(columns) > STATM_RESIDENT else None
    return None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")


def _private(folder: Path) -> int | None:
    """Return the bytes that no other process maps: next to none in a new fork."""
    rows = (line.split() for line in (read_text(folder / "smaps_rollup") or "").splitlines())
    private = (row[1] for row in rows if len(row) == 3 and row[0].startswith("Private_"))
    sizes = [size for text in private if (size := parse_int(text)) is not None]
    return sum(sizes) * 1024 if sizes else None


def children_of(pid: int, proc: Path) -> list[int]:
    """Return the children of a process.

    From the kernel's own list if it has one (CONFIG_PROC_CHILDREN); else every process is asked for its parent, which
    takes a tenth of a second on a host with thousands.
    """
    threads = proc / str(pid) / "task"
    lists = [read_bytes(f"{threads}/{thread}/children") for thread in listed(threads)]
    if any(one is not None for one in lists):
        return [int(word) for one in lists for word in (one or b"").split() if word.isdigit()]
    import psutil  # takes 10 ms, and most kernels have the list

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _environ(folder: Path) -> dict[str, str]:
    """Return the initial environment of a process, as far as it is readable."""
    entries = (entry.partition("=") for entry in (read_text(folder / "environ") or "").split("\0"))
    return {name: value for name, equals, value in entries if equals}

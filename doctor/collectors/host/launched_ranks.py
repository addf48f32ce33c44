"""The processes that torchrun started on this host beside this one, before they announce themselves.

Each has RANK in its environment (torch/distributed/elastic/agent/server/local_elastic_agent.py), until it has ended: a
zombie has none, and what was waited for has no process. Those are found by elimination, in the order of their start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from doctor.collectors.base import parse_int, read_text
from doctor.collectors.host.local_processes import GONE, process_start_time, process_state, zombie_exit_code


class LaunchedRank(NamedTuple):
    """The process of a rank; ``pid`` is 0 if there is none any more."""

    pid: int
    started: float | None


class LaunchedRanks:
    """The ranks that the agent of this one started on this host. ``environ``: of this process."""

    def __init__(self, environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._parent = os.getppid()
        self._found: dict[int, LaunchedRank] = {}
        self.expected = self._expected(environ)

    def _expected(self, environ: Mapping[str, str]) -> frozenset[int]:
        """The ranks of this host; none if another process than an agent of torchrun started this one."""
        rank, local, size = (parse_int(environ.get(name)) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if rank is None or local is None or size is None or "TORCHELASTIC_RUN_ID" not in environ or size < 2:
            return frozenset()
        if self._rank_of(self._parent) is not None:
            return frozenset()
        return frozenset(range(rank - local, rank - local + size)) - {rank}

    def look(self) -> dict[int, LaunchedRank]:
        """Return the processes of the other ranks, as far as they are known."""
        if self.expected <= self._found.keys():
            return self._found
        children = read_text(self._proc / str(self._parent) / "task" / str(self._parent) / "children")
        known, ended, others = {one.pid for one in self._found.values()}, [], 0
        for pid in sorted(map(int, children.split())) if children is not None else ():
            rank = None if pid in known or pid == os.getpid() else self._rank_of(pid)
            if rank in self.expected:
                self._found.setdefault(rank, LaunchedRank(pid, process_start_time(pid)))
            elif pid not in known and pid != os.getpid():
                ended += [pid] if process_state(pid, None)[0] == GONE else []
                others += process_state(pid, None)[0] != GONE
        missing = sorted(self.expected - self._found.keys())
        if children is not None and not others and len(ended) in (0, len(missing)):
            pids = ended or [0] * len(missing)
            self._found |= {
                rank: LaunchedRank(pid, process_start_time(pid) if pid else None)
                for rank, pid in zip(missing, pids, strict=True)
            }
        return self._found

    def failed(self) -> bool:
        """Return whether one of them was killed, or ended with an error, and its agent has not waited for it yet."""
        ends = (zombie_exit_code(one.pid, one.started) for one in self.look().values() if one.started is not None)
        return any(ends)

    def _rank_of(self, pid: int) -> int | None:
        try:
            given = (self._proc / str(pid) / "environ").read_bytes()
        except OSError:
            return None
        value = next((one[5:] for one in given.split(b"\0") if one.startswith(b"RANK=")), b"")
        return int(value) if value.isdigit() else None

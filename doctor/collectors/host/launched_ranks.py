"""The ranks that torchrun started on this host beside this one, or that this one started, before they announce
themselves.

Those of torchrun have RANK in their environment (torch/distributed/elastic/agent/server/local_elastic_agent.py), those
of Lightning's first rank LOCAL_RANK (lightning/fabric/strategies/launchers/subprocess_script.py), until they have
ended: a zombie has no environment, and what was waited for has no process. Of torchrun's, those are found by
elimination, in the order of their start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from doctor.collectors.base import parse_int, read_text
from doctor.collectors.host.local_processes import GONE, process_start_time, process_state, zombie_exit_code


class LaunchedRank(msgspec.Struct, frozen=True):
    """The process of a rank; ``pid`` is 0 if there is none any more."""

    pid: int
    started: float | None


_shared: list[LaunchedRanks] = []


def launched_ranks() -> LaunchedRanks:
    """Those of this process, which have to be seen while they run; made once it has the variables of its rank."""
    pid = os.getpid()
    if not _shared or _shared[0].pid != pid or not _shared[0].expected:
        _shared[:] = [LaunchedRanks()]
    return _shared[0]


class LaunchedRanks:
    """The ranks that the agent of this one started on this host. ``environ``: of this process."""

    def __init__(self, environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self.pid = os.getpid()
        self._parent, self._name, self._eliminates = os.getppid(), b"RANK=", True
        self._found: dict[int, LaunchedRank] = {}
        self.expected = self._expected(environ)

    def _expected(self, environ: Mapping[str, str]) -> frozenset[int]:
        """The other ranks of this host; none if they are neither children of an agent of torchrun nor of this one."""
        rank, local, size = (parse_int(environ.get(name)) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if "TORCHELASTIC_RUN_ID" not in environ and rank is None and local == 0 and environ.get("NODE_RANK") == "0":
            self._parent, self._name, self._eliminates = os.getpid(), b"LOCAL_RANK=", False
            return frozenset(range(1, parse_int(environ.get("WORLD_SIZE")) or 1))
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
                is_gone = process_state(pid, None)[0] == GONE
                ended += [pid] if is_gone else []
                others += not is_gone
        missing = sorted(self.expected - self._found.keys())
        if not self._eliminates or children is None or others or len(ended) not in (0, len(missing)):
            return self._found
        self._found |= {
            rank: LaunchedRank(pid, process_start_time(pid)) for rank, pid in zip(missing, ended, strict=False)
        }
        return dict.fromkeys(missing, LaunchedRank(0, None)) | self._found

    def failed(self) -> bool:
        """Return whether one of them was killed, or ended with an error, and its agent has not waited for it yet."""
        ends = (zombie_exit_code(one.pid, one.started) for one in self.look().values() if one.started is not None)
        return any(ends)

    def _rank_of(self, pid: int) -> int | None:
        try:
            given = (self._proc / str(pid) / "environ").read_bytes()
        except OSError:
            return None
        value = next((one[len(self._name) :] for one in given.split(b"\0") if one.startswith(self._name)), b"")
        return parse_int(value.decode(errors="replace"))

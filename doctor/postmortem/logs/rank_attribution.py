"""Attribution of lines to ranks: by other lines of the process, and by the name of the file."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from doctor.postmortem.logs.prefixes import LineOrigin, PrefixedLine

CUES = (" nranks ", " nRanks ", "world_rank=")
"""Texts of lines that name the rank of a process."""
MOST = 1 << 16
"""Maximum number of processes of one log that are distinguished."""

# "ncclCommInitRank comm 0x55 rank 3 nranks 8 cudaDev 3 ... commId 0x1234 - Init START" (src/init.cc of NCCL).
_MEMBER = re.compile(r"\brank (\d{1,7}) n[rR]anks (\d{1,7})\b")
# Ray Train: "- (node_id=..., ip=10.0.0.2, pid=123) world_rank=3, local_rank=3, node_rank=0".
_WORLD = re.compile(r"ip=(?P<ip>[\w.:-]+), pid=(?P<pid>\d{1,9})\) world_rank=(?P<rank>\d{1,7})")

_NAMED = re.compile(
    r"(?:^|[^a-z])(?P<local>local[_-]?)?(?:global[_-]?|world[_-]?)?(?<!lora_)(?<!lora-)(?<!low_)(?<!low-)rank[_.-]?(?P<rank>\d{1,6})(?=[^\d]|$)"
)
# torchrun --log-dir: <run>_<random>/attempt_<n>/<local rank>/stderr.log.
_ATTEMPT = re.compile(r"(?:^|/)attempt_\d+/(?P<local>\d{1,4})/(?:stdout|stderr)\.log(?:\.\w+)?$")


class AttributedOrigin(NamedTuple):
    """The process that logged a line, as far as the whole log identifies it."""

    rank: int | None
    local_rank: int | None
    host: str | None
    pid: int | None


def rank_of_name(name: str) -> tuple[int | None, int | None]:
    """Return rank and local rank if a path has one.

    Examples: ``rank_3.log``, ``local-rank2.err``, ``rank.3/stderr`` (``mpirun --output-filename``), torchrun's
    ``--log-dir``.
    """
    path = name.replace("\\", "/").lower()
    if found := _ATTEMPT.search(path):
        return None, int(found["local"])
    *folders, file = path.split("/")
    ranks = {(bool(found["local"]), int(found["rank"])) for found in _NAMED.finditer(file)}
    if not ranks and (folder := _NAMED.fullmatch(folders[-1] if folders else "")):
        ranks = {(bool(folder["local"]), int(folder["rank"]))}
    if len(ranks) != 1:
        return None, None
    local, rank = ranks.pop()
    return (None, rank) if local else (rank, None)


class LogProcesses:
    """The processes of a log. ``hosts``: those that its lines name."""

    def __init__(self, name: str) -> None:
        self._rank, self._local_rank = rank_of_name(name)
        self._ranks: dict[tuple[str, int], int] = {}
        self._members: dict[tuple[str, int], tuple[int, int]] = {}
        self._first_pid: dict[int, tuple[str, int]] = {}
        self._launchers = False
        self._shifts: set[int] = set()
        self.hosts: set[str] = set()

    def learn(self, parsed: PrefixedLine) -> None:
        """Process a line that names a rank or a process."""
        origin = parsed.origin
        if origin.host is not None and origin.pid is not None and len(self._ranks) + len(self._members) < MOST:
            self._learn_process(origin, (origin.host, origin.pid), parsed.body)
        if origin.task is not None and (origin.local_rank is not None or origin.rank not in (None, origin.task)):
            self._launchers = True
        if origin.host is not None and len(self.hosts) < MOST:
            self.hosts.add(origin.host)
        self.learn_place(origin)
        if "world_rank=" in parsed.body:
            for found in _WORLD.finditer(parsed.body):
                self._ranks[found["ip"], int(found["pid"])] = int(found["rank"])

    def _learn_process(self, origin: LineOrigin, process: tuple[str, int], body: str) -> None:
        if origin.rank is not None:
            self._ranks[process] = origin.rank
        if found := _MEMBER.search(body):
            size = int(found[2])
            if size > self._members.get(process, (0, 0))[0]:
                self._members[process] = size, int(found[1])
        if origin.task is not None and self._first_pid.setdefault(origin.task, process) != process:
            self._launchers = True

    def learn_place(self, origin: LineOrigin) -> None:
        """Record the global and local rank of one process."""
        if origin.rank is None or origin.local_rank is None:
            return
        self._shifts.add(origin.rank - origin.local_rank)
        if origin.host is not None:
            self.hosts.add(origin.host)
            if origin.pid is not None and len(self._ranks) < MOST:
                self._ranks[origin.host, origin.pid] = origin.rank

    def settle(self) -> None:
        """Assign ranks to processes by their communicators, when the log was read completely.

        The largest communicators count, unless two processes would have the same rank, as in several groups.
        """
        size = max((size for size, _ in self._members.values()), default=0)
        world = {process: rank for process, (of, rank) in self._members.items() if of == size}
        if max(Counter(world.values()).values(), default=0) <= 1:
            self._ranks = {**world, **self._ranks}

    def of(self, origin: LineOrigin, weak_rank: int | None) -> AttributedOrigin:
        """Return the process of a line."""
        rank = origin.rank
        if rank is None and origin.pid is not None and origin.host is not None:
            rank = self._ranks.get((origin.host, origin.pid))
        elif rank is None and origin.pid is not None:
            ranks = {rank for (_, pid), rank in self._ranks.items() if pid == origin.pid}
            rank = ranks.pop() if len(ranks) == 1 else None
        if rank is None and not self._launchers:
            rank = origin.task
        if rank is None:
            rank = self._rank if weak_rank is None or self._rank is not None else weak_rank
        local_rank = origin.local_rank if origin.local_rank is not None else self._local_rank
        if rank is None and local_rank is not None and len(self._shifts) == 1 and len(self.hosts) <= 1:
            rank = next(iter(self._shifts)) + local_rank
        return AttributedOrigin(rank, local_rank, origin.host, origin.pid)

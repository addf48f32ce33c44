"""Which rank says a line that does not name one: by other lines of the same process, and by the name of the file."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from doctor.postmortem.logs.prefixes import LineOrigin, PrefixedLine

CUES = (" nranks ", " nRanks ", "world_rank=")
"""Texts that stand in every line that says which rank a process is."""
MOST = 1 << 16
"""Processes of one log that are told apart."""

# "ncclCommInitRank comm 0x55 rank 3 nranks 8 cudaDev 3 ... commId 0x1234 - Init START" (src/init.cc of NCCL).
_MEMBER = re.compile(r"\brank (\d{1,7}) n[rR]anks (\d{1,7})\b")
# Ray Train: "- (node_id=..., ip=10.0.0.2, pid=123) world_rank=3, local_rank=3, node_rank=0".
_WORLD = re.compile(r"ip=(?P<ip>[\w.:-]+), pid=(?P<pid>\d{1,9})\) world_rank=(?P<rank>\d{1,7})")

_NAMED = re.compile(
    r"(?:^|[^a-z])(?P<local>local[_-]?)?(?:global[_-]?|world[_-]?)?rank[_-]?(?P<rank>\d{1,6})(?=[^\d]|$)"
)
# torchrun --log-dir: <run>_<random>/attempt_<n>/<local rank>/stderr.log.
_ATTEMPT = re.compile(r"(?:^|/)attempt_\d+/(?P<local>\d{1,4})/(?:stdout|stderr)\.log(?:\.\w+)?$")


class AttributedOrigin(NamedTuple):
    """Who says a line, as far as all of the log tells."""

    rank: int | None
    local_rank: int | None
    host: str | None
    pid: int | None


def rank_of_name(name: str) -> tuple[int | None, int | None]:
    """The rank and the local rank that the path of a log names: ``rank_3.log``, ``local-rank2.err``, and what torchrun
    ``--log-dir`` makes. Only where nothing else can be meant."""
    path = name.replace("\\", "/").lower()
    if found := _ATTEMPT.search(path):
        return None, int(found["local"])
    ranks = {(bool(found["local"]), int(found["rank"])) for found in _NAMED.finditer(path.rpartition("/")[2])}
    if len(ranks) != 1:
        return None, None
    local, rank = ranks.pop()
    return (None, rank) if local else (rank, None)


class LogProcesses:
    """The processes that speak in a log."""

    def __init__(self, name: str) -> None:
        self._rank, self._local_rank = rank_of_name(name)
        self._ranks: dict[tuple[str, int], int] = {}
        self._members: dict[tuple[str, int], tuple[int, int]] = {}
        self._first_pid: dict[int, tuple[str, int]] = {}
        self._launchers = False
        self._shifts: set[int] = set()
        self._hosts: set[str] = set()

    def learn(self, said: PrefixedLine) -> None:
        """Take a line that names a rank, or a process."""
        speaker = said.speaker
        if speaker.host is not None and speaker.pid is not None and len(self._ranks) + len(self._members) < MOST:
            self._learn_process(speaker, (speaker.host, speaker.pid), said.body)
        if speaker.task is not None and (speaker.local_rank is not None or speaker.rank not in (None, speaker.task)):
            self._launchers = True
        if speaker.host is not None and len(self._hosts) < MOST:
            self._hosts.add(speaker.host)
        self.learn_place(speaker)
        if "world_rank=" in said.body:
            for found in _WORLD.finditer(said.body):
                self._ranks[found["ip"], int(found["pid"])] = int(found["rank"])

    def _learn_process(self, speaker: LineOrigin, process: tuple[str, int], body: str) -> None:
        if speaker.rank is not None:
            self._ranks[process] = speaker.rank
        if found := _MEMBER.search(body):
            size = int(found[2])
            if size > self._members.get(process, (0, 0))[0]:
                self._members[process] = size, int(found[1])
        if speaker.task is not None and self._first_pid.setdefault(speaker.task, process) != process:
            self._launchers = True

    def learn_place(self, speaker: LineOrigin) -> None:
        """Take both ranks of one process."""
        if speaker.rank is None or speaker.local_rank is None:
            return
        self._shifts.add(speaker.rank - speaker.local_rank)
        if speaker.host is not None:
            self._hosts.add(speaker.host)
            if speaker.pid is not None and len(self._ranks) < MOST:
                self._ranks[speaker.host, speaker.pid] = speaker.rank

    def settle(self) -> None:
        """Give ranks to processes by their communicators, when all of the log was read: those of the largest size
        count, if no two processes would be the same rank, as those of several groups would."""
        size = max((size for size, _ in self._members.values()), default=0)
        world = {process: rank for process, (of, rank) in self._members.items() if of == size}
        if max(Counter(world.values()).values(), default=0) <= 1:
            self._ranks = {**world, **self._ranks}

    def of(self, speaker: LineOrigin, weak_rank: int | None) -> AttributedOrigin:
        """Who that is."""
        rank = speaker.rank
        if rank is None and speaker.pid is not None:
            rank = self._of_process(speaker.host, speaker.pid)
        if rank is None and not self._launchers:
            rank = speaker.task
        if rank is None:
            rank = self._rank if weak_rank is None or self._rank is not None else weak_rank
        local_rank = speaker.local_rank if speaker.local_rank is not None else self._local_rank
        if rank is None and local_rank is not None:
            rank = self._of_place(local_rank)
        return AttributedOrigin(rank, local_rank, speaker.host, speaker.pid)

    def _of_place(self, local_rank: int) -> int | None:
        """The rank of a local one, where all that is known is of one host."""
        if len(self._shifts) != 1 or len(self._hosts) > 1:
            return None
        return next(iter(self._shifts)) + local_rank

    def _of_process(self, host: str | None, pid: int) -> int | None:
        if host is not None:
            return self._ranks.get((host, pid))
        ranks = {rank for (_, other), rank in self._ranks.items() if other == pid}
        return ranks.pop() if len(ranks) == 1 else None

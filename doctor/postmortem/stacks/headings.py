"""Lines between dumps that say which process follows: headings of tools and scripts, and variables of a process.

``ray stack`` (https://github.com/ray-project/ray/blob/master/python/ray/scripts/scripts.py) prints the line of ``ps``
for each worker, torch's debug server (torch/distributed/debug/_debug_handlers.py) the rank and the address of its
server. Scripts of users print what they like: a short line with the word rank, PID or process and a number.
"""

from __future__ import annotations

import re

from doctor.knowledge.launchers import LAUNCHERS
from doctor.postmortem.stacks.line_kinds import ProcessLine, VariableLine

LONGEST = 400
"""Characters of a heading; command lines are longer."""
_DEBUG_SERVER = re.compile(r"=== Rank (?P<rank>\d{1,7})(?:: https?://(?P<host>\[[^]\s]*\]|[^:/\s]*)(?:[:/]\S*)?)? ===$")
_RAY = re.compile(r"Stack dump for \S+ +(?P<pid>\d{1,10}) +(?P<rest>\S.*)$")
_PS_COLUMNS = 8
"""Columns of ``ps aux`` between the PID and the command: %CPU %MEM VSZ RSS TTY STAT START TIME."""
_RANK = re.compile(r"(?<![a-z])(?:global[ _-]?)?rank[ _#:=-]{0,3}(?P<rank>\d{1,7})(?!\d)", re.IGNORECASE)
_LOCAL = re.compile(r"local[ _-]?rank[ _#:=-]{0,3}\d{1,7}", re.IGNORECASE)
_PID = re.compile(
    r"(?<![a-z])(?:pid|process)[ _#:=-]{1,3}(?P<pid>\d{1,10})(?!\d)|[ ]-p[ =]?(?P<p>\d{1,10})(?!\d)", re.IGNORECASE
)
_HOST = re.compile(r"(?<![a-z])(?:host(?:name)?|node)[ :=]{1,2}(?P<host>[A-Za-z][\w.-]{0,252})", re.IGNORECASE)
_VARIABLE = re.compile(r"(?:export )?(?P<name>[A-Z][A-Z0-9_]{1,60})=(?P<value>[^\s=]{0,200})$")
RANK_VARIABLES = tuple(
    dict.fromkeys(["RANK", *(name for row in LAUNCHERS if not row.counts_hosts for name in row.rank)])
)
"""Variables that hold a rank, the plain one first."""
SIZE_VARIABLES = tuple(
    dict.fromkeys(["WORLD_SIZE", *(name for row in LAUNCHERS if not row.counts_hosts for name in row.world_size)])
)
LOCAL_VARIABLES = tuple(dict.fromkeys(["LOCAL_RANK", *(name for row in LAUNCHERS for name in row.local_rank)]))
_HOSTS = ("SLURMD_NODENAME", "HOSTNAME", "NODE_NAME")


def heading_of(line: str) -> ProcessLine | None:
    """Return the process that a heading names, or ``None`` if the line names none."""
    if len(line) > LONGEST:
        return None
    if found := _DEBUG_SERVER.match(line):
        return ProcessLine(rank=int(found["rank"]), host=(found["host"] or "").strip("[]"), source="debug-server")
    if found := _RAY.match(line):
        return ProcessLine(int(found["pid"]), _command_of_ps(found["rest"]), source="ray")
    bare = _LOCAL.sub("", line)
    rank, pid = _RANK.search(bare), _PID.search(bare)
    if rank is None and pid is None:
        return None
    host = _HOST.search(bare)
    return ProcessLine(
        int(pid["pid"] or pid["p"]) if pid else 0,
        rank=int(rank["rank"]) if rank else None,
        host=host["host"] if host else "",
    )


def _command_of_ps(rest: str) -> str:
    columns = rest.split(None, _PS_COLUMNS)
    return columns[-1] if len(columns) > _PS_COLUMNS else rest


def variable_of(line: str) -> VariableLine | None:
    """Return a variable of a process that numbers it or names its host, as in a line of ``/proc/PID/environ``."""
    found = _VARIABLE.match(line)
    known = (*RANK_VARIABLES, *SIZE_VARIABLES, *LOCAL_VARIABLES, *_HOSTS)
    return VariableLine(found["name"], found["value"]) if found and found["name"] in known else None


def host_of(variables: dict[str, str]) -> str:
    """Return the host that the variables of a process name."""
    return next((variables[name] for name in _HOSTS if variables.get(name)), "")

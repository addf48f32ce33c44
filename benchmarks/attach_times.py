"""How long ``doctor attach`` takes for a host with 8 ranks, and for 64 hosts that share a folder.

The 64 hosts are PID, UTS and mount namespaces of this machine with a rank and a process that attaches each. The job
hangs over Gloo, and what is found must be right. Used by attach.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.attach.jobs import running
from tests.attach.places import PLACES

RANKS, HOSTS = 8, 64


class Timing(msgspec.Struct, frozen=True):
    """Seconds from the start of the command to its end. ``load``: of the machine in the minute before."""

    title: str
    seconds: float
    limit: float
    cores: int
    load: float
    commit: str

    @property
    def is_good(self) -> bool:
        """Whether the aim is reached."""
        return self.seconds <= self.limit


def attach_to_ranks(folder: Path) -> float:
    """Attach to a host with ranks; return the seconds it takes."""
    with running("sleeps", folder, RANKS) as job:
        begun = time.monotonic()
        attached = job.attach()
        seconds = time.monotonic() - begun
    _require_right(attached.report, RANKS)
    return seconds


def attach_to_hosts(folder: Path) -> float:
    """Attach to all hosts at the same moment over a folder; return the seconds until the last process has ended."""
    with PLACES["hosts over --share"]("sleeps", folder, HOSTS) as job:
        begun = time.monotonic()
        attached = job.attach()
        seconds = time.monotonic() - begun
    assert attached.code == 1, attached
    _require_right(attached.report, HOSTS)
    return seconds


def _require_right(report: dict[str, Any], world: int) -> None:
    found = [
        (result["id"], finding["ranks"])
        for result in report["results"]
        for finding in result["findings"]
        if finding["severity"] == "error"
    ]
    assert found == [("RUN001", [world - 1])], found
    assert report["coverage"]["ranks_seen"] == world, report["coverage"]


TIMED: dict[str, tuple[Callable[[Path], float], float]] = {
    f"time: one host with {RANKS} ranks": (attach_to_ranks, 10.0),
    f"time: {HOSTS} hosts over --share": (attach_to_hosts, 30.0),
}
"""How each is attached to, and the most seconds."""


def timing(title: str, folder: Path, commit: str) -> Timing:
    """Measure one of ``TIMED``."""
    call, limit = TIMED[title]
    load = round(os.getloadavg()[0], 1)
    return Timing(title, round(call(folder), 1), limit, os.cpu_count() or 1, load, commit)

"""How long ``doctor attach`` takes for a host with 8 ranks, and for 64 hosts that share a folder.

The 64 hosts are PID, UTS and mount namespaces of this machine with a rank and a process that attaches each. The job
hangs over Gloo, and what is found must be right. Used by attach.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.attach.jobs import TrainingJob, running
from tests.lab.needs import clean_environ

RANKS, HOSTS = 8, 64
LONGEST = 300.0
"""Seconds after which a host is given up."""


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
    with running("sleeps", folder, HOSTS, own_hosts=True) as job:
        begun = time.monotonic()
        commands = [_attach_inside(job, number) for number in range(HOSTS)]
        outputs = [command.communicate(timeout=LONGEST) for command in commands]
        seconds = time.monotonic() - begun
    codes = [command.returncode for command in commands]
    assert codes == [1] * HOSTS, (codes, outputs)
    (report,) = [json.loads(stdout) for stdout, _ in outputs if stdout]
    _require_right(report, HOSTS)
    return seconds


def _attach_inside(job: TrainingJob, number: int) -> subprocess.Popen[str]:
    (rank,) = job.processes[number].children()
    enter = ["nsenter", "--target", str(rank.pid), "--pid", "--uts", "--mount", "--"]
    command = [sys.executable, "-m", "doctor", "attach", "--isolated", "--format", "json"]
    options = ["--share", str(job.folder / "share"), "--timeout", str(LONGEST)]
    return subprocess.Popen(
        [*enter, *command, *options],
        env=clean_environ(job.folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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

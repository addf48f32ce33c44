"""Processes of :mod:`multiprocessing` that end with an error and are replaced, one after the other.

A ``Pool`` starts a new process for each one that ended (``Pool._repopulate_pool``), so if its processes fail as they
start, whoever waits for a result waits without end, beside children that always run. The objects of the processes show
how each one ended, after another thread has waited for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from doctor.core.clock import monotonic
from doctor.core.facts import ChildProcess
from doctor.core.facts.telemetry import FAILING

LEAST_FAILED = 4
"""Processes that have to fail before this counts as endless: a pool of two fails this often in its second start."""
MOST = 256
"""Maximum number of processes that are looked at."""
_MODULES = ("multiprocessing.process", "multiprocess.process")
"""The modules that list the living processes of this one, the second one a copy that pickles more."""


class FailingProcesses:
    """The processes that have failed since the rank began to wait, from one look to the next."""

    def __init__(self) -> None:
        self._running: dict[int, Any] = {}
        self._known: frozenset[int] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin anew: the rank has moved."""
        self._failed, self._since, self._codes = 0, monotonic(), set[int]()
        self._has_succeeded = False
        self._known, self._running = None, {}

    def look(self) -> None:
        """Count the processes that have ended since the last look; takes some microseconds."""
        running = _running()
        if self._known is None:  # those that may work, of which it is known for how long they have not
            self._known = frozenset(running)
        for pid, process in self._running.items():
            code = _exit_code(process) if pid not in running else None
            if code is not None:
                self._failed += code != 0
                self._has_succeeded |= code == 0
                self._codes.add(code)
        self._running = running

    def words(self) -> str:
        """:data:`FAILING` with the number that have failed, if that are enough and none has succeeded; else empty."""
        if self._failed < LEAST_FAILED or self._has_succeeded:
            return ""
        code = f", with exit code {next(iter(self._codes))}" if len(self._codes) == 1 else ""
        return f"{FAILING} ({self._failed} of them{code})"

    @property
    def seconds(self) -> float:
        """Seconds since the rank began to wait."""
        return round(monotonic() - self._since, 3)

    def without_progress(self, children: Iterable[ChildProcess]) -> tuple[ChildProcess, ...]:
        """Return the children, with those that replaced a failed one as still as long as the rank has waited.

        For :meth:`words` that are not empty. A child that has ended since it was read is one of them.
        """
        still = self.seconds
        replacements = {*self._running, *_running()} - (self._known or frozenset())
        return tuple(
            msgspec.structs.replace(one, still=still) if one.pid in replacements or _is_gone(one.pid) else one
            for one in children
        )


def _is_gone(pid: int) -> bool:
    return not Path("/proc", str(pid)).exists()


def _running() -> dict[int, Any]:
    """The processes that this one has started and not waited for, by pid."""
    found: dict[int, Any] = {}
    for name in _MODULES:
        children = getattr(sys.modules.get(name), "_children", None)
        for process in list(children)[:MOST] if isinstance(children, set) else ():
            pid = getattr(getattr(process, "_popen", None), "pid", None)
            if isinstance(pid, int):
                found[pid] = process
    return found


def _exit_code(process: Any) -> int | None:
    code = getattr(getattr(process, "_popen", None), "returncode", None)
    return code if isinstance(code, int) else None

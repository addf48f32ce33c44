"""Child processes of collectors: each in a session of its own, and none outlives the doctor."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence

_CHILDREN: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def start_child(
    command: Sequence[str],
    *,
    stderr: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` with its output on a pipe and nothing to read. It is killed, with whatever it started, when
    this interpreter ends before it does. ``OSError`` where it can't be started."""
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    _CHILDREN.add(child)
    return child


def abandon_child(child: subprocess.Popen[bytes]) -> None:
    """Kill without waiting for long: a process inside a call of a driver or a dead mount does not end before the call
    returns, and what it started may keep its pipes open."""
    _kill(child)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=0.2)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _kill(child: subprocess.Popen[bytes]) -> None:
    # Not polled: until it is waited for, its number is its group's, even where only its own children are left.
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


@atexit.register
def _end_all() -> None:
    for child in list(_CHILDREN):
        _kill(child)

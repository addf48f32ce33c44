"""Child processes of collectors: each in a session of its own, and none outlives the doctor."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import msgspec

from doctor.core.import_path import cleaned_path, working_directory

_INTERPRETER = """
import sys
first, directory, module = 4 + int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path[:], arguments = sys.argv[4:first], sys.argv[first:]
del sys.argv[1:]
import contextlib, importlib, os
with contextlib.suppress(OSError):
    os.chdir(directory)
importlib.import_module(module).main(*arguments)
"""
"""Sets the import path before anything else is imported."""

CRASHES = frozenset(signal.Signals) - {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
"""Signals that show why a process ended: of its own fault, of the kernel where memory, CPU time or the size of a file
runs out, of a timer, or of somebody who means this process alone; launchers and users send the others to all."""
KILLS = CRASHES | {signal.SIGTERM}
"""The same with the signal that also ends single processes, if others outlive it."""
GRACE = 1.0
"""Seconds that the end of the interpreter waits for a child that is just being started by a collector's thread."""


class ChildOwner(msgspec.Struct, frozen=True):
    """The user and group that a child runs as."""

    uid: int
    gid: int


class _ChildRegistry:
    """The children that may still run. Starting one can block (a program on a dead mount), so no lock is held then."""

    def __init__(self) -> None:
        self._children: WeakSet[subprocess.Popen[bytes]] = WeakSet()
        self._changed = threading.Condition()
        self._starting = 0
        self._closed = False
        self._owner = 0

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a child that :meth:`close` will know of."""
        with self._changed:
            if self._closed:
                raise OSError("this interpreter is ending")
            self._starting += 1
            self._owner = os.getpid()
        try:
            child = subprocess.Popen(list(command), stdout=subprocess.PIPE, start_new_session=True, **options)
            self._children.add(child)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()
        return child

    def close(self) -> None:
        """Kill all that run; no more are started. A fork of this process that ends has none of its own to end."""
        if self._owner != os.getpid():
            return
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._starting, timeout=GRACE)
        for child in list(self._children):
            _kill(child)


_CHILDREN = _ChildRegistry()
atexit.register(_CHILDREN.close)


def start_child(
    command: Sequence[str],
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    owner: ChildOwner | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` with its output on a pipe and, by default, nothing to read. It is killed, with whatever it
    started, when this interpreter ends before it does. ``OSError`` where it can't be started.

    ``owner``: run it as this user, without further groups; the kernel then clears its capabilities
    (capabilities(7)). Only root may do that.
    """
    options: dict[str, Any] = {}
    if owner is not None:
        options = {"user": owner.uid, "group": owner.gid, "extra_groups": []}
    return _CHILDREN.start(command, stdin=stdin, stderr=stderr, env=env, cwd=cwd, **options)


def start_python(
    module: str,
    arguments: Sequence[str] = (),
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with the import path of this process and call ``main(*arguments)`` of ``module`` in it;
    the rest as :func:`start_child`.

    It starts in the root directory and changes to ``cwd`` (default: the working directory) once its path is set. Until
    then an interpreter looks for modules in its working directory (``-c``, an empty entry of PYTHONPATH), where anybody
    may have put a ``json.py``. Python 3.10 has no ``-P``; ``-I`` would ignore PYTHONHOME and sitecustomize.
    """
    path = cleaned_path()
    command = [sys.executable, "-c", _INTERPRETER, str(len(path)), cwd or working_directory() or "/", module, *path]
    return start_child([*command, *arguments], stdin=stdin, stderr=stderr, env=env, cwd="/")


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

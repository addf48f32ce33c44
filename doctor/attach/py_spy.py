"""Finds py-spy and runs ``py-spy dump`` on a process, with a deadline and a limit on the pause of the process.

py-spy reads the interpreter's structures in the memory of the process (https://github.com/benfred/py-spy). By default
it stops all threads by ptrace(2) meanwhile, so the stacks are consistent. Otherwise (``--nonblocking``) it only reads
memory: a stack that changes meanwhile may mix frames of several calls; a stack that stands is read correctly.
"""

from __future__ import annotations

import os
import selectors
import stat
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

from doctor.attach.stop_guard import continue_if_left_stopped, stop_state
from doctor.core.process import ChildOwner, abandon_child, start_child

NAME = "py-spy"
SECONDS = 3.0
"""Deadline of one read, in seconds."""
NATIVE_SECONDS = 5.0
"""Deadline of one read with native frames, in seconds."""
MOST_PAUSE = 0.04
"""Seconds after which a read that keeps its target stopped is ended; the target runs again a few milliseconds later."""
MOST_NATIVE_PAUSE = 2.0
"""The same with native frames: py-spy reads the unwind tables of libtorch meanwhile, which takes about a second."""
MOST_OUTPUT = 16 << 20
"""Maximum bytes that py-spy may write: 1000 frames in each of 60 threads take 15 MB."""
_MOST_MESSAGE = 1 << 16
_TICK = 0.002
"""Seconds between two looks at the state of a target that py-spy may have stopped."""
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "RUST_BACKTRACE": "0"}


class DumpRequest(NamedTuple):
    """What py-spy is to read. ``started``: the start time of the process; ``owner``: the user that py-spy runs as;
    ``blocking``: it may stop the process; ``seconds``: its deadline."""

    pid: int
    started: float | None
    blocking: bool = True
    native: bool = False
    locals: bool = False
    owner: ChildOwner | None = None
    seconds: float = SECONDS

    @property
    def most_pause(self) -> float:
        """The seconds for which the process may be stopped."""
        return MOST_NATIVE_PAUSE if self.native else MOST_PAUSE


class DumpOutput(NamedTuple):
    """What py-spy wrote. ``paused``: seconds for which the process was seen stopped. ``stopped_by``: why the read was
    ended: ``deadline``, ``pause`` or ``size``; ``continued``: the process had been left stopped, and runs again."""

    document: bytes
    message: str
    status: int | None
    paused: float = 0.0
    stopped_by: str = ""
    continued: bool = False


def find_py_spy() -> Path | None:
    """Return the py-spy of this interpreter's installation, else the first trusted one on PATH.

    A trusted entry is absolute, and it and the program in it belong to root or this user and are not writable by
    others.
    """
    beside = Path(sysconfig.get_path("scripts")) / NAME
    if os.access(beside, os.X_OK):
        return beside
    entries = (Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep))
    for folder in entries:
        if folder.is_absolute() and _is_trusted(folder) and _is_trusted(folder / NAME, stat.S_IXUSR):
            return folder / NAME
    return None


def _is_trusted(path: Path, mode: int = 0) -> bool:
    try:
        seen = path.stat()
    except OSError:
        return False
    own = seen.st_uid in (0, os.geteuid())
    return own and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and seen.st_mode & mode == mode


def run_dump(program: Path, request: DumpRequest) -> DumpOutput:
    """Run py-spy on a process; it is killed at its deadline, and the process is not left stopped.

    Raises:
        OSError: py-spy cannot be started.
    """
    before = stop_state(request.pid)
    command = _command(program, request)
    child = start_child(command, stderr=subprocess.PIPE, env=_ENVIRONMENT, cwd="/", owner=request.owner)
    try:
        output = _Collection(child, request).collect()
    finally:
        abandon_child(child)
    if output.status == 0:
        return output
    continued = continue_if_left_stopped(request.pid, request.started, before)
    return output._replace(continued=continued)


def _command(program: Path, request: DumpRequest) -> list[str]:
    command = [str(program), "dump", "--pid", str(request.pid), "--json", "--full-filenames"]
    wanted = {"--nonblocking": not request.blocking, "--native": request.native, "--locals": request.locals}
    return [*command, *(option for option, is_wanted in wanted.items() if is_wanted)]


class _Collection:
    """Reads the output of a child until it ends, or until one of its limits is reached."""

    def __init__(self, child: subprocess.Popen[bytes], request: DumpRequest) -> None:
        self._child = child
        self._request = request
        self._until = time.monotonic() + request.seconds
        self._parts: dict[int, list[bytes]] = {}
        self._size = 0
        self._first_stopped: float | None = None
        self._paused = 0.0

    def collect(self) -> DumpOutput:
        """Return what the child wrote."""
        reason = self._read()
        status = None if reason else self._wait()
        document, message = (b"".join(parts) for parts in self._parts.values())
        return DumpOutput(
            document,
            message[:_MOST_MESSAGE].decode("utf-8", "replace"),
            status,
            self._paused,
            reason or ("" if status is not None else "deadline"),
        )

    def _read(self) -> str:
        """Read both pipes to their ends; return why it was ended before."""
        with selectors.DefaultSelector() as selector:
            for pipe in (self._child.stdout, self._child.stderr):
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
                    selector.register(pipe, selectors.EVENT_READ)
                    self._parts[pipe.fileno()] = []
            while selector.get_map():
                for key, _ in selector.select(self._patience()):
                    if not self._take(key.fd):
                        selector.unregister(key.fileobj)
                if reason := self._limit():
                    return reason
        return ""

    def _patience(self) -> float:
        left = max(0.0, self._until - time.monotonic())
        return min(_TICK, left) if self._request.blocking else left

    def _take(self, descriptor: int) -> bool:
        part = os.read(descriptor, 1 << 16)
        self._size += len(part)
        self._parts[descriptor].append(part)
        return bool(part)

    def _limit(self) -> str:
        """Return the limit that is reached, if any."""
        if self._size > MOST_OUTPUT:
            return "size"
        if self._request.blocking and self._pause() > self._request.most_pause:
            return "pause"
        return "deadline" if time.monotonic() >= self._until else ""

    def _pause(self) -> float:
        """Return for how many seconds the process has been stopped until now; 0 if it runs."""
        state = stop_state(self._request.pid)
        now = time.monotonic()
        if state is None or state.letter != "t":
            self._first_stopped = None
            return 0.0
        if self._first_stopped is None:
            self._first_stopped = now
        self._paused = max(self._paused, now - self._first_stopped)
        return now - self._first_stopped

    def _wait(self) -> int | None:
        try:
            return self._child.wait(timeout=max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

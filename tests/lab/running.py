"""Processes that are started together, have so much time together, and leave nothing behind when it is over."""

from __future__ import annotations

import select
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from tests.lab.needs import clean_environ
from tests.lab.speed import patience

if TYPE_CHECKING:
    from tests.lab.hosts import LabHost

MARK = "LAB_RUN"
"""The variable by which the processes of a run are known, whoever their parents are and wherever they run."""
READY_WITHIN = patience(30.0)
"""Seconds in which a process is ready."""
GONE_WITHIN = patience(10.0)
"""Seconds in which a process that was told to end does, or is killed."""


@dataclass(frozen=True)
class _Started:
    """One command. What it writes goes to files: they can't fill up as pipes do, and nothing can hold them open."""

    argv: list[str]
    process: subprocess.Popen[str]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def result(self) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(self.argv, self.process.wait(), _text(self.stdout), _text(self.stderr))


class Run:
    """Commands on lab hosts with ``timeout`` seconds together, as a context manager that ends what is left of them."""

    def __init__(self, timeout: float) -> None:
        self._until = time.monotonic() + timeout
        self._mark = uuid.uuid4().hex
        self._files = ExitStack()
        self._started: list[_Started] = []
        self.results: list[subprocess.CompletedProcess[str]] = []
        """What each of them did; there when the context ends."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with self._files:
            if any(started.process.poll() is None for started in self._started):
                self._kill()
            self.results = [started.result() for started in self._started]

    def start(
        self, host: LabHost, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> None:
        """Start ``argv`` on ``host``."""
        given, stdout, stderr = self._file(), self._file(), self._file()
        given.write(stdin.encode())
        given.seek(0)
        process = host.start(argv, env={**(env or {}), MARK: self._mark}, stdin=given, stdout=stdout, stderr=stderr)
        self._started.append(_Started([*map(str, argv)], process, stdout, stderr))

    def wait(self) -> bool:
        """Whether all of them ended in time."""
        try:
            for started in self._started:
                started.process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _file(self) -> IO[bytes]:
        return self._files.enter_context(tempfile.TemporaryFile())

    def _kill(self) -> None:
        until = time.monotonic() + GONE_WITHIN
        while (left := self._left()) and time.monotonic() < until:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            for started in self._started:
                wake(started.process)
            time.sleep(0.01)
        for started in self._started:
            wait_or_kill(started.process)

    def _left(self) -> list[psutil.Process]:
        """What bears the mark on any host, and what descends from the commands and has changed its environment; not
        the processes outside that wait for the commands."""
        waiting = {started.process.pid for started in self._started}
        offspring = {child.pid for pid in waiting for child in _offspring(pid)}
        return [
            process
            for process in psutil.process_iter()
            if process.pid not in waiting and (process.pid in offspring or environ_of(process).get(MARK) == self._mark)
        ]


class Held:
    """A process that says one line when it is ready, lasts until its standard input closes, and so ends however this
    one does. It runs in ``folder``, which gets its ``log``."""

    def __init__(self, argv: Sequence[str], folder: Path, log: str, env: Mapping[str, str] | None = None) -> None:
        self._argv = argv
        self._log = folder / log
        with self._log.open("wb") as stderr:
            self._process = subprocess.Popen(
                argv,
                env={**clean_environ(folder), **(env or {})},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        wait_or_kill(self._process)

    def ready(self) -> str:
        """The line, waited for; to be asked for once."""
        line = first_line(self._process)
        assert line, f"{self._argv} did not start: {self._log.read_text(errors='replace')}"
        return line

    def release(self) -> None:
        """Let it end, without waiting for that."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def first_line(process: subprocess.Popen[str]) -> str:
    """The line by which ``process`` says that it is ready; empty where it does not in time."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_WITHIN)
    return process.stdout.readline().strip() if readable else ""


def wake(process: subprocess.Popen[str]) -> None:
    """Let nsenter(1) notice the end of the process that it waits for: it stops along with it."""
    process.send_signal(signal.SIGCONT)


def wait_for_stop(process: psutil.Process) -> None:
    """Until every thread of ``process`` stands still, to which SIGSTOP was sent: each of them has to come to it, and on
    a busy machine goes on for a while."""
    until = time.monotonic() + READY_WITHIN
    while any(state not in "TtZX" for state in _states(process.pid)):
        assert time.monotonic() < until, f"{process} does not stop"
        time.sleep(0.005)


def _states(pid: int) -> list[str]:
    """Of its threads, in the letters of proc(5)."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def wait_or_kill(process: subprocess.Popen[str]) -> None:
    """Wait for a process that ought to end now."""
    wake(process)
    try:
        process.wait(GONE_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(GONE_WITHIN)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a command by the process that waits for it, with its offspring."""
    for child in _offspring(process.pid):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    wait_or_kill(process)


def environ_of(process: psutil.Process) -> dict[str, str]:
    """The environment that ``process`` was started with; nothing where it has just ended."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _offspring(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")

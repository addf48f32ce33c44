"""Distributes work to forked processes with a deadline per piece; a piece that hangs or crashes is lost alone."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PER_PROCESS = 12
"""Pieces per process: with fewer, its start costs more than it saves."""
_THRESHOLDS = (20_000, 20, 50)
"""Of the garbage collector: syntax trees have many objects, and few that only it can free."""
_JOIN_TIMEOUT = 1.0
"""Seconds to wait for a killed child."""
_MOST_WAITED = 10.0
"""A piece is lost after so many deadlines, however long its process waited for a processor."""
_RESOLUTION = 0.05
"""Seconds that are too short to wait again, and the share of a deadline after which a waiting process is seen again."""


class ProcessorDeadline:
    """A time limit for a process, which does not count the time for which it was ready to run and no processor was
    free: a busy machine loses no piece."""

    def __init__(self, process: int, seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._since = time.monotonic()
        self._start = _scheduled(process)

    def left(self) -> float:
        """Return the seconds until it is over, as far as that is known now; 0 if it is over."""
        busy, waited = (now - before for now, before in zip(_scheduled(self._process), self._start, strict=True))
        last = self._since + self._seconds * _MOST_WAITED - time.monotonic()
        left = self._since + self._seconds + waited - time.monotonic()
        if left < _RESOLUTION and busy < self._seconds and _is_ready(self._process):
            left = _RESOLUTION * self._seconds  # the wait that it is in is counted when it ends
        return left if min(left, last) > 0 else 0.0


def _scheduled(process: int) -> tuple[float, float]:
    """Return the seconds for which a process ran, and was ready to run and did not (proc_pid_schedstat, in ns:
    Documentation/scheduler/sched-stats.rst); 0 where the kernel does not count."""
    try:
        fields = Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()
        return int(fields[0]) / 1e9, int(fields[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0


def _is_ready(process: int) -> bool:
    """Return whether another process is ready to run."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return process != os.getpid() and stat.rpartition(")")[2].split()[:1] == ["R"]


@dataclass
class _PoolWorker:
    process: int
    pipe: Connection
    piece: int | None = None
    until: float = 0.0
    deadline: ProcessorDeadline | None = None


def map_in_workers(
    pieces: Sequence[T],
    work: Callable[[T], R],
    lost: Callable[[T, str], R],
    *,
    deadline: float,
    most: int | None = None,
) -> list[R]:
    """The results of ``work`` for each piece, in order. ``lost``: the result of a piece that failed, from the reason.

    Children are forked, so ``work`` may be any function; without fork everything runs in this process.
    """
    if not hasattr(os, "fork"):
        return [work(piece) for piece in pieces]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(most or cores or 1, 1 + len(pieces) // PER_PROCESS)
    return _WorkerPool(pieces, work, lost, deadline).run(count) if pieces else []


class _WorkerPool(Generic[T, R]):
    def __init__(
        self, pieces: Sequence[T], work: Callable[[T], R], lost: Callable[[T, str], R], deadline: float
    ) -> None:
        self._pieces = pieces
        self._work = work
        self._lost = lost
        self._deadline = deadline
        self._next = 0
        self._done: dict[int, R] = {}
        self._workers: list[_PoolWorker] = []

    def run(self, count: int) -> list[R]:
        try:
            for _ in range(count):
                self._start()
            while len(self._done) < len(self._pieces):
                self._receive()
                now = time.monotonic()
                for worker in [one for one in self._workers if one.piece is not None and one.until <= now]:
                    if left := worker.deadline.left() if worker.deadline is not None else 0.0:
                        worker.until = now + left
                    else:
                        self._replace(worker, f"it took longer than {self._deadline:g} s")
        finally:
            for worker in self._workers:
                self._end(worker)
        return [self._done[number] for number in range(len(self._pieces))]

    def _start(self) -> None:
        here, there = Pipe()
        process = os.fork()
        if process == 0:
            try:
                self._serve(there, here)
            finally:
                os._exit(0)  # do not flush or close anything of the parent
        there.close()
        worker = _PoolWorker(process, here)
        self._workers.append(worker)
        self._assign(worker)

    def _serve(self, pipe: Connection, other_end: Connection) -> None:
        """Run in the child: process pieces until the parent closes the pipe."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        gc.enable()
        for one in (other_end, *(worker.pipe for worker in self._workers)):
            one.close()
        with contextlib.suppress(EOFError, OSError):
            while True:
                pipe.send(self._work(self._pieces[pipe.recv()]))

    def _assign(self, worker: _PoolWorker) -> None:
        if self._next >= len(self._pieces):
            worker.piece = None
            return
        worker.piece, worker.until = self._next, time.monotonic() + self._deadline
        worker.deadline = ProcessorDeadline(worker.process, self._deadline)
        self._next += 1
        worker.pipe.send(worker.piece)

    def _receive(self) -> None:
        busy = {worker.pipe: worker for worker in self._workers if worker.piece is not None}
        timeout = min(worker.until for worker in busy.values()) - time.monotonic()
        for pipe in wait(list(busy), max(timeout, 0.0)):
            worker = busy[pipe]  # type: ignore[index]
            try:
                outcome = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace(worker, "it broke the process that looked at it")
                continue
            if worker.piece is not None:
                self._done[worker.piece] = outcome
            self._assign(worker)

    def _replace(self, worker: _PoolWorker, why: str) -> None:
        self._workers.remove(worker)
        self._end(worker)
        if worker.piece is not None:
            self._done[worker.piece] = self._lost(self._pieces[worker.piece], why)
        if self._next < len(self._pieces):
            self._start()

    def _end(self, worker: _PoolWorker) -> None:
        """A child that cannot be killed (its file server is gone) is abandoned."""
        worker.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process, signal.SIGKILL)
        until = time.monotonic() + _JOIN_TIMEOUT
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(worker.process, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.001)

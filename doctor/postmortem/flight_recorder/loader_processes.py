"""Loading of dumps in worker processes, each with limits of memory and time.

A worker names each file before it opens it, so that a worker killed by its limits costs only that file; another worker
continues with the rest. Workers are forked. If this process has other threads, whose locks a fork could inherit locked,
a fresh interpreter forks them instead. If no process can be started, the files are loaded in this one.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.facts import HiddenField, RecorderFacts
from doctor.core.stack_dumps.recorder_dump import parse_recorder
from doctor.postmortem.flight_recorder.unpickling import load_values
from doctor.postmortem.sandbox.child_process import limit_memory, limit_resource, parse_isolated, send_answer

LARGEST = 128 << 20
"""Maximum size of a dump in bytes: a hundred times that of 2,000 entries, torch's default."""
MEMORY = 2 << 30
"""Bytes that a worker may use beyond its initial size."""
SECONDS = 20
"""Processor time for one file; the largest allowed file takes a quarter."""
PATIENCE = 90.0
"""Seconds without a message after which a worker is killed: a file server does not respond."""
PARALLEL = 4 << 20
"""Bytes of all files from which a second worker is worth its start."""
BATCH = 16
"""Dumps that a worker sends at once: what ranks have in common, above all stacks, is then pickled once."""
MANY, FEW = 200, 64
"""Newest entries kept of each dump, in a job of up to 64 ranks and in a larger one."""
PATHS_PER_CALL = 256
"""Files passed to one fresh interpreter: Linux bounds the size of one argument, which holds a path, to 128 KiB."""

Outcome = RecorderFacts | str
"""The content of a file, or the reason why it is skipped."""


class LoadLimits(NamedTuple):
    """Maximum number of ``entries`` kept of each file, and of ``seconds`` of processor time."""

    entries: int
    seconds: int


def load_files(paths: Sequence[Path], jobs: int = 2) -> list[Outcome]:
    """Load the files, in their order, in up to ``jobs`` processes at a time."""
    limits = LoadLimits(MANY if len(paths) <= 64 else FEW, SECONDS)
    if not paths or _fork_context() is not None:
        return _load_here(paths, jobs, limits)
    shares = [paths[start : start + PATHS_PER_CALL] for start in range(0, len(paths), PATHS_PER_CALL)]
    return [outcome for share in shares for outcome in _load_isolated(share, jobs, limits)]


def _load_isolated(paths: Sequence[Path], jobs: int, limits: LoadLimits) -> list[Outcome]:
    arguments = [str(argument) for argument in (jobs, *limits, *paths)]
    try:
        return parse_isolated(__name__, arguments, PATIENCE + limits.seconds * len(paths), list[Outcome])
    except OSError:
        return _load_here(paths, jobs, limits)
    except UnusableError as error:
        return [str(error)] * len(paths)


def main(jobs: str, entries: str, seconds: str, *paths: str) -> None:
    """Answer :func:`load_files` from a fresh interpreter, whose only thread can fork."""
    send_answer(_load_here([Path(path) for path in paths], int(jobs), LoadLimits(int(entries), int(seconds))))


def _load_here(paths: Sequence[Path], jobs: int, limits: LoadLimits) -> list[Outcome]:
    """Load the files in workers, or in this process if no worker could be started."""
    found: dict[int, Outcome] = {}
    context = _fork_context()
    if context is not None and paths:
        with contextlib.suppress(OSError):
            _load_in_workers(context, paths, _shares(paths, jobs), limits, found)
    with _limited_memory():
        found.update({index: _load(path, limits) for index, path in enumerate(paths) if index not in found})
    return [found[index] for index in range(len(paths))]


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the memory of this process as that of a worker. Its time is not limited."""
    try:
        import resource
    except ImportError:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(MEMORY)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _fork_context() -> BaseContext | None:
    """Return the context that forks; ``None`` beside other threads, where a fork may deadlock."""
    if "fork" not in multiprocessing.get_all_start_methods() or threading.active_count() > 1:
        return None
    return None if multiprocessing.current_process().daemon else multiprocessing.get_context("fork")


def _shares(paths: Sequence[Path], jobs: int) -> list[list[int]]:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    workers = max(1, min(jobs, len(paths))) if total > PARALLEL else 1
    return [list(range(start, len(paths), workers)) for start in range(workers)]


# In the parent.


class _LoaderProcess:
    """A worker. ``left``: files without an outcome; ``current``: the file that it loads."""

    def __init__(self, context: Any, paths: Sequence[Path], share: Sequence[int], limits: LoadLimits) -> None:
        self.left = list(share)
        self.current = share[0]
        self.last_message = time.monotonic()
        self.connection, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=_work, args=(theirs, paths, tuple(share), limits), name="doctor-dumps", daemon=True
        )
        try:
            self.process.start()
        finally:
            theirs.close()

    def receive(self, found: dict[int, Outcome]) -> bool:
        """Process one message; return whether more are expected."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return False
        self.last_message = time.monotonic()
        if isinstance(message, int):
            self.current = message
            return True
        found.update(message)
        self.left = [index for index in self.left if index not in message]
        return bool(self.left)

    def end(self) -> None:
        """Kill the process."""
        self.connection.close()
        self.process.kill()
        self.process.join(1.0)


def _load_in_workers(
    context: BaseContext,
    paths: Sequence[Path],
    shares: Sequence[Sequence[int]],
    limits: LoadLimits,
    found: dict[int, Outcome],
) -> None:
    workers = [_LoaderProcess(context, paths, share, limits) for share in shares]
    try:
        while workers:
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                if worker.connection in ready:
                    continues = worker.receive(found)
                else:
                    continues = time.monotonic() - worker.last_message < PATIENCE
                if continues:
                    continue
                workers.remove(worker)
                worker.end()
                if worker.left:
                    size = f"{limits.seconds} s or {MEMORY >> 30} GiB"
                    found[worker.current] = f"it takes more than {size} to load: it is damaged or hostile"
                if rest := [index for index in worker.left if index != worker.current]:
                    workers.append(_LoaderProcess(context, paths, rest, limits))
    finally:
        for worker in workers:
            worker.end()


# In a worker.


def _work(connection: Connection, paths: Sequence[Path], share: Sequence[int], limits: LoadLimits) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the parent reports how this process ended
    gc.disable()
    limit_memory(MEMORY)
    batch: dict[int, Outcome] = {}
    for index in share:
        connection.send(index)
        with contextlib.suppress(ImportError):
            import resource

            limit_resource(resource.RLIMIT_CORE, 0)
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit_resource(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + limits.seconds)
        batch[index] = _load(paths[index], limits)
        if len(batch) == BATCH:
            connection.send(batch)
            batch = {}
    if batch:
        connection.send(batch)
    connection.close()


def _load(path: Path, limits: LoadLimits) -> Outcome:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            return f"it has {size >> 20} MiB, and no dump has more than {LARGEST >> 20}"
        loaded = load_values(path.read_bytes())
        facts = parse_recorder(loaded.values, limits.entries)
    except OSError as error:
        return f"it can't be read: {error.strerror or type(error).__name__}"
    except MemoryError:
        return "there is not memory enough to load it"
    except UnusableError as error:
        return str(error)
    if loaded.breaks_off is None:
        return facts
    hidden = HiddenField("collectives", f"the dump breaks off after {loaded.breaks_off} bytes")
    return msgspec.structs.replace(facts, hidden=(hidden,))

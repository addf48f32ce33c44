"""Loading dumps in processes of their own, each with a limit of memory and time.

A worker says which file it is about before it opens it, so that one that is ended by its limits costs that file alone:
the rest goes to the next worker. Workers are forks; where this process has threads, which a fork could leave with
their locks held, a fresh interpreter starts them. Where no process can be started, the files are loaded here, one after
the other.
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
from typing import Any

import msgspec

from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.facts import HiddenField, RecorderFacts
from doctor.core.recorder_dump import parse_recorder
from doctor.postmortem.flight_recorder.unpickling import load_values
from doctor.postmortem.sandbox.child_process import run_isolated

LARGEST = 128 << 20
"""Bytes of a dump: a hundred times what 2,000 entries take, torch's default."""
MEMORY = 2 << 30
"""Bytes that a worker may take beyond what it began with."""
SECONDS = 20
"""Of processor time for one file; the largest allowed takes a quarter."""
PATIENCE = 90.0
"""Seconds without a word from a worker after which it is given up: a file server does not answer."""
PARALLEL = 4 << 20
"""Bytes of all files from which a second worker is worth its start."""
BATCH = 16
"""Dumps that a worker sends at once: what ranks have in common, stacks above all, then travels once."""
MANY, FEW = 200, 64
"""Newest entries of each dump that are kept, in a job of up to 64 ranks and in a larger one."""

Outcome = RecorderFacts | str
"""What a file holds, or why it is passed over."""


ASKED = 256
"""Files that a fresh interpreter is asked about: their paths stand in one argument, which Linux bounds to 128 KiB."""


def load_files(paths: Sequence[Path], jobs: int = 2) -> list[Outcome]:
    """What each of the files holds, in their order."""
    most = MANY if len(paths) <= 64 else FEW
    if not paths or _context() is not None:
        return load_here(paths, jobs, most)
    shares = [paths[start : start + ASKED] for start in range(0, len(paths), ASKED)]
    return [outcome for share in shares for outcome in _load_apart(share, jobs, most)]


def _load_apart(paths: Sequence[Path], jobs: int, most: int) -> list[Outcome]:
    """As :func:`load_here`, in a fresh interpreter."""
    arguments = (most, jobs, SECONDS, *paths)
    try:
        answer, code = run_isolated(
            "doctor.postmortem.flight_recorder.dump_child", [*map(str, arguments)], PATIENCE + SECONDS * len(paths)
        )
    except OSError:
        return load_here(paths, jobs, most)
    except UnusableError as error:
        return [str(error)] * len(paths)
    try:
        return msgspec.json.decode(answer, type=prepared(list[Outcome]))
    except msgspec.MsgspecError:
        return [f"the process that read it ended with {code} and no answer"] * len(paths)


def load_here(paths: Sequence[Path], jobs: int, most: int) -> list[Outcome]:
    """What each of the files holds, by workers of this process. ``most``: entries of each that are kept."""
    found: dict[int, Outcome] = {}
    context = _context()
    if context is not None and paths:
        with contextlib.suppress(OSError):
            _in_workers(context, paths, _shares(paths, jobs), most, found)
    with _limited_memory():
        found.update({index: _load(path, most) for index, path in enumerate(paths) if index not in found})
    return [found[index] for index in range(len(paths))]


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """The workers' limit of memory for this process, for a while. Nothing here ends a file that takes for ever."""
    try:
        import resource
    except ImportError:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    _limit_memory()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _context() -> BaseContext | None:
    """A way to start processes that costs milliseconds, or ``None``: a fork beside other threads may hang."""
    if "fork" not in multiprocessing.get_all_start_methods() or threading.active_count() > 1:
        return None
    return None if multiprocessing.current_process().daemon else multiprocessing.get_context("fork")


def _shares(paths: Sequence[Path], jobs: int) -> list[list[int]]:
    """The files of each worker, by number."""
    workers = max(1, min(jobs, len(paths))) if _size(paths) > PARALLEL else 1
    return [list(range(start, len(paths), workers)) for start in range(workers)]


def _size(paths: Sequence[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


# Here.


class _LoaderProcess:
    """A process that loads files, as it is seen from outside. ``left``: files it has not answered for."""

    def __init__(self, context: Any, paths: Sequence[Path], share: Sequence[int], most: int) -> None:
        self.left = list(share)
        self.about = share[0]
        self.heard = time.monotonic()
        self.connection, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(
            target=_work, args=(theirs, paths, tuple(share), most), name="doctor-dumps", daemon=True
        )
        try:
            self.process.start()
        finally:
            theirs.close()

    def hear(self, found: dict[int, Outcome]) -> bool:
        """Take what it says; whether it goes on."""
        try:
            word = self.connection.recv()
        except (EOFError, OSError):
            return False
        self.heard = time.monotonic()
        if isinstance(word, int):
            self.about = word
            return True
        found.update(word)
        self.left = [index for index in self.left if index not in word]
        return bool(self.left)

    def end(self) -> None:
        """Whatever it does, it is over."""
        self.connection.close()
        self.process.kill()
        self.process.join(1.0)


def _in_workers(
    context: BaseContext, paths: Sequence[Path], shares: Sequence[Sequence[int]], most: int, found: dict[int, Outcome]
) -> None:
    workers = [_LoaderProcess(context, paths, share, most) for share in shares]
    try:
        while workers:
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                if worker.connection in ready:
                    goes_on = worker.hear(found)
                else:
                    goes_on = time.monotonic() - worker.heard < PATIENCE
                if not goes_on:
                    workers.remove(worker)
                    workers += _successor(context, paths, worker, most, found)
    finally:
        for worker in workers:
            worker.end()


def _successor(
    context: BaseContext, paths: Sequence[Path], worker: _LoaderProcess, most: int, found: dict[int, Outcome]
) -> Iterator[_LoaderProcess]:
    """Who goes on where a worker was ended by the file that it was about."""
    worker.end()
    if not worker.left:
        return
    found[worker.about] = f"it takes more than {SECONDS} s or {MEMORY >> 30} GiB to load: it is damaged or hostile"
    if rest := [index for index in worker.left if index != worker.about]:
        yield _LoaderProcess(context, paths, rest, most)


# There.


def _work(connection: Connection, paths: Sequence[Path], share: Sequence[int], most: int) -> None:
    # Whatever becomes of it, the one who started it says so.
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    gc.disable()
    _limit_memory()
    batch: dict[int, Outcome] = {}
    for index in share:
        connection.send(index)
        _limit_time()
        batch[index] = _load(paths[index], most)
        if len(batch) == BATCH:
            connection.send(batch)
            batch = {}
    if batch:
        connection.send(batch)
    connection.close()


def _limit_memory() -> None:
    try:
        import resource

        with open("/proc/self/statm", "rb") as stream:  # noqa: PTH123 - a path object is not worth its import here
            begun = int(stream.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return
    _limit(resource.RLIMIT_AS, begun + MEMORY)


def _limit_time() -> None:
    try:
        import resource
    except ImportError:
        return
    _limit(resource.RLIMIT_CORE, 0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + SECONDS)


def _limit(kind: int, value: int) -> None:
    """Set a soft limit; of processor time, which is counted from the start, to more than the one of the file before."""
    import resource

    soft, hard = resource.getrlimit(kind)
    bounds = (hard,) if kind == resource.RLIMIT_CPU else (soft, hard)
    wanted = min([value, *(bound for bound in bounds if bound != resource.RLIM_INFINITY)])
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (wanted, hard))


def _load(path: Path, most: int) -> Outcome:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            return f"it has {size >> 20} MiB, and no dump has more than {LARGEST >> 20}"
        loaded = load_values(path.read_bytes())
        facts = parse_recorder(loaded.values, most)
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

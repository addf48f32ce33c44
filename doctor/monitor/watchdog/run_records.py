"""The record of a rank: a file for ``doctor diagnose``.

It exists before anything can end the process.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.store import DeadlineWorker
from doctor.core.capture import EARLIER, PAGE, REPORT, encode_document, parse_capture, same_run, to_record
from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.files.open_folder import OpenFolder
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import UntrustedPath
from doctor.core.job import Member, build_job
from doctor.core.text import lazy_compile
from doctor.monitor.watchdog.decision import WriteLine
from doctor.monitor.watchdog.store_discovery import KEY

T = TypeVar("T")

EVERY = 60.0
"""Seconds between two writes of a record while nothing happens."""
PATIENCE, TRIES = 3.0, 4
"""Seconds for the file system, and how often it may exceed them before it is not used any more: each time leaves a
blocked thread behind."""
DUMP_PATIENCE = 1.0
"""Seconds for writing a dump: the evaluating rank waits for a stalled rank."""
DUMPS = "flight-recorder"
LARGEST = 64 << 20
"""Maximum bytes read of a file in the folder: a record holds its rank, and ranks that did not answer it."""
RECORD = lazy_compile(r"rank-\d{1,10}\.json", re.ASCII)
MOST_RECORDERS = 64
"""Maximum number of dump folders that are examined; a process has two recorders."""


class RunRecords:
    """The records of one run in a directory."""

    def __init__(self, directory: Path | OwnFolder, rank: int, world_size: int, write_line: WriteLine) -> None:
        self._folder = OwnFolder.of(directory)
        self._rank = rank
        self._world_size = world_size
        self._write_line = write_line
        self._worker = DeadlineWorker()
        self._tries = TRIES
        self._reported = False
        self._began = False

    def move_others(self, run: str) -> None:
        """Move records of an earlier run whose ranks have not moved them themselves.

        Not to be called at once, because those ranks may be about to.
        """

        def move() -> None:
            with contextlib.suppress(FileNotFoundError):
                with self._folder.opened() as source:
                    names = sorted(filter(RECORD.fullmatch, source.names()))
                for name in names:
                    with contextlib.suppress(UntrustedPath):  # another user's file stays where it is
                        self._move(name, unless=run)

        self._run_with_deadline(move)

    def _move_own(self, run: str) -> None:
        """Move the record of an earlier run of this rank, and on rank 0 its report, to ``earlier``."""
        earlier = self._move(_name(self._rank))
        if self._rank == 0:
            self._move(REPORT, unless=run, otherwise=earlier)

    def _move(self, name: str, *, unless: str | None = None, otherwise: str = "") -> str:
        """Move a file below ``earlier``, unless it belongs to ``unless``: a record with dumps, a report with its page.

        Returns the run id in the file, or ``otherwise`` if it has none.
        """
        with contextlib.suppress(FileNotFoundError), self._folder.opened() as source:
            run = _run_of(source, name) or otherwise
            if unless is None or not same_run(run, unless):
                subfolder = run or _date_of(source, name)
                self._move_to_earlier((), name, subfolder)
                if name == REPORT:
                    self._move_to_earlier((), PAGE, subfolder)
                dump = name.removesuffix(".json").replace("-", "_")
                recorders: list[str] = []
                with contextlib.suppress(FileNotFoundError), self._folder.opened(DUMPS) as dumps:
                    recorders = dumps.names()[:MOST_RECORDERS]
                for recorder in recorders:
                    with contextlib.suppress(FileNotFoundError):
                        self._move_to_earlier((DUMPS, recorder), dump, subfolder)
            return run
        return ""

    def _move_to_earlier(self, folders: tuple[str, ...], name: str, subfolder: str) -> None:
        """Move a file in ``folders`` to the same relative path below ``earlier``."""
        with self._folder.opened(*folders) as source:
            if source.look(name) is None:
                return
            with self._folder.opened(EARLIER, subfolder, *folders, create=True) as target:
                path = Path(name)
                numbered = (path.with_stem(f"{path.stem}.{number}").name for number in range(1, 1 << 20))
                source.move(name, target, next(n for n in itertools.chain((name,), numbered) if target.look(n) is None))

    def write(self, members: Iterable[Member], run: str) -> bool:
        """Write this rank's record, with its observations of others; return whether it succeeded.

        The first time, the record of an earlier run is moved out of the way.
        """
        if not self._began:
            self._began = True
            self._run_with_deadline(partial(self._move_own, run))
        document = to_record(build_job(members, world_size=self._world_size), run)
        return self._written(partial(self._folder.write, _name(self._rank), encode_document(document)))

    def write_dumps(self, dumps: Mapping[str, bytes]) -> str | None:
        """Write this rank's recorder dumps after its record; return the path of the last one.

        Each recorder has a folder with one file ``rank_<rank>`` per rank and nothing else: ``torchfrtrace`` accepts it,
        and :mod:`torch.distributed.flight_recorder` derives ranks from what follows the common prefix of the names.
        """
        name = f"rank_{self._rank}"
        written = [
            recorder
            for recorder, data in dumps.items()
            if self._written(partial(self._write_dump, recorder, name, data), DUMP_PATIENCE)
        ]
        if not written:
            return None
        return os.fsencode(self._folder.path.absolute() / DUMPS / written[-1] / name).decode("utf-8", "replace")

    def _write_dump(self, recorder: str, name: str, data: bytes) -> None:
        """Write a dump by way of a draft in another folder, which is not taken for a dump."""
        draft = f".rank-{self._rank}.dump"
        self._folder.write(draft, data)
        with self._folder.opened() as source, self._folder.opened(DUMPS, recorder, create=True) as target:
            source.move(draft, target, name)

    def read(self, rank: int, run: str) -> Member | None:
        """Return another rank of this run from its record; ``None`` if there is none."""
        with contextlib.suppress(UnusableError):
            data = self._run_with_deadline(lambda: self._folder.read(_name(rank), LARGEST), quietly=True)
            capture = parse_capture(data, _name(rank)) if data is not None else None
            if capture is not None and capture.run is not None and same_run(capture.run, run):
                return next((member for member in capture.members if member.rank == rank), None)
        return None

    def remove_empty_folder(self) -> None:
        """Remove the hidden folder of the store once no other run uses it."""
        self._run_with_deadline(lambda: FileStoreBackend(self._folder, KEY).tidy(), quietly=True)

    def close(self) -> None:
        """Release the worker thread."""
        self._worker.close()

    def _written(self, write: Callable[[], None], patience: float | None = None) -> bool:
        def work() -> bool:
            write()
            return True

        return bool(self._run_with_deadline(work, patience=patience))

    def _run_with_deadline(
        self, work: Callable[[], T], *, quietly: bool = False, patience: float | None = None
    ) -> T | None:
        if not self._tries:
            return None
        try:
            return self._worker.run(work, patience or PATIENCE)
        except TimeoutError:
            reason = "the file system does not respond"
            self._tries -= 1
            self._worker = DeadlineWorker()
        except OSError as error:
            reason = error.strerror or str(error)
            quietly = quietly or self._reported or not self._folder.is_news(error)
        if not self._reported and not quietly:
            self._reported = True
            self._write_line(f"rank {self._rank} cannot write its record to {self._folder.path}: {reason}")
        return None


class _RecordHead(msgspec.Struct):
    run: object = None


def _name(rank: int) -> str:
    return f"rank-{rank}.json"


def _run_of(source: OpenFolder, name: str) -> str:
    """Return the run id in a file; empty if it has none that is a valid file name."""
    try:
        run = msgspec.json.decode(source.read(name, LARGEST, whole=False), type=prepared(_RecordHead)).run
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""
    return run if isinstance(run, str) and re.fullmatch(r"[0-9a-z-]{1,64}", run) else ""


def _date_of(source: OpenFolder, name: str) -> str:
    seen = source.look(name)
    moment = datetime.datetime.fromtimestamp(seen.st_mtime if seen else 0.0, datetime.timezone.utc)
    return moment.strftime("%Y%m%dT%H%M%SZ")

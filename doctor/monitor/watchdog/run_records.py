"""The record of a rank: a file that ``doctor diagnose`` reads, there before anything can end the process."""

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

from doctor.cluster.transport.store import DeadlineWorker
from doctor.core.capture import EARLIER, REPORT, encode_document, parse_capture, same_run, to_record
from doctor.core.errors import UnusableError
from doctor.core.files.open_folder import OpenFolder
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import UntrustedPath
from doctor.core.job import Member, build_job
from doctor.monitor.watchdog.decision import WriteLine
from doctor.monitor.watchdog.store_discovery import remove_if_empty

T = TypeVar("T")

EVERY = 60.0
"""Seconds between two times that a record is written while nothing happens."""
PATIENCE, TRIES = 3.0, 4
"""Seconds for the file system, and how often it may take longer before it is asked no more: each time leaves a thread
behind."""
DUMP_PATIENCE = 1.0
"""Seconds for a dump: a rank that stands still is waited for by those who judge."""
DUMPS = "flight-recorder"
LARGEST = 64 << 20
"""Bytes of a file in the folder that are read: a record holds its rank, and those that did not answer it."""
RECORD = re.compile(r"rank-\d{1,10}\.json", re.ASCII)
MOST_RECORDERS = 64
"""Folders of dumps that are looked through; a process has two recorders."""


class RunRecords:
    """Of one run in a directory. ``run``: its id, once it is known."""

    def __init__(self, directory: Path | OwnFolder, rank: int, world_size: int, tell: WriteLine) -> None:
        self._folder = OwnFolder.of(directory)
        self._rank = rank
        self._world_size = world_size
        self._tell = tell
        self._worker = DeadlineWorker()
        self._tries = TRIES
        self._told = False
        self._began = False

    def move_others(self, run: str) -> None:
        """Move what an earlier run left of ranks that have not done so themselves. Not to be called at once: they may
        be about to."""

        def move() -> None:
            with contextlib.suppress(FileNotFoundError):
                with self._folder.opened() as here:
                    names = sorted(filter(RECORD.fullmatch, here.names()))
                for name in names:
                    with contextlib.suppress(UntrustedPath):  # another user's file stays where it is
                        self._move(name, unless=run)

        self._do(move)

    def _move_own(self, run: str) -> None:
        """Move what an earlier run left of this rank out of the way, and its report where this is rank 0."""

        def move() -> None:
            earlier = self._move(_name(self._rank))
            if self._rank == 0:
                self._move(REPORT, unless=run, otherwise=earlier)

        self._do(move)

    def _move(self, name: str, *, unless: str | None = None, otherwise: str = "") -> str:
        """Move a file to a free name below ``earlier``, unless it is of that run; a record with the dumps of its rank.
        Returns the id of the run that it is of, as far as it says one; ``otherwise``: where it says none."""
        with contextlib.suppress(FileNotFoundError), self._folder.opened() as here:
            run = _run_of(here, name) or otherwise
            if unless is None or not same_run(run, unless):
                place = run or _date_of(here, name)
                self._carry((), name, place)
                dump = name.removesuffix(".json").replace("-", "_")
                for recorder in self._recorders():
                    with contextlib.suppress(FileNotFoundError):
                        self._carry((DUMPS, recorder), dump, place)
            return run
        return ""

    def _recorders(self) -> list[str]:
        """The folders that hold dumps."""
        with contextlib.suppress(FileNotFoundError), self._folder.opened(DUMPS) as dumps:
            return dumps.names()[:MOST_RECORDERS]
        return []

    def _carry(self, folders: tuple[str, ...], name: str, place: str) -> None:
        """Move a file that lies in ``folders`` to the same place below ``earlier``."""
        with self._folder.opened(*folders) as here:
            if here.look(name) is None:
                return
            with self._folder.opened(EARLIER, place, *folders, create=True) as there:
                here.move(name, there, _free(there, name))

    def write(self, members: Iterable[Member], run: str) -> bool:
        """Write the record of this rank, and what it saw of others; whether that could be done. The first time, that of
        an earlier run is moved out of the way."""
        if not self._began:
            self._began = True
            self._move_own(run)
        document = to_record(build_job(members, world_size=self._world_size), run)
        return self._written(partial(self._folder.write, _name(self._rank), encode_document(document)))

    def write_dumps(self, dumps: Mapping[str, bytes]) -> str | None:
        """Write what recorders of this rank answered, after its record; the path of the last one that was written.

        Each recorder has a folder, with a file ``rank_<rank>`` of each rank and nothing else: so ``torchfrtrace`` takes
        it, and :mod:`torch.distributed.flight_recorder` finds ranks by what stands after the prefix that all names
        share.
        """
        names = {name: f"{DUMPS}/{name}/rank_{self._rank}" for name in dumps}
        written = [
            name
            for key, name in names.items()
            if self._written(partial(self._write_dump, name, dumps[key]), DUMP_PATIENCE)
        ]
        if not written:
            return None
        return os.fsencode(self._folder.path.absolute() / written[-1]).decode("utf-8", "replace")

    def _write_dump(self, name: str, data: bytes) -> None:
        """A draft beside the dumps would be taken for one of them."""
        draft = f".rank-{self._rank}.dump"
        self._folder.write(draft, data)
        *folders, last = name.split("/")
        with self._folder.opened() as here, self._folder.opened(*folders, create=True) as there:
            here.move(draft, there, last)

    def read(self, rank: int, run: str) -> Member | None:
        """What another rank of this run has in its record; ``None`` where there is none to be seen."""
        with contextlib.suppress(UnusableError):
            data = self._do(lambda: self._folder.read(_name(rank), LARGEST), quietly=True)
            capture = parse_capture(data, _name(rank)) if data is not None else None
            if capture is not None and capture.run is not None and same_run(capture.run, run):
                return next((member for member in capture.members if member.rank == rank), None)
        return None

    def tidy(self) -> None:
        """Remove the hidden folder of the board, once it is empty."""
        self._do(lambda: remove_if_empty(self._folder), quietly=True)

    def close(self) -> None:
        """Let go of the thread."""
        self._worker.close()

    def _written(self, write: Callable[[], None], patience: float | None = None) -> bool:
        def work() -> bool:
            write()
            return True

        return bool(self._do(work, patience=patience))

    def _do(self, work: Callable[[], T], *, quietly: bool = False, patience: float | None = None) -> T | None:
        if not self._tries:
            return None
        try:
            return self._worker.run(work, patience or PATIENCE)
        except TimeoutError:
            why = "the file system does not answer"
            self._tries -= 1
            self._worker = DeadlineWorker()
        except OSError as error:
            why = error.strerror or str(error)
            quietly = quietly or self._told or not self._folder.is_news(error)
        if not self._told and not quietly:
            self._told = True
            self._tell(f"rank {self._rank} can't keep its record in {self._folder.path}: {why}")
        return None


class _RecordHead(msgspec.Struct):
    run: object = None


def _name(rank: int) -> str:
    return f"rank-{rank}.json"


def _run_of(here: OpenFolder, name: str) -> str:
    """The id of the run that a file is of; empty where it says none that can be a file name."""
    try:
        run = msgspec.json.decode(here.read(name, LARGEST, whole=False), type=_RecordHead).run
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""
    return run if isinstance(run, str) and re.fullmatch(r"[0-9a-z-]{1,64}", run) else ""


def _date_of(here: OpenFolder, name: str) -> str:
    seen = here.look(name)
    moment = datetime.datetime.fromtimestamp(seen.st_mtime if seen else 0.0, datetime.timezone.utc)
    return moment.strftime("%Y%m%dT%H%M%SZ")


def _free(there: OpenFolder, name: str) -> str:
    """The name itself, or one like it that nothing has."""
    path = Path(name)
    others = (path.with_stem(f"{path.stem}.{number}").name for number in range(1, 1 << 20))
    return next(other for other in itertools.chain((name,), others) if there.look(other) is None)

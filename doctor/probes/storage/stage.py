"""Stage of the storage: can the directories of the job be written, how fast, and do all hosts share them?"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from doctor.analysis.storage_speed import slow_storage, visibility_tests
from doctor.core.decoding import prepared
from doctor.core.facts import Directory, StorageFacts, StorageSpeedFacts
from doctor.core.job import Job
from doctor.core.text import counted
from doctor.probes.authorization import require_own_directory
from doctor.probes.base import ProbeContext, ProbeParticipant, Stage, StageOrders, StagePlan, StageResult
from doctor.probes.runtime.cost_text import in_bytes, in_seconds
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.storage.file_probe import COMMAND, MOST_BYTES, ProbeDirectory, WrittenFile, read_files

ROLES = ("checkpoint", "flight-recorder", "nccl-debug")
"""Directories that the job writes to. Caches and temporary folders are local to each host."""
SHARED = ("checkpoint",)
"""Those that all hosts have to share."""
LEAST_BYTES = 1 << 20
ALL_BYTES = 2 << 30
"""Of all hosts together in one directory: a second of a good file system."""
RESERVE = 64 << 20
"""Bytes that are left free: a directory with less counts as full."""
MOST_PLACES = 4
"""Directories of one host."""
MOST_ASKED = 32
"""Files of one order: those of all neighbors of a host that were not seen, in each directory."""
MOST_MISSED = 8
"""Files that were not seen, for which a second read is useful: with more, the directory is not shared."""
WRITE_SECONDS = 20.0
READ_SECONDS = 15.0
CLEAR_SECONDS = 5.0
USUAL_HOSTS = 3
"""Hosts without suspects that write again along with those that were slow."""


class StorageOrder(msgspec.Struct, frozen=True):
    """Write files, and keep them if ``hold``; read those of others; or remove those that are kept."""

    act: Literal["write", "read", "clear"]
    places: Annotated[tuple[ProbeDirectory, ...], Meta(max_length=MOST_ASKED)] = ()
    hold: bool = False


class StorageStage(Stage):
    """Stage of the storage (:class:`doctor.probes.base.Stage`).

    One process of each host writes a file into each directory; each reads the file of the next host in the same path;
    then all files are removed, and slow hosts write again.
    """

    name = "storage"
    makes = (StorageSpeedFacts,)

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """``command`` starts a child of :mod:`doctor.probes.storage.file_child`."""
        self._command = command
        self.most_seconds = 2 * (WRITE_SECONDS + READ_SECONDS) + CLEAR_SECONDS
        self._word = secrets.token_hex(4)
        self._places: dict[int, tuple[ProbeDirectory, ...]] = {}
        self._held: list[WrittenFile] = []

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Write, read, read again, remove, write again: the orders of each step that has any."""
        reading = (self._plan_reading, self._plan_reading_again)
        for plan in (self._plan_writing, *reading, self._plan_clearing, self._plan_again):
            if orders := plan(job, [process for process in processes if process.speaks]):
                job, processes = yield orders

    def _plan_writing(self, job: Job, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
        folders = {process.host: folders for process in processes if (folders := _folders(process))}
        self._places = {
            process.host: places
            for process in processes
            if (places := _places(process, folders.get(process.host, ()), len(folders), self._word))
        }
        if not self._places:
            return None
        largest = max(place.size for places in self._places.values() for place in places)
        paths = {place.path for places in self._places.values() for place in places}
        words = (
            f"{-(-largest >> 20)} MiB from {_each(len(self._places))} written to {', '.join(sorted(paths)[:4])}"
            " and removed again"
        )
        return _orders(processes, "write", self._places, words, WRITE_SECONDS, hold=True)

    def _plan_reading(self, job: Job, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
        """Read along a ring of the hosts that wrote to the same path."""
        pairs = []
        for path in self._shared_paths():
            ring = [host for host, _ in self._written(job, path)]
            pairs += [(host, writer, path) for host, writer in zip(ring, ring[1:] + ring[:1], strict=True)]
        return self._to_read(processes, pairs, "what others wrote")

    def _plan_reading_again(self, job: Job, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
        """Read again if one host did not see the file of another, with the neighbors of both in the ring.

        That shows whether the reader or the writer is at fault.
        """
        pairs = []
        for path in self._shared_paths():
            ring = [host for host, _ in self._written(job, path)]
            missed = [look for look in visibility_tests(job, path) if not look.seen]
            for one in missed if len(missed) <= MOST_MISSED and len(ring) > 2 else ():
                after, before = (ring[(ring.index(one.writer) + 1) % len(ring)], ring[ring.index(one.reader) - 1])
                pairs += [(after, one.writer, path), (one.reader, before, path)]
        return self._to_read(processes, pairs, "what was not seen, and what its neighbors wrote")

    def _shared_paths(self) -> dict[str, None]:
        places = (place for places in self._places.values() for place in places)
        return dict.fromkeys(place.path for place in places if place.role in SHARED)

    def _to_read(
        self, processes: Sequence[ProbeParticipant], pairs: Iterable[tuple[int, int, str]], what: str
    ) -> StageOrders | None:
        """``pairs``: reader, writer, and path."""
        names = {process.host: process.rank.host.name for process in processes}
        tasks: dict[int, tuple[ProbeDirectory, ...]] = {}
        for reader, writer, path in dict.fromkeys(pairs):
            wrote = next(place for place in self._places[writer] if place.path == path)
            if reader != writer:
                addressed = replace(wrote, writer=names.get(writer, ""))
                tasks[reader] = (*tasks.get(reader, ()), addressed)
        return _orders(processes, "read", tasks, f"{what}, read by {counted(len(tasks), 'host')}", READ_SECONDS)

    def _written(self, job: Job, path: str) -> Iterable[tuple[int, ProbeDirectory]]:
        for local in job.by_host():
            facts = local.find(StorageSpeedFacts)
            whole = {trial.path for trial in facts.trials if trial.error is None} if facts else set()
            for place in self._places.get(local.hosts[0].index, ()):
                if place.path == path and path in whole:
                    yield local.hosts[0].index, place

    def _plan_clearing(self, job: Job, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
        words = f"what {counted(len(self._places), 'host')} wrote is removed"
        return _orders(processes, "clear", dict.fromkeys(self._places, ()), words, CLEAR_SECONDS)

    def _plan_again(self, job: Job, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
        """Write again on hosts that were slow somewhere, and on a few others."""
        tasks: dict[int, tuple[ProbeDirectory, ...]] = {}
        for slow in slow_storage(job):
            usual = [host for host, _ in self._written(job, slow.path) if host not in slow.places][:USUAL_HOSTS]
            for host in (*slow.places, *usual):
                again = [place for place in self._places.get(host, ()) if place.path == slow.path]
                renamed = (replace(place, name=f"{place.name}-2") for place in again)
                tasks[host] = (*tasks.get(host, ()), *renamed)
        words = f"what was slow once more, from {_each(len(tasks))}"
        return _orders(processes, "write", tasks, words, WRITE_SECONDS)

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Write, read or remove, in children."""
        asked = msgspec.msgpack.decode(order, type=prepared(StorageOrder))
        for place in asked.places:
            require_own_directory(place.path, place.role, place.name, context.machine)
        if asked.act == "write":
            return self._write(asked, deadline)
        if asked.act == "read":
            readings = read_files(asked.places, deadline, self._command)
            return StageResult({StorageSpeedFacts.key: StorageSpeedFacts(readings=tuple(readings))})
        self._clear(deadline)
        return StageResult({})

    def _write(self, asked: StorageOrder, deadline: ProbeDeadline) -> StageResult:
        files = [WrittenFile(place, deadline.left(), self._command) for place in asked.places]
        trials = [file.trial(deadline) for file in files]
        self._held += files
        if not asked.hold:
            self._clear(deadline)
        return StageResult({StorageSpeedFacts.key: StorageSpeedFacts(trials=tuple(trials))})

    def _clear(self, deadline: ProbeDeadline) -> None:
        while self._held:
            self._held.pop().remove(deadline)


def _folders(process: ProbeParticipant) -> list[Directory]:
    """Return the directories of a host that exist and may be written, each path once."""
    storage = process.rank.find(StorageFacts)
    found = {
        folder.path: folder
        for folder in reversed(storage.directories if storage else ())
        if folder.role in ROLES and folder.exists and folder.writable
    }
    return list(found.values())[::-1][:MOST_PLACES]


def _places(
    process: ProbeParticipant, folders: Sequence[Directory], hosts: int, word: str
) -> tuple[ProbeDirectory, ...]:
    """Return what a host writes, if there is room for the files of all hosts."""
    size = max(LEAST_BYTES, min(MOST_BYTES, ALL_BYTES // max(1, hosts)))
    name = f".rankdoctor-probe-{word}-{process.host}-{re.sub(r'[^A-Za-z0-9.-]', '_', process.rank.host.name)[:64]}"
    return tuple(
        ProbeDirectory(folder.path, folder.role, name, size)
        for folder in folders
        if folder.free is None or folder.free >= size * hosts + RESERVE
    )


def _each(hosts: int) -> str:
    return "1 host" if hosts == 1 else f"each of {hosts} hosts"


def _orders(
    processes: Sequence[ProbeParticipant],
    act: Literal["write", "read", "clear"],
    places: Mapping[int, tuple[ProbeDirectory, ...]],
    words: str,
    seconds: float,
    *,
    hold: bool = False,
) -> StageOrders | None:
    """Return the orders of the hosts with ``places``. Files are written or read each by a child, at the same time."""
    asked = {process.token: places[process.host] for process in processes if process.host in places}
    files = [place.size for own in asked.values() for place in own]
    costs = "all at once, at most"
    if files:
        costs = f"{counted(len(files), 'file')} at once, at most {in_bytes(sum(files))} in all and"
    orders = {token: StorageOrder(act, own, hold) for token, own in asked.items()}
    return StageOrders.of(orders, seconds, f"storage: {words}, {costs} {in_seconds(seconds)}") if orders else None

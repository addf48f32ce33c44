"""Directories that the job writes to, and left-over locks in its caches. Nothing is written to find out."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import msgspec

from doctor.collectors.base import Machine, collector
from doctor.collectors.storage.bounded_scan import COMMAND, LIMIT, DirectoryQuery, DirectoryResult, scan_directories
from doctor.collectors.storage.build_locks import BATON, read_locks
from doctor.collectors.storage.mounts import local_path, read_mounts
from doctor.core.facts import Directory, StorageFacts

TRAINER = "trainer"
"""Source of a directory that a run creates on its first write."""


class NamedDirectory(msgspec.Struct, frozen=True):
    """A directory, its role, and what names it. ``lock_kind``: kind of the locks that are searched for there."""

    path: str
    role: str
    source: str
    lock_kind: str | None = None


@collector(StorageFacts, deadline=6.0)
def collect_storage(machine: Machine) -> StorageFacts:
    """Collect the directories in the environment and the user's settings, and the caches that exist."""
    return read_storage(machine)


def read_storage(machine: Machine, command: Sequence[str] = COMMAND, limit: float = LIMIT) -> StorageFacts:
    """Do the same with another child process and limit for file systems that may not answer."""
    places = list(dict.fromkeys([*_named(machine), *_caches(machine)]))
    mounts = read_mounts(machine)
    queries = [DirectoryQuery(place.path, scan=place.lock_kind is not None) for place in places]
    seen = scan_directories(queries, mounts, command, limit)
    pairs = [(place, one) for place, one in zip(places, seen, strict=True) if _is_relevant(place, one)]
    locks = [
        lock
        for place, one in pairs
        if place.lock_kind is not None
        for lock in read_locks(machine, place.lock_kind, one.mount, one.record.get("locks") or ())
    ]
    return StorageFacts(
        directories=tuple(_directory(place, one) for place, one in pairs),
        locks=tuple({lock.path: lock for lock in locks}.values()),
    )


def _is_relevant(place: NamedDirectory, seen: DirectoryResult) -> bool:
    """Whether the job may use it: a cache that does not exist is created on demand, unless that is not possible."""
    is_absent = place.role == "cache" and seen.record.get("exists") is False
    return not is_absent or bool(place.source) or not seen.record.get("writable")


def directories_of(machine: Machine) -> set[tuple[str, str]]:
    """Return path and role of the directories that the environment and the settings name, without access to them."""
    return {(place.path, place.role) for place in _named(machine)}


def _named(machine: Machine) -> Iterator[NamedDirectory]:
    environ = machine.environ
    # torch writes <prefix><rank> (torch/csrc/distributed/c10d/FlightRecorder.cpp and ProcessGroupNCCL.cpp).
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if prefix := environ.get(variable):
            yield NamedDirectory(_parent(prefix), "flight-recorder", variable)
    if (log := environ.get("NCCL_DEBUG_FILE")) and not log.startswith("/dev/"):
        # NCCL replaces %h by the host's name and %p by the process id (src/debug.cc).
        name = log.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
        yield NamedDirectory(_parent(name), "nccl-debug", "NCCL_DEBUG_FILE")
    temporary = next((name for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), None)
    yield NamedDirectory(environ[temporary] if temporary else _DEFAULT_TEMPORARY, "temporary", temporary or "")
    for source, pairs in (("settings", machine.directories), (TRAINER, machine.outputs)):
        yield from (NamedDirectory(path, role, source) for role, url in pairs if (path := local_path(url)) is not None)


_DEFAULT_TEMPORARY = str(PurePosixPath("/", "tmp"))
"""First choice of tempfile of Python without a variable."""


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _caches(machine: Machine) -> Iterator[NamedDirectory]:
    """Yield caches by their variables or defaults, as torch, Triton and huggingface_hub name them."""
    environ = machine.environ
    home = environ.get("HOME")
    cache = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None)
    candidates = (
        ("TORCH_EXTENSIONS_DIR", cache, "torch_extensions", BATON),
        ("TORCHINDUCTOR_CACHE_DIR", None, "", "inductor"),
        ("TRITON_CACHE_DIR", environ.get("TRITON_HOME") or home, ".triton/cache", "triton"),
        ("HF_HOME", cache, "huggingface", "hub"),
        ("CUDA_CACHE_PATH", None, "", None),
    )
    for variable, base, default, kind in candidates:
        if named := environ.get(variable):
            yield NamedDirectory(named, "cache", variable, kind)
        elif base:
            yield NamedDirectory(f"{base}/{default}", "cache", "", kind)


def _directory(place: NamedDirectory, seen: DirectoryResult) -> Directory:
    record, mount = seen.record, seen.mount
    return Directory(
        path=place.path,
        role=place.role,
        source=place.source,
        exists=record.get("exists"),
        writable=record.get("writable"),
        total=record.get("total"),
        free=record.get("free"),
        free_inodes=record.get("free_inodes"),
        filesystem=mount.kind if mount else None,
        shared=mount.shared if mount else None,
        noexec=record.get("noexec"),
        error=record.get("error"),
    )

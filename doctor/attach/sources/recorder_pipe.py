"""Flight recorders that ranks write on request, where torch was set up for it.

If TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set, rank N with ProcessGroupNCCL creates the FIFO ``<its value>N.pipe``
(``DumpPipe`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp). The heartbeat monitor looks into it every
TORCH_NCCL_COORD_CHECK_MILSEC (1 s); if it holds a line, a thread writes the recorder to ``<TORCH_FR_DUMP_TEMP_FILE>N``
and training goes on (``DebugInfoWriter`` in FlightRecorder.cpp; before torch 2.9 TORCH_NCCL_DEBUG_INFO_TEMP_FILE).

The paths come from the environment of the process. So files are opened with the rights of its user, relative to a
folder that nobody else may change, never through a link, and only if they are of the expected kind and belong to that
user; a device is not opened, not even for a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from doctor.attach.refusals import credentials_of
from doctor.collectors.base import link_target
from doctor.collectors.host.local_processes import GONE, process_state
from doctor.core.background import BackgroundCall
from doctor.core.facts import AttachedProcess, RecorderFacts
from doctor.core.message_bounds import shortened
from doctor.core.process import ChildOwner
from doctor.postmortem.flight_recorder.loader_processes import load_files

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the path of a dump up to the rank."""
SECONDS = 4.0
"""Deadline of the dumps of all ranks, and of parsing them."""
LARGEST = 16 << 20
"""Maximum bytes of a dump; one of 2000 entries has about 1 MB."""
MOST_RANKS, MOST_NOTES = 64, 4
REQUEST = b"dump\n"
_TICK = 0.1
_TMP = "/tmp"  # noqa: S108 - torch's own default
_PROC = Path("/proc")


class DumpRefused(Exception):
    """Why a rank has no dump, as the end of a sentence."""


class DumpPaths(NamedTuple):
    """The FIFO of a rank, and where its dump may be."""

    pipe: PurePosixPath
    dumps: tuple[PurePosixPath, ...]


def dump_paths(rank: int, environ: Mapping[str, str]) -> DumpPaths | None:
    """Return the paths that an environment names; ``None`` if it names no FIFO."""
    stem = environ.get(PIPE)
    if not stem:
        return None
    prefixes = [environ[name] for name in PREFIXES if environ.get(name)]
    if not prefixes:
        home = f"{environ.get('HOME') or _TMP}/.cache"
        caches = dict.fromkeys((environ.get("XDG_CACHE_HOME") or home, home))
        prefixes = [f"{cache}/torch/{name}_trace_rank_" for cache in caches for name in ("comm_lib", "nccl")]
        prefixes.append(f"{_TMP}/nccl_trace_rank_")
    dumps = dict.fromkeys(PurePosixPath(f"{prefix}{rank}") for prefix in prefixes)
    return DumpPaths(PurePosixPath(f"{stem}{rank}.pipe"), tuple(dumps))


def read_recorders(
    ranks: Sequence[AttachedProcess], environs: Mapping[int, Mapping[str, str]], seconds: float = SECONDS
) -> tuple[tuple[AttachedProcess, ...], tuple[str, ...]]:
    """Return ``ranks`` with their flight recorders, and sentences for the user about those without one.

    ``environs``: their environments by PID; ``seconds``: that all dumps may take.
    """
    until = time.monotonic() + seconds
    refused: dict[int, str] = {}
    calls: dict[int, BackgroundCall[bytes]] = {}
    for rank in ranks[:MOST_RANKS]:
        paths = dump_paths(rank.rank, environs.get(rank.pid, {})) if rank.rank is not None else None
        if rank.ended:
            continue
        if paths is None or rank.guessed:
            refused[rank.pid] = "its number is guessed" if paths else f"{PIPE} is not set for it"
        else:
            request = _DumpRequest(rank.pid, rank.started, paths, until)
            calls[rank.pid] = BackgroundCall(request.answer)
    dumps: dict[int, bytes] = {}
    for pid, call in calls.items():
        try:
            dumps[pid] = call.result(max(0.0, until - time.monotonic()) + _TICK)
        except DumpRefused as why:
            refused[pid] = str(why)
        except TimeoutError:
            refused[pid] = "its files do not respond"
    loaded = _load(dumps, seconds)
    refused.update({pid: facts for pid, facts in loaded.items() if isinstance(facts, str)})
    return tuple(_with_recorder(rank, loaded.get(rank.pid)) for rank in ranks), _notes(ranks, refused)


def _with_recorder(rank: AttachedProcess, found: RecorderFacts | str | None) -> AttachedProcess:
    return msgspec.structs.replace(rank, recorder=found) if isinstance(found, RecorderFacts) else rank


def _notes(ranks: Sequence[AttachedProcess], refused: Mapping[int, str]) -> tuple[str, ...]:
    """One sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for rank in ranks:
        if rank.pid in refused:
            name = f"rank {rank.rank}" if rank.rank is not None else f"PID {rank.pid}"
            reasons.setdefault(refused[rank.pid], []).append(name)
    notes = (
        f"no flight recorder of {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}: {why}"
        for why, names in reasons.items()
    )
    return tuple(notes)[:MOST_NOTES]


def _load(dumps: Mapping[int, bytes], seconds: float) -> dict[int, RecorderFacts | str]:
    """Return the content of the dumps by PID, or why it is not known."""
    if not dumps:
        return {}

    def load() -> list[RecorderFacts | str]:
        with tempfile.TemporaryDirectory(prefix="doctor-attach-") as folder:
            paths = [Path(folder, f"rank_{number}") for number in range(len(dumps))]
            for path, dump in zip(paths, dumps.values(), strict=True):
                path.write_bytes(dump)
            return load_files(paths)

    try:
        return dict(zip(dumps, BackgroundCall(load).result(seconds), strict=True))
    except (TimeoutError, OSError) as error:
        why = "it takes too long to parse" if isinstance(error, TimeoutError) else f"{error.strerror or error}"
        return dict.fromkeys(dumps, why)


class _DumpRequest(NamedTuple):
    """Asks one rank for a dump, in a thread of its own. ``until``: deadline by :func:`time.monotonic`."""

    pid: int
    started: float
    paths: DumpPaths
    until: float

    def answer(self) -> bytes:
        """Return the dump that the rank writes now.

        Raises:
            DumpRefused: a file may not be used, or the rank writes none.
        """
        owner = _become_owner(self.pid)
        files = _OwnersFiles(self.pid, owner)
        before = [files.identity(path) for path in self.paths.dumps]
        with files.opened(self.paths.pipe, stat.S_ISFIFO, os.O_WRONLY | os.O_NONBLOCK) as pipe:
            if process_state(self.pid, self.started)[0] == GONE:
                raise DumpRefused("it ended")
            try:
                os.write(pipe, REQUEST)
            except OSError as error:
                raise DumpRefused(f"its FIFO cannot be written ({error.strerror})") from None
        last = list(before)
        while time.monotonic() + _TICK < self.until:
            time.sleep(_TICK)
            for number, path in enumerate(self.paths.dumps):
                now = files.identity(path)
                if now is not None and now == last[number] != before[number]:
                    return self._read(files, path)
                last[number] = now
        raise DumpRefused("it did not write one in time (TORCH_NCCL_DUMP_ON_TIMEOUT=0, or it looks too rarely)")

    def _read(self, files: _OwnersFiles, path: PurePosixPath) -> bytes:
        with files.opened(path, stat.S_ISREG, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
            parts: list[bytes] = []
            size = 0
            while part := os.read(descriptor, 1 << 20):
                parts.append(part)
                size += len(part)
                if size > LARGEST:
                    raise DumpRefused(f"its dump has more than {LARGEST >> 20} MiB")
            return b"".join(parts)


def _become_owner(pid: int) -> ChildOwner:
    """Let this thread open files with the rights of a process only, and return the user of that process.

    The identity for files is that of the thread (setfsuid(2)), and the capabilities of root for files go with it.

    Raises:
        DumpRefused: it is another user's, and this process is not root; or it is gone.
    """
    found = credentials_of(pid)
    if found is None or len(set(found.uids)) != 1:
        raise DumpRefused("it ended" if found is None else "it runs as two users")
    owner = ChildOwner(found.uids[0], found.gid)
    if owner.uid == os.geteuid():
        return owner
    if os.geteuid() != 0:
        raise DumpRefused("it belongs to another user")
    libc = ctypes.CDLL(None)
    libc.setfsgid.restype = libc.setfsuid.restype = ctypes.c_uint
    libc.setfsgid(ctypes.c_uint(owner.gid))
    libc.setfsuid(ctypes.c_uint(owner.uid))
    nobody = ctypes.c_uint(-1)  # not a valid user: returns the present one
    if (libc.setfsuid(nobody), libc.setfsgid(nobody)) != (owner.uid, owner.gid):
        raise DumpRefused("its user cannot be taken on")
    return owner


_Identity = tuple[int, int, int]


class _OwnersFiles:
    """The files of a process by the paths that it uses."""

    def __init__(self, pid: int, owner: ChildOwner) -> None:
        self._owner = owner
        own = link_target(_PROC / "self" / "ns" / "mnt")
        # In another mount namespace its paths begin at its root, with links of its own.
        self._root = "" if own == link_target(_PROC / str(pid) / "ns" / "mnt") else f"/proc/{pid}/root"
        self._home = f"/proc/{pid}/cwd"

    def identity(self, path: PurePosixPath) -> _Identity | None:
        """Return what changes if the file is written; ``None`` if there is none."""
        try:
            with self._folder(path) as folder:
                seen = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        except (OSError, DumpRefused):
            return None
        return seen.st_ino, seen.st_mtime_ns, seen.st_size

    @contextlib.contextmanager
    def opened(self, path: PurePosixPath, is_kind: Callable[[int], bool], flags: int) -> Iterator[int]:
        """Open a file, first as a place only, so that nothing else than the expected kind is opened.

        Raises:
            DumpRefused: it is missing, of another kind, or another user's; nothing reads a FIFO.
        """
        with self._folder(path) as folder, _closing(path, lambda: _open_place(path.name, folder)) as place:
            seen = os.fstat(place)
            if not is_kind(seen.st_mode) or seen.st_uid != self._owner.uid or seen.st_nlink != 1:
                raise DumpRefused(f"{_shown(path)} is not a file of its user, or not of the expected kind")
            with _closing(path, lambda: os.open(f"/proc/self/fd/{place}", flags | os.O_CLOEXEC)) as descriptor:
                yield descriptor

    @contextlib.contextmanager
    def _folder(self, path: PurePosixPath) -> Iterator[int]:
        if ".." in path.parts or len(str(path)) > os.pathconf("/", "PC_PATH_MAX"):
            raise DumpRefused("its path cannot be used")
        parent = f"{self._root}{path.parent}" if path.is_absolute() else f"{self._home}/{path.parent}"
        with _closing(path, lambda: os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
            seen = os.fstat(folder)
            is_shared = seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not seen.st_mode & stat.S_ISVTX
            if seen.st_uid not in (0, self._owner.uid) or is_shared:
                raise DumpRefused(f"other users may change {_shown(path.parent)}")
            yield folder


def _shown(path: PurePosixPath) -> str:
    return shortened(str(path), 200)


def _open_place(name: str, folder: int) -> int:
    return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


@contextlib.contextmanager
def _closing(path: PurePosixPath, opens: Callable[[], int]) -> Iterator[int]:
    try:
        descriptor = opens()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise DumpRefused(f"{_shown(path)} cannot be opened ({reason})") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)

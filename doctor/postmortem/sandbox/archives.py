"""Members of zip and tar archives, copied to files in a child process with limits.

Archives are hostile input. The names of members are shown and never used as paths; links, devices and encrypted members
are not read. Number, size, compression ratio, memory and time are bounded.
"""

from __future__ import annotations

import os
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.files.read_deadline import ReadDeadline
from doctor.postmortem.file_kinds import why_no_evidence
from doctor.postmortem.sandbox.child_process import limit_memory, parse_isolated, send_answer
from doctor.postmortem.sandbox.decompression import CHUNK, RATIO, UNSUSPECTED, ZIP, Unpacked

MOST_MEMBERS = 10_000
"""Maximum number of files of one archive."""
PATIENCE = 10.0
"""Further seconds for the start and the end of the child process."""
UNREADABLE = 200
"""Members without a readable one after which an archive in a folder is a data set."""
ROOM = 512 << 20
"""Bytes of memory of the child process."""
LONGEST_NAME = 500
_HEAD = 1 << 16


class ArchiveMember(NamedTuple):
    """A file in an archive. ``number``: of the copy; ``None`` if it was not copied because of ``why``."""

    name: str
    number: int | None
    why: str | None


class ArchiveContents(msgspec.Struct, frozen=True):
    """The members of an archive, and why it was not read to its end. ``size``: bytes of all copies."""

    members: tuple[ArchiveMember, ...]
    cut: str | None
    size: int


def copy_members(archive: Path, folder: Path, *, most: int, seconds: float, named: bool) -> ArchiveContents:
    """Copy the members that may be evidence to the files ``0``, ``1``... of ``folder``.

    Stops after ``most`` bytes or ``seconds``.

    ``named``: the archive was given by its own name, not found in a folder.

    Raises:
        UnusableError: it cannot be read, with the reason.
    """
    arguments = [os.fspath(archive), os.fspath(folder), str(most), str(seconds), str(int(named))]
    try:
        return parse_isolated(__name__, arguments, seconds + PATIENCE, ArchiveContents)
    except OSError as error:
        raise UnusableError(f"it can't be unpacked: {error.strerror or error}") from None


def main(path: str, folder: str, most: str, seconds: str, named: str) -> None:
    """Answer :func:`copy_members` from a fresh interpreter, with limited memory."""
    limit_memory(ROOM)
    with open(path, "rb") as stream:  # noqa: PTH123 - bytes of the name are kept
        send_answer(_Copies(Path(folder), int(most), float(seconds), patient=named == "1").of(stream))


class _LimitError(Exception):
    """A limit was reached; the message names it."""


class _Copies:
    def __init__(self, folder: Path, most: int, seconds: float, *, patient: bool) -> None:
        self._folder = folder
        self._most = most
        self._patient = patient
        self._deadline = ReadDeadline(time.monotonic() + seconds)
        self._members: list[ArchiveMember] = []
        self._size = self._copied = 0
        self._packed = 1

    def of(self, stream: IO[bytes]) -> ArchiveContents:
        """Copy the members of an open archive."""
        self._packed = max(os.fstat(stream.fileno()).st_size, 1)
        magic = stream.read(4)
        stream.seek(0)
        cut: str | None = None
        try:
            if magic in ZIP:
                self._zip(stream)
            else:
                cut = self._tar(stream)
        except _LimitError as error:
            cut = str(error)
        except MemoryError:
            cut = "unpacking it takes too much memory"
        except (OSError, EOFError, ValueError, KeyError, RuntimeError, tarfile.TarError, zipfile.BadZipFile) as error:
            cut = f"it is damaged: {error}"
        return ArchiveContents(tuple(self._members), cut, self._copied)

    def _zip(self, stream: IO[bytes]) -> None:
        with zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                kind = info.external_attr >> 28
                if info.is_dir():
                    continue
                if kind not in (0, 0o10):
                    self._skip(info.filename, "it is a link or a device")
                elif info.flag_bits & 1:
                    self._skip(info.filename, "it is encrypted")
                else:
                    self._open_zipped(archive, info)

    def _open_zipped(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        try:
            with archive.open(info) as member:
                self._copy(info.filename, member)
        except NotImplementedError as error:
            self._skip(info.filename, f"it can't be unpacked: {error}")

    def _tar(self, stream: IO[bytes]) -> str | None:
        unpacked = Unpacked(stream, self._packed, self._deadline)
        stream_of_tar: Any = _TarStream(unpacked)
        with tarfile.open(fileobj=stream_of_tar, mode="r|") as archive:
            for info in archive:
                if info.isreg() and (member := archive.extractfile(info)) is not None:
                    self._copy(info.name, member)
                elif not info.isdir():
                    self._skip(info.name, "it is a link or a device")
                archive.members.clear()  # type: ignore[attr-defined]
        return unpacked.cut

    def _skip(self, name: str, why: str) -> None:
        self._add(ArchiveMember(_shown(name), None, why))

    def _add(self, member: ArchiveMember) -> None:
        if len(self._members) >= MOST_MEMBERS:
            raise _LimitError(f"only its first {MOST_MEMBERS} members were read")
        self._members.append(member)
        if not self._patient and len(self._members) >= UNREADABLE and all(one.why for one in self._members):
            raise _LimitError(f"none of its first {UNREADABLE} members is evidence")

    def _copy(self, name: str, member: IO[bytes]) -> None:
        if _shown(name).rpartition("/")[2].startswith("."):
            return
        head = self._counted(member.read(_HEAD))
        why = why_no_evidence(_shown(name), head)
        if why is not None:
            self._skip(name, why)
            return
        number = len(self._members)
        self._add(ArchiveMember(_shown(name), number, None))
        with (self._folder / str(number)).open("xb") as copy:
            while head:
                if self._copied + len(head) > self._most:
                    raise _LimitError(f"its members have more than {self._most >> 20} MiB")
                copy.write(head)
                self._copied += len(head)
                head = self._counted(member.read(CHUNK))

    def _counted(self, data: bytes) -> bytes:
        self._size += len(data)
        if self._size > UNSUSPECTED and self._size > RATIO * self._packed:
            raise _LimitError(f"it unpacks to more than {self._size >> 20} MiB from {self._packed} bytes")
        if self._deadline.is_over:
            raise _LimitError(f"unpacking it took longer than {self._deadline.seconds:.3g} s")
        return data


class _TarStream:
    """The decompressed bytes of a file, as :mod:`tarfile` reads a stream."""

    def __init__(self, unpacked: Unpacked) -> None:
        self._pieces: Iterator[bytes] = iter(unpacked)
        self._rest = b""

    def read(self, most: int) -> bytes:
        """Return the next bytes; none at the end."""
        while not self._rest and (piece := next(self._pieces, None)) is not None:
            self._rest = piece
        data, self._rest = self._rest[:most], self._rest[most:]
        return data


def _shown(name: str) -> str:
    """Return the name of a member as a relative path without ``..``, in valid Unicode."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return os.fsencode("/".join(parts)[-LONGEST_NAME:]).decode("utf-8", "replace") or "member"

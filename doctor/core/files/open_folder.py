"""An open folder of the doctor, whose content is accessed through its descriptor, never by a path.

See :mod:`doctor.core.files.own_folder`, which opens it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from doctor.core.files.trusted_owners import TrustedOwners, UntrustedPath, group_in_words, user_in_words

MARK = ".made-by-rankdoctor"
"""Marker file in each private folder that the doctor created. Another folder of this user that was renamed into its
place does not contain it."""
MOST_NAMES = 1 << 17
"""Maximum number of names examined in a folder: twice as many as a mailbox has in a job of 65,536 ranks."""
TURNS = 3
"""Attempts to empty a folder in which other processes still create files."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags for opening a folder."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20


class OpenFolder:
    """An open folder. ``path`` is used only in messages; files are accessed through ``descriptor``."""

    def __init__(self, descriptor: int, path: Path, owners: TrustedOwners) -> None:
        self.path = path
        self.owners = owners
        self._descriptor = descriptor

    def look(self, name: str) -> os.stat_result | None:
        """The status of an entry, without following links; ``None`` if it does not exist."""
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self, *, hidden: bool = False) -> list[str]:
        """The names in the folder, with or without ``hidden`` ones.

        Raises:
            OSError: there are more than :data:`MOST_NAMES`.
        """
        with os.scandir(self._descriptor) as entries:
            names = [entry.name for entry in itertools.islice(entries, MOST_NAMES + 1)]
        if len(names) > MOST_NAMES:
            raise OSError(errno.E2BIG, f"more than {MOST_NAMES} names", str(self.path))
        return [name for name in names if hidden or not name.startswith(".")]

    def read(self, name: str, limit: int, *, whole: bool = True) -> bytes:
        """The content of a file, up to ``limit`` bytes. With ``whole``, a larger file is an error.

        Raises:
            FileNotFoundError: it does not exist.
            UntrustedPath: it is a link, not a regular file, another user's, or too large.
            OSError: it can't be read.
        """
        path = self.path / name
        try:
            file = os.open(name, _READ, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EACCES) and (seen := self.look(name)):
                self.owners.require_file(seen, path)
            raise about(error, path) from None
        try:
            seen = os.fstat(file)
            if stat.S_ISDIR(seen.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            self.owners.require_file(seen, path)
            data = _first_bytes(file, limit + whole) if seen.st_size <= limit or not whole else None
        finally:
            os.close(file)
        if data is None or len(data) > limit:
            raise UntrustedPath(f"{path} is larger than {limit} bytes")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file atomically.

        Raises:
            UntrustedPath: another user's file or a link has this name.
            OSError: it can't be written; the previous file is kept.
        """
        with self.draft(name) as stream:
            _write_all(stream.fileno(), data)

    @contextlib.contextmanager
    def draft(self, name: str) -> Iterator[FileIO]:
        """Yield a new file that takes its name after the block succeeds. It is the same file before and after."""
        aside, file = self._new()
        try:
            with FileIO(file, "wb") as stream:  # closed before the rename: NFS may report a full disk only then
                yield stream
                seen = os.fstat(file)
            self._require_replaceable(name, seen)
            os.rename(aside, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=self._descriptor)
            if isinstance(error, OSError) and not isinstance(error, UntrustedPath):
                raise about(error, self.path / name) from None
            raise

    def create(self, name: str, data: bytes = b"") -> bool:
        """Create a file together with its content unless it exists; return whether this process created it."""
        if not data:
            return self._create(name, data)
        aside, file = self._new()
        try:
            with FileIO(file, "wb"):
                _write_all(file, data)
            here = self._descriptor
            os.link(aside, name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links: a concurrent reader may see part of it
            return self._create(name, data)
        finally:
            os.unlink(aside, dir_fd=self._descriptor)
        return True

    def _create(self, name: str, data: bytes) -> bool:
        try:
            file = self._make(name)
        except FileExistsError:
            return False
        with FileIO(file, "wb"):
            _write_all(file, data)
        return True

    def sample(self) -> os.stat_result:
        """The status of a file created here by this process: its owner, and the time by the file server's clock, which
        sets the timestamps."""
        aside, file = self._new()
        try:
            return os.fstat(file)
        finally:
            os.close(file)
            os.unlink(aside, dir_fd=self._descriptor)

    def move(self, name: str, other: OpenFolder, as_name: str) -> None:
        """Move a file of ours into another folder, replacing a file of ours there.

        Raises:
            UntrustedPath: it is another user's, or not a regular file.
        """
        seen = self.look(name)
        if seen is not None:
            self.owners.require_file(seen, self.path / name)
            other._require_replaceable(as_name, seen)
        os.rename(name, as_name, src_dir_fd=self._descriptor, dst_dir_fd=other._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file of ours, or a folder of ours with the content that is ours. Other files are kept; links are
        not followed."""
        seen = self.look(name)
        if seen is None or not self.owners.trusts(seen):
            return
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(seen.st_mode):
                os.unlink(name, dir_fd=self._descriptor)
                return
            for _ in range(TURNS):
                with self.entered(name) as inner:
                    inner.empty()
                with contextlib.suppress(OSError):  # it contains something that is not ours or was just created
                    os.rmdir(name, dir_fd=self._descriptor)
                    return

    def empty(self) -> None:
        """Remove all content that is ours, including hidden files."""
        for name in self.names(hidden=True):
            self.remove(name)

    def discard(self, name: str) -> None:
        """Remove a folder that is empty or contains only the :data:`MARK`."""
        with contextlib.suppress(OSError), self.entered(name) as inner:
            if inner.names(hidden=True) == [MARK]:
                inner.remove(MARK)
            os.rmdir(name, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[OpenFolder]:
        """Open a folder of ours in this one."""
        descriptor = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=self._descriptor)
        try:
            self.owners.require_folder(os.fstat(descriptor), self.path / name, private=False)
            yield OpenFolder(descriptor, self.path / name, self.owners)
        finally:
            os.close(descriptor)

    def _new(self) -> tuple[str, int]:
        """Create a hidden file with a unique name; return its name and descriptor."""
        aside = f".{secrets.token_hex(8)}"
        return aside, self._make(aside)

    def _make(self, name: str) -> int:
        file = os.open(name, _NEW, 0o600, dir_fd=self._descriptor)
        try:
            give(file, self.owners.file_mode, self.owners)
        except OSError:
            os.close(file)
            os.unlink(name, dir_fd=self._descriptor)
            raise
        return file

    def _require_replaceable(self, name: str, ours: os.stat_result) -> None:
        """Require a replaceable file. ``ours``: a file that this process just created here, whose owner the server may
        have changed."""
        seen = self.look(name)
        if seen is None or stat.S_ISDIR(seen.st_mode):
            return  # a file can't replace a folder: the system call fails
        if not self.owners.trusts(seen) and seen.st_uid != ours.st_uid:
            if stat.S_ISREG(seen.st_mode):
                self.owners.require_file(seen, self.path / name)
            raise UntrustedPath(
                f"{self.path / name} is a link or special file of {user_in_words(seen.st_uid)}: remove it or use"
                " another folder"
            )


def give(file: int, mode: int, owners: TrustedOwners) -> None:
    """Give a new file or folder to the group, if one is configured.

    Raises:
        UntrustedPath: this process can't.
    """
    if owners.group is None:
        return
    with contextlib.suppress(OSError):  # a file system may not store modes; they are checked when it is opened
        if os.fstat(file).st_gid != owners.group:
            os.fchown(file, -1, owners.group)
        os.fchmod(file, mode)
    if os.fstat(file).st_gid != owners.group:
        raise UntrustedPath(
            f"{user_in_words(owners.uid)} can't give files to {group_in_words(owners.group)}, which {owners.option}"
            " names: run it as a member of the group, or set the group on the folder (chgrp, and chmod g+s)"
        )


def about(error: OSError, path: Path) -> OSError:
    """The error with the full path, which calls by descriptor do not know."""
    return error if isinstance(error, UntrustedPath) else type(error)(error.errno, error.strerror, str(path))


def _first_bytes(file: int, most: int) -> bytes:
    pieces: list[bytes] = []
    while most > 0 and (piece := os.read(file, min(most, _CHUNK))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

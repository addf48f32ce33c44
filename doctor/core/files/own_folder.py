"""Files in folders that other users may write to.

The path that the user specified is opened as it is; every name below it is chosen by the doctor. These are accessed
through the descriptors of folders, one after the other: no link is followed (``O_NOFOLLOW``), the owner of everything
opened is checked before use (see :mod:`doctor.core.files.trusted_owners`), every read is bounded by the caller's
limit, and only files of this user are removed or replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from doctor.core.files.open_folder import FOLDER, MARK, OpenFolder, about, give
from doctor.core.files.trusted_owners import TrustedOwners, UntrustedPath, mapped_in_words

T = TypeVar("T")

TURNS = 3
"""Attempts to create a folder that another process removes at the same time."""


class OwnFolder:
    """A folder of this user's or of the group's, opened anew for each call: on NFS that looks at the server.

    Args:
        base: the path that the user specified. It is created if it does not exist.
        below: names of nested folders, chosen by the doctor.
        owners: who is trusted; by default this process's user.
        private: others can't write to the last one of ``below``, which contains the :data:`MARK`.
        checked: ``base`` itself, or a link in its place, must belong to this user, to the group or to root.
    """

    def __init__(
        self, base: Path, *below: str, owners: TrustedOwners | None = None, private: bool = False, checked: bool = False
    ) -> None:
        self.path = base.joinpath(*below)
        self.owners = owners or TrustedOwners.here()
        self._base = base
        self._below = below
        self._private = private
        self._checked = checked
        self._said: set[str] = set()

    @classmethod
    def of(cls, directory: Path | OwnFolder) -> OwnFolder:
        """``folder`` itself, or the folder at a path that the user specified."""
        return directory if isinstance(directory, OwnFolder) else cls(directory)

    def below(self, *names: str, private: bool = False) -> OwnFolder:
        """A folder in this one."""
        inner = OwnFolder(self._base, *self._below, *names, owners=self.owners, private=private, checked=self._checked)
        inner._said = self._said
        return inner

    def is_news(self, error: OSError) -> bool:
        """Whether the user has not yet been told why this folder, or one below it, is not used."""
        if not isinstance(error, UntrustedPath):
            return True
        known = str(error) in self._said
        self._said.add(str(error))
        return not known

    def file(self, name: str) -> OwnFile:
        """A file in this folder, which need not exist."""
        return OwnFile(self, name)

    def read(self, name: str, limit: int, *, whole: bool = True) -> bytes:
        """Like :meth:`OpenFolder.read`; ``name`` may contain folders of ours: ``nonce/verdict``."""
        *folders, last = _parts(name)
        with self.opened(*folders) as here:
            return here.read(last, limit, whole=whole)

    def write(self, name: str, data: bytes) -> None:
        """Like :meth:`OpenFolder.write`, and create its parent folders."""
        *folders, last = _parts(name)
        self._again(lambda here: here.write(last, data), *folders)

    def create(self, name: str, data: bytes = b"") -> bool:
        """Like :meth:`OpenFolder.create`, and create its parent folders."""
        *folders, last = _parts(name)
        return self._again(lambda here: here.create(last, data), *folders)

    def agree(self, name: str, data: bytes, limit: int = 1 << 16) -> bytes:
        """Return the content of ``name`` as the first process that called this wrote it: ``data`` if this process is
        the first."""
        return data if self.create(name, data) else self.read(name, limit)

    def remove(self, name: str) -> None:
        """Like :meth:`OpenFolder.remove`."""
        *folders, last = _parts(name)
        with contextlib.suppress(FileNotFoundError), self.opened(*folders) as here:
            here.remove(last)

    def _again(self, work: Callable[[OpenFolder], T], *folders: str) -> T:
        """Run a call in the folder, creating the folder if necessary, and retry if another process has just removed
        it."""
        for _ in range(TURNS):
            with contextlib.suppress(FileNotFoundError), self.opened(*folders, create=True) as here:
                return work(here)
        with self.opened(*folders, create=True) as here:
            return work(here)

    @contextlib.contextmanager
    def opened(self, *more: str, create: bool = False) -> Iterator[OpenFolder]:
        """Open the folder, or one below it. ``create``: create missing folders.

        Raises:
            FileNotFoundError: it does not exist.
            UntrustedPath: a part of it is a link, another user's, or open to others.
            OSError: it can't be opened.
        """
        if self.owners.doubt:
            raise UntrustedPath(f"cannot use {self.path}: {self.owners.doubt}")
        descriptor, path = self._open_base(create=create), self._base
        try:
            for at, name in enumerate((*self._below, *more), 1 - len(self._below)):
                step = _FolderEntry(descriptor, name, path, self.owners, private=self._private and at >= 0)
                inner = step.enter(create=create, mark=self._private and at == 0)
                os.close(descriptor)
                descriptor, path = inner, path / name
            yield OpenFolder(descriptor, path, self.owners)
        finally:
            os.close(descriptor)

    def _open_base(self, *, create: bool) -> int:
        if self._checked:  # a link to the folder must belong to the user or the administrator
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                link = self._base.lstat()
                if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, self.owners.uid):
                    self.owners.require_folder(link, self._base, private=False)
        try:
            descriptor = _open_folder(self._base)
        except FileNotFoundError as error:
            if not create:
                raise about(error, self._base) from None
            descriptor = self._make_base()
        except OSError as error:
            raise about(error, self._base) from None
        try:
            seen = os.fstat(descriptor)
            if self._checked and seen.st_uid != 0:
                _require_own(seen, self._base, OpenFolder(descriptor, self._base, self.owners), private=False)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _make_base(self) -> int:
        try:
            self._base.parent.mkdir(parents=True, exist_ok=True)
            make_folder(None, str(self._base), self.owners)
            return _open_folder(self._base)
        except OSError as error:
            raise about(error, self._base) from None


class OwnFile(msgspec.Struct, frozen=True):
    """A file in a folder of ours, by name."""

    folder: OwnFolder
    name: str

    @classmethod
    def of(cls, file: Path | OwnFile) -> OwnFile:
        """``file`` itself, or the file at a path in a folder that the user specified."""
        return file if isinstance(file, OwnFile) else OwnFile(OwnFolder(file.parent), file.name)

    @property
    def path(self) -> Path:
        """The path, for messages."""
        return self.folder.path / self.name

    def read(self, limit: int, *, whole: bool = True) -> bytes:
        """Like :meth:`OpenFolder.read`."""
        return self.folder.read(self.name, limit, whole=whole)

    @contextlib.contextmanager
    def draft(self) -> Iterator[FileIO]:
        """Like :meth:`OpenFolder.draft`, and create its parent folders."""
        *folders, last = _parts(self.name)
        with self.folder.opened(*folders, create=True) as here, here.draft(last) as stream:
            yield stream

    def remove(self) -> None:
        """Remove it, and its folder if that is ours and has become empty."""
        *folders, _ = _parts(self.name)
        self.folder.remove(self.name)
        if folders:
            with self.folder.opened(*folders[:-1]) as here:
                here.discard(folders[-1])

    def look(self) -> os.stat_result | None:
        """Its status; ``None`` if no file of ours exists."""
        *folders, last = _parts(self.name)
        try:
            with self.folder.opened(*folders) as here:
                seen = here.look(last)
        except OSError:
            return None
        return seen if seen is not None and stat.S_ISREG(seen.st_mode) and self.folder.owners.trusts(seen) else None


class _FolderEntry(msgspec.Struct, frozen=True):
    """The step from an open folder with the path ``path`` into its subfolder ``name``."""

    outer: int
    name: str
    path: Path
    owners: TrustedOwners
    private: bool

    def enter(self, *, create: bool, mark: bool) -> int:
        """Return a descriptor of the subfolder; see :meth:`OwnFolder.opened`."""
        _parts(self.name)
        made = False
        try:
            return self._open()
        except FileNotFoundError as error:
            if not create:
                raise about(error, self.path / self.name) from None
        except UntrustedPath:
            if not (create and mark and self._give_up_own()):
                raise
        made = make_folder(self.outer, self.name, self.owners)
        try:
            inner = self._open()
        except UntrustedPath:
            if made:
                with contextlib.suppress(OSError):
                    os.rmdir(self.name, dir_fd=self.outer)
            raise
        if made and mark:
            OpenFolder(inner, self.path / self.name, self.owners).create(MARK)
        return inner

    def _open(self) -> int:
        path = self.path / self.name
        try:
            inner = os.open(self.name, FOLDER | os.O_NOFOLLOW, dir_fd=self.outer)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._require(os.stat(self.name, dir_fd=self.outer, follow_symlinks=False), path)
            raise about(error, path) from None
        try:
            self._require(os.fstat(inner), path)
        except OSError:
            os.close(inner)
            raise
        return inner

    def _require(self, seen: os.stat_result, path: Path) -> None:
        _require_own(seen, path, OpenFolder(self.outer, self.path, self.owners), private=self.private)

    def _give_up_own(self) -> bool:
        """Remove a folder that an earlier gather created for this user alone, if a group is configured now; return
        whether it was removed."""
        seen = os.stat(self.name, dir_fd=self.outer, follow_symlinks=False)
        if self.owners.group is None or not stat.S_ISDIR(seen.st_mode) or seen.st_uid != self.owners.uid:
            return False
        outer = OpenFolder(self.outer, self.path, self.owners)
        with contextlib.suppress(OSError), outer.entered(self.name) as inner:
            if inner.look(MARK) is not None:
                inner.empty()
                os.rmdir(self.name, dir_fd=self.outer)
                return True
        return False


def make_folder(outer: int | None, name: str, owners: TrustedOwners) -> bool:
    """Create a folder that no other user can access before its owner and mode are set; return whether this process
    created it."""
    if owners.group is None:
        try:
            os.mkdir(name, 0o700, dir_fd=outer)
        except FileExistsError:
            return False
        return True
    aside = str(Path(name).with_name(f".{secrets.token_hex(8)}"))
    os.mkdir(aside, 0o700, dir_fd=outer)
    try:
        descriptor = os.open(aside, FOLDER | os.O_NOFOLLOW, dir_fd=outer)
        try:
            give(descriptor, owners.folder_mode, owners)
        finally:
            os.close(descriptor)
        os.rename(aside, name, src_dir_fd=outer, dst_dir_fd=outer)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(aside, dir_fd=outer)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False  # another process created it first
        raise
    return True


def _require_own(seen: os.stat_result, path: Path, place: OpenFolder, *, private: bool) -> None:
    """Accept a folder; see :class:`doctor.core.files.trusted_owners.TrustedOwners`. ``place``: a folder in which a
    test file can show whether the file system preserves owners."""
    owners = place.owners
    try:
        owners.require_folder(seen, path, private=private)
    except UntrustedPath:
        if stat.S_ISDIR(seen.st_mode) and owners.group is None and seen.st_uid != owners.uid:
            made = None
            with contextlib.suppress(OSError):
                made = place.sample()
            if made is not None and made.st_uid == seen.st_uid:
                raise UntrustedPath(mapped_in_words(made, path.parent, owners)) from None
        raise


def _open_folder(path: Path) -> int:
    try:
        return os.open(path, FOLDER)
    except PermissionError:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # it may be entered, but not listed


def _parts(name: str) -> list[str]:
    """The parts of a name that the doctor chose.

    Raises:
        OSError: it leads outside the folder.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise OSError(errno.EINVAL, "not a name in a folder of the doctor's", name)
    return parts

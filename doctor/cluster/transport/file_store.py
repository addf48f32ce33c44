"""A board in a folder that all hosts share. It needs no torch and no network of the job's own.

Every message is one file, written aside and renamed, so that nobody reads half of it. The files lie in a folder of
their own, which is this user's alone or the named group's: see :mod:`doctor.core.files.own_folder`.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from pathlib import Path

from doctor.cluster.transport.store import LARGEST
from doctor.core.files.open_folder import MARK, OpenFolder
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import UntrustedPath

STALE_AFTER = 3600.0
"""Seconds after which a gathering that nobody ended is swept away. None takes longer than a few minutes."""
AT_ONCE = 32 << 20
"""Bytes of a box that are read in one call; the rest in the next one."""
KEPT = ".key"
"""How names end of what is not swept: see :meth:`FileStoreBackend.agree`."""


class FileStoreBackend:
    """A carrier; see :class:`doctor.cluster.transport.store.StoreBackend`. ``directory`` is made if it is not there;
    a path is trusted as far as :meth:`doctor.core.files.own_folder.OwnFolder.of` says."""

    survives_coordinator = True

    def __init__(self, directory: Path | OwnFolder, key: str) -> None:
        self._directory = OwnFolder.of(directory)
        self.description = f"the folder {self._directory.path}"
        self._name = f".rankdoctor-{key}"  # hidden: no input for diagnose
        self._root = self._directory.below(self._name, private=True)

    def set(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all."""
        self._root.write(name, data)

    def get(self, name: str) -> bytes | None:
        """The content of a file; opening it anew makes NFS look at the server."""
        try:
            return self._root.read(name, LARGEST)
        except FileNotFoundError:
            return None

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Only the first who succeeds ``old`` gets to write: a file can be made once, on NFS too."""
        turn = f"{name}.turns/{hashlib.sha256(old or b'').hexdigest()[:16]}"
        if self.get(name) != old or not self._root.create(turn):
            return False
        self.set(name, new)
        return True

    def append(self, name: str, data: bytes) -> None:
        """An entry is a file of any name in the box."""
        self.set(f"{name}/{secrets.token_hex(8)}", data)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """``mark`` is the set of names that were read."""
        known = mark if isinstance(mark, set) else set()
        fresh: dict[str, bytes | None] = {}
        size = 0
        with self._root.opened(*name.split("/"), create=True) as box:
            for entry in box.names():
                if entry not in known:
                    fresh[entry] = data = _read_entry(box, entry)
                    size += len(data or b"")
                    if size > AT_ONCE:
                        break
        found = {entry: data for entry, data in fresh.items() if data is not None}
        return [*found.values()], known.union(found)

    def clear(self, name: str) -> None:
        """Remove a gathering that has ended, the links behind it, and what earlier ones left an hour ago or more."""
        with contextlib.suppress(OSError), self._root.opened() as root:
            root.remove(name)
            if root.look(MARK) is not None:
                _sweep(root)

    def agree(self, name: str, data: bytes) -> bytes:
        """What stands in the file ``name``, for this user's or the group's eyes alone: the ``data`` of the process that
        called this first. It stays as long as the folder of the board is used."""
        return self._root.agree(name + KEPT, data)

    def tidy(self) -> None:
        """Remove the folder of the board, where nobody has anything in it."""
        with contextlib.suppress(OSError), self._root.opened() as root:
            names = root.names()
            if not all(name.endswith(KEPT) for name in names):
                return
            for name in names:
                root.remove(name)
        with contextlib.suppress(OSError), self._directory.opened() as directory:
            directory.discard(self._name)

    def close(self) -> None:
        """Nothing is held."""


def _sweep(root: OpenFolder) -> None:
    now = root.sample().st_mtime
    for entry in root.names(hidden=True):
        seen = root.look(entry)
        if seen and now - seen.st_mtime > STALE_AFTER and entry != MARK and not entry.endswith(KEPT):
            root.remove(entry)


def _read_entry(box: OpenFolder, entry: str) -> bytes | None:
    """An entry; nothing where it has just been swept away. One that can't be read is as good as a damaged one, and no
    reason to read none of the others."""
    try:
        return box.read(entry, LARGEST)
    except FileNotFoundError:
        return None
    except (IsADirectoryError, PermissionError, UntrustedPath):
        return b""

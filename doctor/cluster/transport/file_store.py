"""Key-value store in a folder that all hosts share. Needs neither torch nor a network.

Every message is one file, written under a temporary name and renamed, so that readers never see half of it. The files
are in a folder of their own, which belongs to this user or to the named group: see :mod:`doctor.core.files.own_folder`.
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
"""Seconds after which an unfinished gather is removed. None takes longer than a few minutes."""
AT_ONCE = 32 << 20
"""Bytes of a mailbox that are read in one call; the rest is read in the next one."""
KEPT = ".key"
"""Suffix of the names that are never removed as stale: see :meth:`FileStoreBackend.agree`."""


class FileStoreBackend:
    """Store backend in a shared folder.

    See :class:`doctor.cluster.transport.store.StoreBackend`. ``directory`` is created if it does not exist; which paths
    are trusted is decided by :meth:`doctor.core.files.own_folder.OwnFolder.of`.
    """

    survives_coordinator = True

    def __init__(self, directory: Path | OwnFolder, key: str) -> None:
        self._directory = OwnFolder.of(directory)
        self.description = f"the folder {self._directory.path}"
        self._name = f".rankdoctor-{key}"  # hidden, so that diagnose does not read it as input
        self._root = self._directory.below(self._name, private=True)

    def set(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        self._root.write(name, data)

    def get(self, name: str) -> bytes | None:
        """Read a file; opening it again makes an NFS client ask the server."""
        try:
            return self._root.read(name, LARGEST)
        except FileNotFoundError:
            return None

    def exchange(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Write ``new`` if the value is ``old``: one process alone can create the turn file."""
        turn = f"{name}.turns/{hashlib.sha256(old or b'').hexdigest()[:16]}"
        if self.get(name) != old or not self._root.create(turn):
            return False
        self.set(name, new)
        return True

    def append(self, name: str, data: bytes) -> None:
        """Write the entry to a file with a random name in the mailbox folder."""
        self.set(f"{name}/{secrets.token_hex(8)}", data)

    def fetch(self, name: str, mark: object) -> tuple[list[bytes], object]:
        """Return new entries; ``mark`` is the set of file names that were read."""
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
        """Remove a finished gather, the links to it, and gathers abandoned an hour ago or earlier."""
        with contextlib.suppress(OSError), self._root.opened() as root:
            root.remove(name)
            if root.look(MARK) is not None:
                now = root.sample().st_mtime
                for entry in root.names(hidden=True):
                    seen = root.look(entry)
                    if seen and now - seen.st_mtime > STALE_AFTER and entry != MARK and not entry.endswith(KEPT):
                        root.remove(entry)

    def agree(self, name: str, data: bytes) -> bytes:
        """Return the content of the file ``name``: the ``data`` of the first caller.

        Only this user or the group can read it. It is kept as long as the folder of the store is in use.
        """
        return self._root.agree(name + KEPT, data)

    def tidy(self) -> None:
        """Remove the folder of the store if it holds nothing but agreed keys."""
        with contextlib.suppress(OSError), self._root.opened() as root:
            names = root.names()
            if not all(name.endswith(KEPT) for name in names):
                return
            for name in names:
                root.remove(name)
        with contextlib.suppress(OSError), self._directory.opened() as directory:
            directory.discard(self._name)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _read_entry(box: OpenFolder, entry: str) -> bytes | None:
    """Read an entry; ``None`` if it has just been removed, empty, which is damaged, if it cannot be read."""
    try:
        return box.read(entry, LARGEST)
    except FileNotFoundError:
        return None
    except (IsADirectoryError, PermissionError, UntrustedPath):
        return b""

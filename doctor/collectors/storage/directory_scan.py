"""Inspect one directory; also run as a script, in a process that can be abandoned if a mount does not answer.

Only the standard library, so that the script starts in milliseconds. Nothing is written.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

ENTRIES = 5000
"""Maximum of names that a scan for lock files reads."""

DEPTH = 4
LOCKS = 50

DirectoryRecord = dict[str, Any]


def scan_directory(path: str, *, locks_at: float | None = None) -> DirectoryRecord:
    """Return the state of ``path`` without writing.

    ``exists`` (``None`` if unknown), ``writable`` by this user, ``total``, ``free``, ``free_inodes`` and ``noexec`` of
    its file system (these five of the nearest existing parent if it is missing), ``error``; ``locks``, if ``locks_at``
    is given, with their ages at that time (seconds since the epoch).
    """
    record: DirectoryRecord = {"exists": None, "writable": None}
    folder = Path(path)
    try:
        record["exists"] = _is_folder(folder)
        nearest = next(place for place in (folder, *folder.parents) if _is_folder(place))
        if any(map(_is_present, takewhile(lambda place: place != nearest, (folder, *folder.parents)))):
            record["error"] = "not a directory"
        else:
            record["writable"] = os.access(nearest, os.W_OK | os.X_OK)
        sizes = os.statvfs(nearest)
        record["total"] = sizes.f_blocks * sizes.f_frsize
        record["free"] = sizes.f_bavail * sizes.f_frsize
        # Some file systems count no inodes.
        record["free_inodes"] = sizes.f_favail if sizes.f_files else None
        record["noexec"] = bool(sizes.f_flag & os.ST_NOEXEC)
        if locks_at is not None and record["exists"]:
            record["locks"] = list(_locks(folder, locks_at))
    except OSError as error:
        record["error"] = error.strerror or str(error)
    return record


def _is_folder(path: Path) -> bool:
    """Return whether ``path`` is a directory; raises if that may not be seen (the test of pathlib may not)."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_present(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _locks(folder: Path, now: float) -> Iterator[DirectoryRecord]:
    """Yield files called ``lock`` or ``*.lock``: path, age in seconds, device, inode and owner."""
    found = 0
    for path in _walk(folder):
        if (path.name == "lock" or path.suffix == ".lock") and found < LOCKS:
            try:
                state = path.lstat()
            except FileNotFoundError:  # released in the meantime
                continue
            found += 1
            yield {
                "path": str(path),
                "age": max(0.0, now - state.st_mtime),
                "device": state.st_dev,
                "inode": state.st_ino,
                "user": state.st_uid,
            }


def _walk(folder: Path) -> Iterator[Path]:
    """Yield files below ``folder``, shallow ones first, within the limits of this module."""
    waiting, seen = [(folder, 1)], 0
    while waiting:
        place, depth = waiting.pop(0)
        for entry in _entries(place):
            seen += 1
            if seen > ENTRIES:
                return
            if entry.is_dir(follow_symlinks=False):
                waiting += [(Path(entry.path), depth + 1)] if depth < DEPTH else []
            else:
                yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


if __name__ == "__main__":
    sys.stdout.write(json.dumps(scan_directory(sys.argv[1], locks_at=time.time() if sys.argv[2] == "scan" else None)))

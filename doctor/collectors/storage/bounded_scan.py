"""Scan directories with a time limit: on a remote file system a child does it and may be abandoned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

import doctor.collectors.storage.directory_scan as script
from doctor.collectors.storage.directory_scan import DirectoryRecord, scan_directory
from doctor.collectors.storage.mounts import Mount, resolve
from doctor.core.clock import monotonic, time
from doctor.core.process import abandon_child, start_child

LIMIT = 3.0
"""Seconds for an answer of a file system; a mounted and idle network file system answers within milliseconds."""

COMMAND = (sys.executable, "-I", "-S", str(Path(script.__file__)))


class DirectoryQuery(msgspec.Struct, frozen=True):
    """A directory to inspect; ``scan``: with its lock files."""

    path: str
    scan: bool = False


class DirectoryResult(msgspec.Struct, frozen=True):
    """The state of ``path`` and its mount."""

    path: str
    mount: Mount | None
    record: DirectoryRecord


def scan_directories(
    queries: Iterable[DirectoryQuery], mounts: tuple[Mount, ...], command: Sequence[str] = COMMAND, limit: float = LIMIT
) -> list[DirectoryResult]:
    """Return the result of every query, in order, within ``limit`` seconds however many file systems are silent.

    ``command`` is the child that gets the path and ``scan`` or ``bare`` as arguments and prints a JSON object.
    """
    deadline = monotonic() + limit
    pending = []
    for query in queries:
        path, mount = resolve(query.path, mounts)
        local = mount is not None and mount.is_local
        child = None if local else start_child([*command, path, "scan" if query.scan else "bare"], cwd="/")
        pending.append((query, path, mount, child))
    return [
        DirectoryResult(
            query.path,
            mount,
            scan_directory(path, locks_at=time() if query.scan else None)
            if child is None
            else _answer(child, deadline, limit),
        )
        for query, path, mount, child in pending
    ]


def _answer(child: subprocess.Popen[bytes], deadline: float, limit: float) -> DirectoryRecord:
    try:
        output, _ = child.communicate(timeout=max(0.05, deadline - monotonic()))
        record = json.loads(output)
    except subprocess.TimeoutExpired:
        abandon_child(child)
        return {"error": f"no answer within {limit:g} s"}
    except ValueError:
        return {"error": f"the process that looked ended with code {child.returncode}"}
    return record if isinstance(record, dict) else {"error": "the process that looked gave no answer"}

"""The other end of :func:`doctor.postmortem.memory_snapshot.snapshot_parser.read_snapshot`: a fresh interpreter that
reads one snapshot.

A pickle of a few bytes can make the interpreter ask for any memory, run for ever, or crash: what is loaded by a process
of its own harms nobody else.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.facts.section import in_unicode
from doctor.postmortem.memory_snapshot.snapshot_parser import load_snapshot

FACTS, REASON = b"+", b"-"
ROOM, RATIO = 1 << 30, 16
"""Bytes of address space beyond what the interpreter has, and for each byte of the file: with stacks that repeat, as
torch writes them, 3 are used, and without them some 10."""


def main(path: str) -> None:
    """Read the snapshot at ``path`` and write its facts to stdout, or why it can't be read."""
    file = Path(path)
    _limit(file)
    try:
        answer = FACTS + msgspec.json.encode(in_unicode(load_snapshot(file)))
    except UnusableError as error:
        answer = REASON + str(error).encode("utf-8", "replace")
    sys.stdout.buffer.write(answer)


def _limit(file: Path) -> None:
    """Bound the address space, where the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + ROOM + RATIO * file.stat().st_size
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))

"""The other end of :func:`doctor.postmortem.flight_recorder.loader_processes.load_files` where this process may not
be forked: a fresh interpreter, which has no other threads and starts workers of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from doctor.postmortem.flight_recorder import loader_processes


def main(most: str, jobs: str, seconds: str, *paths: str) -> None:
    """Write what the files at ``paths`` hold to stdout, as JSON."""
    loader_processes.SECONDS = int(seconds)
    found = loader_processes.load_here([Path(path) for path in paths], int(jobs), int(most))
    sys.stdout.buffer.write(msgspec.json.encode(found))

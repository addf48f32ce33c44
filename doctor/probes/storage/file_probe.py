"""Write a file into directories of the job and read those of other hosts, in children that may be abandoned."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

import doctor.probes.storage.file_child as script
from doctor.analysis.storage_speed import NO_ANSWER, UNTRIED
from doctor.core import message_bounds
from doctor.core.decoding import prepared
from doctor.core.facts import StorageReading, StorageTrial
from doctor.core.process import abandon_child, start_child
from doctor.probes.runtime.deadline import ProbeDeadline

COMMAND = (sys.executable, "-I", "-S", str(Path(script.__file__)))
WRITE_SHARE = 0.5
"""Share of the time for one file in which it is written; the rest is for fsync."""
REMOVE_SECONDS = 2.0
MOST_BYTES = 8 << 20
"""Of one file: 2 s at 4 MB/s, which is slow, and more than the cache of a disk."""


class ProbeDirectory(msgspec.Struct, frozen=True):
    """A directory, its role, and name and size of the file. ``writer``: the host whose file that is."""

    path: message_bounds.Path
    role: message_bounds.Name
    name: message_bounds.Name
    size: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    writer: message_bounds.Name = ""


class _Answer(msgspec.Struct, frozen=True):
    """Output of :mod:`doctor.probes.storage.file_child`."""

    bytes: int = 0
    write: float | None = None
    sync: float | None = None
    outcome: Literal["whole", "other", "absent"] | None = None
    seconds: float | None = None
    error: str | None = None


class WrittenFile:
    """A file that a child writes and keeps until it is told to remove it, or until it or this process ends."""

    def __init__(self, place: ProbeDirectory, seconds: float, command: Sequence[str] = COMMAND) -> None:
        self.place = place
        self._child = _start((*command, "write"), place, str(seconds * WRITE_SHARE), stdin=subprocess.PIPE)

    def trial(self, deadline: ProbeDeadline) -> StorageTrial:
        """Return the result. A child that has not answered in time is abandoned."""
        seconds = deadline.left()
        answer = _read_answer(self._child, deadline)
        error = f"{NO_ANSWER} within {seconds:.0f} s" if answer is None else answer.error
        if error is not None:
            self.give_up()
            return StorageTrial(self.place.path, self.place.role, error=error)
        assert answer is not None
        return StorageTrial(self.place.path, self.place.role, answer.bytes, answer.write, answer.sync)

    def remove(self, deadline: ProbeDeadline) -> None:
        """Have it removed, and wait for that until ``deadline``."""
        if self._child is None:
            return
        with suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(deadline.left(REMOVE_SECONDS))
        self.give_up()

    def give_up(self) -> None:
        """Kill the child; its keeper then removes the file."""
        if self._child is not None:
            abandon_child(self._child)
            self._child = None


def read_files(
    places: Sequence[ProbeDirectory], deadline: ProbeDeadline, command: Sequence[str] = COMMAND
) -> list[StorageReading]:
    """Return what this host sees of the files of others, if a child could be started."""
    children = [_start((*command, "read"), place) for place in places]
    readings = []
    for place, child in zip(places, children, strict=True):
        answer = _read_answer(child, deadline)
        if child is not None:
            abandon_child(child)
        if answer is None:
            readings.append(StorageReading(place.path, place.writer, "silent"))
        elif answer.outcome is not None:
            readings.append(StorageReading(place.path, place.writer, answer.outcome, answer.seconds, answer.error))
    return readings


def _start(
    command: Sequence[str], place: ProbeDirectory, *more: str, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes] | None:
    folder = str(Path.cwd() / place.path)  # absolute: children run in another directory
    try:
        return start_child((*command, folder, place.name, str(place.size), *more), stdin=stdin, cwd="/")
    except OSError:
        return None


def _read_answer(child: subprocess.Popen[bytes] | None, deadline: ProbeDeadline) -> _Answer | None:
    """Return the output of a child, ``None`` without any in time."""
    if child is None or child.stdout is None:
        return _Answer(error=f"{UNTRIED}: cannot start a process")
    ready, _, _ = select.select([child.stdout], [], [], deadline.left())
    if not ready:
        return None
    try:
        return msgspec.json.decode(os.read(child.stdout.fileno(), 1 << 16), type=prepared(_Answer))
    except msgspec.MsgspecError:
        return _Answer(error=f"{UNTRIED}: the process exited")

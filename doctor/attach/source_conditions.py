"""Conditions on the rank around the lines where processes are, and groups of their calls, from the source files.

A path in a stack is the word of another process: a file is read only if that process may read it too, it is a regular
file of bounded size in the same mount namespace, and it is older than the process. It is parsed and never run.
"""

from __future__ import annotations

import ast
import contextlib
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from doctor.core.background import BackgroundCall
from doctor.core.facts import AttachedProcess, Frame, ProcessSample, StackThread
from doctor.core.stack_dumps.rank_conditions import (
    awaited_call,
    data_of_loop,
    group_of_call,
    loop_around,
    rank_condition,
)

DEADLINE = 2.0
"""Seconds for all files of one host; a file may be on a mount that does not respond."""
LARGEST = 1 << 20
MOST_FILES = 64
"""Maximum bytes of a file, and number of files."""
_KERNEL_FOLDERS = ("/proc/", "/sys/", "/dev/")


class _Reader(NamedTuple):
    """Who runs a file, and since when: ``started`` in seconds since the epoch."""

    user: int
    started: float


class _SourceLine(NamedTuple):
    """The condition around a line, the group of the call in it, the lines of the loop around it, the collective whose
    handle it waits for, and what the loop iterates over."""

    condition: str = ""
    group: str = ""
    loop: tuple[int, ...] = ()
    awaits: str = ""
    loop_data: str = ""


Lines = Mapping[tuple[str, int], _SourceLine]


_NOTHING = _SourceLine()


def with_source_conditions(
    processes: Sequence[AttachedProcess], deadline: float = DEADLINE
) -> tuple[AttachedProcess, ...]:
    """Add the conditions of the user's own lines to the main threads, as far as the files were read in time."""
    files: dict[str, _Reader] = {}
    lines: set[tuple[str, int]] = set()
    for process in processes:
        own = [frame for sample in process.samples for frame in _main_frames(sample) if frame.user]
        if process.user is None or not own or not _shares_mounts(process.pid):
            continue
        reader = _Reader(process.user, _started(process))
        for frame in own:
            if frame.file.startswith("/") and not frame.file.startswith(_KERNEL_FOLDERS):
                files.setdefault(frame.file, reader)
                lines.add((frame.file, frame.line))
    found: dict[tuple[str, int], _SourceLine] = {}
    chosen = dict(list(files.items())[:MOST_FILES])
    with contextlib.suppress(TimeoutError):  # those read so far count
        BackgroundCall(lambda: _read(chosen, lines, found)).result(deadline)
    conditions = dict(found)
    return tuple(_with_conditions(process, conditions) for process in processes) if conditions else tuple(processes)


def _main_frames(sample: ProcessSample) -> Iterable[Frame]:
    return (frame for thread in sample.threads if thread.is_main for frame in thread.frames)


def _shares_mounts(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/mnt").stat().st_ino == Path("/proc/self/ns/mnt").stat().st_ino
    except OSError:
        return False


def _started(process: AttachedProcess) -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.started


def _read(
    files: Mapping[str, _Reader], lines: Iterable[tuple[str, int]], found: dict[tuple[str, int], _SourceLine]
) -> None:
    trees = {file: _parsed(file, reader) for file, reader in files.items()}
    for file, line in lines:
        tree = trees.get(file)
        if tree is not None and any(shown := _shown_by(tree, line)):
            found[file, line] = shown


def _shown_by(tree: ast.Module, line: int) -> _SourceLine:
    return _SourceLine(
        rank_condition(tree, line),
        group_of_call(tree, line),
        loop_around(tree, line),
        awaited_call(tree, line),
        data_of_loop(tree, line),
    )


def _parsed(file: str, reader: _Reader) -> ast.Module | None:
    try:
        return ast.parse(_source(file, reader))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _source(file: str, reader: _Reader) -> str:
    """Return the text of the file. Raises ``OSError`` if it is not one that the reader runs."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        seen = os.fstat(descriptor)
        may_read = reader.user in (0, seen.st_uid) or bool(seen.st_mode & stat.S_IROTH)
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > LARGEST or seen.st_mtime > reader.started or not may_read:
            raise OSError(f"{file} is not the source of the process")
        return os.read(descriptor, LARGEST).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def _with_conditions(process: AttachedProcess, conditions: Lines) -> AttachedProcess:
    samples = tuple(
        msgspec.structs.replace(sample, threads=tuple(_of_thread(thread, conditions) for thread in sample.threads))
        for sample in process.samples
    )
    return msgspec.structs.replace(process, samples=samples)


def _of_thread(thread: StackThread, conditions: Lines) -> StackThread:
    if not thread.is_main:
        return thread
    shown = [conditions.get((frame.file, frame.line), _NOTHING) if frame.user else _NOTHING for frame in thread.frames]
    frames = tuple(
        msgspec.structs.replace(frame, condition=line.condition, loop=line.loop, loop_data=line.loop_data)
        if any(line)
        else frame
        for frame, line in zip(thread.frames, shown, strict=True)
    )
    call = next((line for frame, line in zip(thread.frames, shown, strict=True) if frame.user), _NOTHING)
    # Only a function of C code leaves the line that called it innermost.
    awaits = shown[0].awaits if shown and thread.frames[0].user else ""
    return msgspec.structs.replace(thread, frames=frames, group=call.group, awaits=awaits)

"""Reads stack files of faulthandler, which writes them in C without the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

from doctor.core.facts import Frame
from doctor.core.files.own_folder import OwnFile
from doctor.core.frames import MOST, frame_of
from doctor.core.text import lazy_compile

HEAD = "training thread 0x{:x}\n"
"""First line of a file, written by us: the identity of the training thread."""
REQUEST = "stack signal {} to thread {}\n"
"""Second line, if stacks can be requested: the signal, and the kernel's id of the thread that it goes to."""
LARGEST = 4 << 20
"""Maximum bytes of a file that are read."""
_OF_TRAINER = lazy_compile(r"training thread 0x([0-9a-f]+)")
_OF_REQUEST = lazy_compile(r"stack signal (\d{1,3}) to thread (\d{1,10})", re.ASCII)
_OF_THREAD = lazy_compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*\(most recent call first\)")
_OF_FRAME = lazy_compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')


def read_request(file: Path | OwnFile) -> tuple[int, int] | None:
    """Return the signal that requests stacks, and its thread; ``None`` if the file names none."""
    try:
        lines = OwnFile.of(file).read(1 << 10, whole=False).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    found = next((found for line in lines[1:2] if (found := _OF_REQUEST.fullmatch(line))), None)
    return (int(found[1]), int(found[2])) if found else None


def read_stack_file(file: Path | OwnFile) -> tuple[Frame, ...]:
    """Return the training thread's newest stack in a file, if any, innermost first.

    faulthandler calls the thread that got a signal ``Current thread``; the first line of the file identifies the
    training thread. Without that line the last thread of the file is used: faulthandler goes from the newest thread to
    the oldest, which is the main thread. A truncated file yields what it has.
    """
    try:
        return stack_in(OwnFile.of(file).read(LARGEST, whole=False).decode("utf-8", "replace"))
    except OSError:
        return ()


def current_thread_in(text: str) -> tuple[Frame, ...]:
    """Return the stack of the thread that got the signal, in the text of one answer, innermost first."""
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if _OF_THREAD.match(line):
            inside = line.startswith("Current thread")
        elif inside and (found := _OF_FRAME.fullmatch(line)):
            frames.append(frame_of(found["file"], int(found["line"]), found["function"]))
    return tuple(frames[:MOST])


def stack_in(text: str) -> tuple[Frame, ...]:
    """Return the training thread's newest stack in the text of a stack file, as :func:`read_stack_file`."""
    lines = text.splitlines()
    trainer = next((int(found[1], 16) for line in lines[:1] if (found := _OF_TRAINER.match(line))), None)
    newest: list[Frame] = []
    inside = False
    for line in lines:
        if head := _OF_THREAD.match(line):
            inside = trainer is None or int(head[1], 16) == trainer
            newest = [] if inside else newest
        elif inside and (found := _OF_FRAME.fullmatch(line)):
            newest.append(frame_of(found["file"], int(found["line"]), found["function"]))
        elif not line.startswith("  "):
            inside = False
    return tuple(newest[:MOST])

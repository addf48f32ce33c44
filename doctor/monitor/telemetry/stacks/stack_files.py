"""Files of stacks that faulthandler wrote: in C, so that it needs no interpreter that answers."""

from __future__ import annotations

import re
from pathlib import Path

from doctor.core.facts import Frame
from doctor.core.files.own_folder import OwnFile
from doctor.core.frames import MOST, frame_of

HEAD = "training thread 0x{:x}\n"
"""The first line of a file: the identity of the thread that is asked about. Not faulthandler's."""
LARGEST = 4 << 20
"""Bytes of a file that are read."""
_OF_TRAINER = re.compile(r"training thread 0x([0-9a-f]+)")
_OF_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*\(most recent call first\)")
_OF_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')


def read_stack_file(file: Path | OwnFile) -> tuple[Frame, ...]:
    """The training thread of the newest stacks in a file, innermost first; empty where there are none.

    faulthandler calls the thread that got a signal ``Current thread``; the file's first line says which is the training
    thread. Without that line the last thread of the file is taken: faulthandler goes from the newest thread to the
    oldest, which is the interpreter's first. A file that breaks off gives what it has.
    """
    try:
        lines = OwnFile.of(file).read(LARGEST, whole=False).decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    trainer = next((int(found[1], 16) for line in lines[:1] if (found := _OF_TRAINER.match(line))), None)
    return _newest(lines, trainer)


def _newest(lines: list[str], trainer: int | None) -> tuple[Frame, ...]:
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

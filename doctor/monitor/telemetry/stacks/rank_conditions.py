"""What source files show of the lines of a stack: conditions that let only some ranks reach one (``if rank == 0:``),
and whether its function has the other part of a send or receive.

A stack shows where a rank is, but not why the others are not there. Files are read off the step path, in a thread with
a deadline (they may be on a mount that does not respond), and only if they are older than this process: a file edited
since then does not show the running code.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from doctor.core.background import BackgroundCall, start_thread
from doctor.core.clock import time
from doctor.core.facts import Frame
from doctor.core.stack_dumps.rank_conditions import is_answered, rank_condition

DEADLINE = 1.0
"""Time limit in seconds for the sources of one stack."""
LARGEST = 1 << 20
"""Maximum bytes of a source file."""

_STARTED = time()


class _Sources:
    def __init__(self) -> None:
        self.trees: dict[str, ast.Module | None] = {}
        self._known: dict[tuple[str, int], tuple[str, bool]] = {}

    def read(self, lines: Sequence[tuple[str, int]]) -> None:
        for file, line in lines:
            if (file, line) not in self._known:
                tree = self.tree(file)
                self._known[file, line] = (
                    ("", False)
                    if tree is None
                    else (
                        rank_condition(tree, line),
                        is_answered(tree, line),
                    )
                )

    def tree(self, file: str) -> ast.Module | None:
        if file not in self.trees:
            self.trees[file] = _parse(file)
        return self.trees[file]

    def known(self, frame: Frame) -> Frame:
        condition, answered = self._known.get((frame.file, frame.line), ("", False)) if frame.user else ("", False)
        if not (condition or answered):
            return frame
        return msgspec.structs.replace(frame, condition=condition, answered=answered)


_SOURCES = _Sources()
_READING: threading.Thread | None = None


def with_conditions(stacks: Sequence[tuple[Frame, ...]], deadline: float = DEADLINE) -> list[tuple[Frame, ...]]:
    """Add what the source shows of the user's own lines and is known after ``deadline`` seconds."""
    global _READING
    lines = {(frame.file, frame.line) for stack in stacks for frame in stack if frame.user}
    if lines and (_READING is None or not _READING.is_alive()):
        _READING = start_thread("doctor-sources", _SOURCES.read, sorted(lines))
        _READING.join(deadline)
    return [tuple(map(_SOURCES.known, stack)) for stack in stacks]


def source_tree(file: str, deadline: float = DEADLINE) -> ast.Module | None:
    """Return the syntax tree of a running source file; ``None`` if it is not known after ``deadline`` seconds."""
    if file in _SOURCES.trees:
        return _SOURCES.trees[file]
    with contextlib.suppress(TimeoutError, RuntimeError):  # no memory for a thread
        return BackgroundCall(lambda: _SOURCES.tree(file)).result(deadline)
    return None


def _parse(file: str) -> ast.Module | None:
    try:
        return ast.parse(_source(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _source(file: str) -> str:
    """Return the running source. Notebook cells are only in the line cache.

    Raises:
        OSError: it is not available, or was changed since.
    """
    if file in linecache.cache and not Path(file).is_file():
        return "".join(linecache.getlines(file))
    path = Path(file)
    seen = path.stat()
    if not stat.S_ISREG(seen.st_mode) or seen.st_size > LARGEST or seen.st_mtime > _STARTED:
        raise OSError(f"{file} is not a regular file, too large, or newer than this process")
    return path.read_text(encoding="utf-8", errors="replace")

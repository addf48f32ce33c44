"""Conditions in source files that let only some ranks reach a line (``if rank == 0:``).

A stack shows where a rank is, but not why the others are not there. Files are read off the step path, in a thread with
a deadline (they may be on a mount that does not respond), and only if they are older than this process: a file edited
since then does not show the running code.
"""

from __future__ import annotations

import ast
import linecache
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from doctor.core.background import start_thread
from doctor.core.facts import Frame

DEADLINE = 1.0
"""Time limit in seconds for the sources of one stack."""
LARGEST = 1 << 20
LONGEST = 100
"""Maximum bytes of a source file, and characters of a condition."""

_STARTED = time.time()
_RANK_WORD = re.compile(
    r"(?<!matrix_)(?<!lora_)(?<![a-z])rank\d*(?![a-z])(?!_(?:loss|score|weight|metric))"
    r"|is_(?:global|world|rank|local)_zero|rank_?zero|is_(?:world|local)_process_zero|process_index"
    r"|(?:is_)?(?:local_)?(?:main|master|chief|primary)_?process|is_(?:main|master|chief|primary)\b",
    re.IGNORECASE,
)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class _Sources:
    def __init__(self) -> None:
        self._trees: dict[str, ast.Module | None] = {}
        self._conditions: dict[tuple[str, int], str] = {}

    def read(self, lines: Sequence[tuple[str, int]]) -> None:
        for file, line in lines:
            if (file, line) not in self._conditions:
                if file not in self._trees:
                    self._trees[file] = _parse(file)
                tree = self._trees[file]
                self._conditions[file, line] = rank_condition(tree, line) if tree is not None else ""

    def known(self, frame: Frame) -> Frame:
        condition = self._conditions.get((frame.file, frame.line)) if frame.user else None
        return msgspec.structs.replace(frame, condition=condition) if condition else frame


_SOURCES = _Sources()
_READING: threading.Thread | None = None


def with_conditions(stacks: Sequence[tuple[Frame, ...]], deadline: float = DEADLINE) -> list[tuple[Frame, ...]]:
    """Add the conditions of the user's own lines that are known after ``deadline`` seconds."""
    global _READING
    lines = {(frame.file, frame.line) for stack in stacks for frame in stack if frame.user}
    if lines and (_READING is None or not _READING.is_alive()):
        _READING = start_thread("doctor-sources", _SOURCES.read, sorted(lines))
        _READING.join(deadline)
    return [tuple(map(_SOURCES.known, stack)) for stack in stacks]


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
        raise OSError(f"{file} is no file, too large, or newer than this process")
    return path.read_text(encoding="utf-8", errors="replace")


def rank_condition(tree: ast.Module, line: int) -> str:
    """Return the innermost rank condition under which ``line`` of a module runs, or ``""``.

    ``if TEST, line N``, ``elif TEST, line N``, ``else of if TEST, line N``, ``after if TEST: return, line N`` (the line
    runs if the test fails) or ``@rank_zero_only``; ``N`` is the line of the first ``if`` of a chain.
    """
    found = ""
    for block, position in _blocks_around(tree, line):
        statement = block[position]
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = statement.decorator_list if line >= statement.body[0].lineno else []
            words = map(ast.unparse, decorators)
            found = next((f"@{word}"[:LONGEST] for word in words if _RANK_WORD.search(word)), "")
            continue
        found = _left_before(block[:position]) or found
        if isinstance(statement, ast.If):
            found = _branch(statement, line) or found
    return found


def _blocks_around(tree: ast.Module, line: int) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield every list of statements around ``line``, outermost first, and the line's index."""
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        block = blocks.pop()
        for position, statement in enumerate(block):
            if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                yield block, position
                blocks = list(_blocks_of(statement))
                break


def _blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks inside a statement; blocks of ``elif`` belong to the first ``if``."""
    if isinstance(statement, ast.If) and (following := _elif_of(statement)):
        yield statement.body
        yield from _blocks_of(following)
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if block:
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _left_before(block: Sequence[ast.stmt]) -> str:
    """Return a statement before the line, in its own block, by which some ranks leave."""
    for statement in reversed(block):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVES) and not statement.orelse:
            if test := _rank_test(statement):
                leaves = type(statement.body[-1]).__name__.lower()
                return f"after if {test}: {leaves}, line {statement.lineno}"
    return ""


def _branch(first: ast.If, line: int) -> str:
    """Return the branch of an ``if`` that contains ``line``, if its test mentions ranks."""
    word, statement = "if", first
    while not _within(statement.body, line) and (following := _elif_of(statement)):
        word, statement = "elif", following
    test = _rank_test(statement)
    if test and _within(statement.body, line):
        return f"{word} {test}, line {first.lineno}"
    return f"else of if {test}, line {first.lineno}" if test and _within(statement.orelse, line) else ""


def _elif_of(statement: ast.If) -> ast.If | None:
    """Return the following ``elif``: an ``if`` in the ``else`` at the same column."""
    inner = statement.orelse[0] if len(statement.orelse) == 1 else None
    return inner if isinstance(inner, ast.If) and inner.col_offset == statement.col_offset else None


def _within(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno)


def _rank_test(statement: ast.If) -> str:
    test = ast.unparse(statement.test)
    return test[:LONGEST] if _RANK_WORD.search(test) else ""

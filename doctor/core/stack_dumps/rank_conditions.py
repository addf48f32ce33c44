"""What source shows of a call: conditions that let only some ranks reach it, its group, and the loop around it.

The source is parsed and never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

LONGEST = 100
"""Maximum characters of a condition."""
_RANK_WORD = re.compile(
    r"(?<!matrix_)(?<!lora_)(?<![a-z])rank\d*(?![a-z])(?!_(?:loss|score|weight|metric))"
    r"|is_(?:global|world|rank|local)_zero|rank_?zero|is_(?:world|local)_process_zero|process_index"
    r"|(?:is_)?(?:local_)?(?:main|master|chief|primary)_?process|is_(?:main|master|chief|primary)\b",
    re.IGNORECASE,
)
_GROUP_ARGUMENTS = ("group", "process_group")
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


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


def group_of_call(tree: ast.Module, line: int) -> str:
    """Return the argument ``group`` of the call in a line of a module, as written; ``""`` if it has none or several."""
    found = {
        ast.unparse(keyword.value)[:LONGEST]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for keyword in node.keywords
        if keyword.arg in _GROUP_ARGUMENTS
    }
    return found.pop() if len(found) == 1 else ""


def loop_around(tree: ast.Module, line: int) -> tuple[int, ...]:
    """Return the first and the last line of the innermost loop around a line in its function; ``()`` if in none."""
    found: tuple[int, ...] = ()
    for block, position in _blocks_around(tree, line):
        statement = block[position]
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = ()
        elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            found = (statement.lineno, statement.end_lineno or statement.lineno)
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

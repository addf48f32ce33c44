"""The branches on the ways through a script to a place, by which two places may exclude each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.lint.python.collective_paths import ends_process
from doctor.lint.python.script import Script
from doctor.lint.python.training import calls_of

Way = frozenset[tuple[ast.If, bool]]
"""Each branch on a way, and whether its test holds there."""
_DEPTH = 4


def ways_to(script: Script, node: ast.AST, depth: int = _DEPTH) -> Iterator[Way]:
    """The ways to a place, one for each call of its function in the file, and of those around them."""
    own = _branches(script, node)
    function = script.function_of(node)
    calls = list(calls_of(script, function)) if function is not None and depth else []
    if not calls:
        yield own
    for call in calls:
        kept = frozenset() if _loops(script, call) else own
        for way in ways_to(script, call, depth - 1):
            yield kept | way


def excludes(one: Way, other: Way) -> bool:
    """Whether two ways need different answers of the same test."""
    return any((branch, not holds) in other for branch, holds in one)


def _branches(script: Script, node: ast.AST) -> Way:
    """The branches around a place in its function, and those above it that leave the function; none inside of a loop,
    whose next round may take another one."""
    found: set[tuple[ast.If, bool]] = set()
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.If) and inner is not outer.test:
            found.add((outer, inner in outer.body))
        for block in (getattr(outer, name, None) for name in ("body", "orelse", "finalbody")):
            above = block[: block.index(inner)] if isinstance(block, list) and inner in block else []
            found |= {(one, False) for one in above if isinstance(one, ast.If) and _leaves(one)}
        if isinstance(outer, _LOOPS):
            found.clear()
        if isinstance(outer, _FUNCTIONS):
            break
        inner = outer
    return frozenset(found)


_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _loops(script: Script, node: ast.AST) -> bool:
    nearest = next((one for one in script.around(node) if isinstance(one, (*_LOOPS, *_FUNCTIONS))), None)
    return isinstance(nearest, _LOOPS)


def _leaves(branch: ast.If) -> bool:
    return isinstance(branch.body[-1], ast.Return) or ends_process(branch.body[-1])

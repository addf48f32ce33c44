"""Finds exception handlers in which a rank ignores its own error and continues with the next step."""

from __future__ import annotations

import ast
import re

from doctor.lint.python.gpu_use import asks_for_several
from doctor.lint.python.script import Script, last_name
from doctor.lint.python.training import unwrapped

_ERRORS = ("RuntimeError", "Exception", "OutOfMemoryError", "BaseException")
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)


def swallows_error(script: Script, handler: ast.ExceptHandler, loop: ast.AST) -> bool:
    """Whether the loop continues after an error that one rank alone may have."""
    named = _named(handler.type) in _ERRORS
    return named and _goes_on(script, handler.body) and _is_rank_own(script, handler, loop)


def _named(node: ast.expr | None) -> str:
    if node is None:
        return "BaseException"
    if isinstance(node, ast.Tuple):
        return next((name for one in node.elts if (name := _named(one)) in _ERRORS), "")
    return last_name(node)


def _is_rank_own(script: Script, handler: ast.ExceptHandler, loop: ast.AST) -> bool:
    """An error that one rank may have: out of memory, or any error of a batch that is ignored unseen. What is retried
    (``for _ in range(3)``) or checked afterwards may fail on all ranks."""
    if _OUT_OF_MEMORY.search(ast.unparse(handler)):
        return True
    looks = any(isinstance(one, (ast.Raise, ast.Return, ast.Break, ast.Assert)) for one in ast.walk(handler))
    if looks or not isinstance(loop, ast.For) or script.text_of(unwrapped(loop.iter)).startswith("range("):
        return False
    kept = {one.id for one in ast.walk(handler) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    asked = (one.test for one in script.inside(loop, ast.If) if one.lineno > handler.lineno)
    return kept.isdisjoint(part.id for test in asked for part in ast.walk(test) if isinstance(part, ast.Name))


def _goes_on(script: Script, block: list[ast.stmt]) -> bool:
    for number, statement in enumerate(block):
        if isinstance(statement, ast.Continue):
            return True
        if isinstance(statement, (ast.Raise, ast.Return, ast.Break)) or _exits(script, statement):
            return False
        if isinstance(statement, ast.If) and _is_taken(statement):
            return _goes_on(script, [*statement.body, *block[number + 1 :]])
        if isinstance(statement, ast.If) and statement.orelse:
            if not _goes_on(script, statement.body) and not _goes_on(script, statement.orelse):
                return False
    return True


def _is_taken(branch: ast.If) -> bool:
    """Whether a rank of several that ran out of memory takes a branch."""
    return _is_for_several(branch.test) or (not branch.orelse and _is_out_of_memory(branch.test))


def _is_for_several(test: ast.expr) -> bool:
    """Whether a branch is that of several ranks."""
    return last_name(test) == "is_initialized" or asks_for_several(test) is True


def _is_out_of_memory(test: ast.expr) -> bool:
    return (
        bool(_OUT_OF_MEMORY.search(ast.unparse(test)))
        and not isinstance(test, ast.UnaryOp)
        and "not in" not in (ast.unparse(test))
    )


def _exits(script: Script, statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    return script.text_of(statement.value.func).rpartition(".")[2] in ("exit", "_exit", "abort", "kill")

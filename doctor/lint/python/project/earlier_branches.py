"""Branches that no run takes, since an earlier one of their ``if`` and ``elif`` is taken wherever they could be."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.lint.python.project.settings.option_values import is_text_option
from doctor.lint.python.script import Script

_OF_TEXTS = frozenset({"startswith", "endswith", "lower", "upper", "strip", "split", "replace"})
_PLAIN = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Load, ast.expr_context)


def is_taken_before(script: Script, branch: ast.If) -> bool:
    """Whether the condition of an ``elif`` holds only where one of those above it does: ``elif "base-16x4" in name``
    below ``elif "base-16" in name``, of a text."""
    return any(_implies(script, branch.test, one.test) for one in _above(script, branch))


def _above(script: Script, branch: ast.If) -> Iterator[ast.If]:
    """The earlier conditions of a chain."""
    parent = script.parent(branch)
    while isinstance(parent, ast.If) and parent.orelse == [branch]:
        yield parent
        branch, parent = parent, script.parent(parent)


def _implies(script: Script, test: ast.expr, earlier: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_implies(script, one, earlier) for one in test.values)
    if isinstance(earlier, ast.BoolOp) and isinstance(earlier.op, ast.Or):
        return any(_implies(script, test, one) for one in earlier.values)
    if not isinstance(test, ast.Compare) or not isinstance(earlier, ast.Compare) or len(test.ops) > 1:
        return False
    if not all(isinstance(one, _PLAIN) for part in (test.left, *test.comparators) for one in ast.walk(part)):
        return False  # a call may return something else the next time
    if ast.unparse(test) == ast.unparse(earlier):
        return True
    inner, text = _part_of(earlier)
    if not inner or text is None:
        return False
    longer, whole = _part_of(test) if not isinstance(test.ops[0], ast.Eq) else _equal_to(test)
    is_same = whole is not None and ast.unparse(whole) == ast.unparse(text)
    return is_same and inner in longer and (isinstance(test.ops[0], ast.Eq) or _is_text(script, text))


def _part_of(test: ast.Compare) -> tuple[str, ast.expr | None]:
    """``"base" in name``: the text that is sought, and that in which it is."""
    is_in = len(test.ops) == 1 and isinstance(test.ops[0], ast.In) and isinstance(test.left, ast.Constant)
    sought = test.left.value if is_in and isinstance(test.left, ast.Constant) else None
    return (sought, test.comparators[0]) if isinstance(sought, str) else ("", None)


def _equal_to(test: ast.Compare) -> tuple[str, ast.expr | None]:
    other = test.comparators[0]
    known = other.value if isinstance(other, ast.Constant) else None
    return (known, test.left) if isinstance(known, str) else ("", None)


def _is_text(script: Script, node: ast.expr) -> bool:
    """Whether a value is a text, not a list of them: by a method that a script calls, a comparison with one, or the
    option that it is."""
    shown = ast.unparse(node)
    for one in script.method_calls(*_OF_TEXTS):
        if isinstance(one.func, ast.Attribute) and ast.unparse(one.func.value) == shown:
            return True
    equal = (_equal_to(one) for one in script.all(ast.Compare) if len(one.ops) == 1 and isinstance(one.ops[0], ast.Eq))
    is_compared = any(other is not None and ast.unparse(other) == shown for _, other in equal)
    return is_compared or is_text_option(script, node)

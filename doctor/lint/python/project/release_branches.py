"""Tests of the release of torch, by what the requirements of the project permit."""

from __future__ import annotations

import ast
import re

from doctor.core.text import lazy_compile
from doctor.knowledge.releases import is_older, release
from doctor.lint.engine.releases import Releases
from doctor.lint.python.script import Script, last_name

_VERSION = "torch.__version__"
_PARSES = lazy_compile(r"^_?(?:(?:digit_|parse_|loose_?|torch_?)?version|parse)$", re.IGNORECASE)
"""Functions that make a version of a text: ``version.parse``, ``LooseVersion``, ``digit_version``."""


def by_release(script: Script, test: ast.Compare) -> bool | None:
    """The outcome of a test of torch's release in every run that the requirements permit; ``None`` if it is of
    something else, or both outcomes are possible: ``if torch.__version__ < (2, 2):`` in a project with torch>=2.10."""
    known = script.releases
    asked = _number(script, test.comparators[0]) if len(test.ops) == 1 and _is_version(script, test.left) else ""
    if not asked or not isinstance(known, Releases):
        return None
    is_at_least = _at_least(known, asked, strictly=isinstance(test.ops[0], (ast.Gt, ast.LtE)))
    if isinstance(test.ops[0], (ast.Gt, ast.GtE)):
        return is_at_least
    return not is_at_least if is_at_least is not None and isinstance(test.ops[0], (ast.Lt, ast.LtE)) else None


def _at_least(known: Releases, asked: str, *, strictly: bool) -> bool | None:
    oldest, newest = release(known.oldest("torch")), known.get("torch", "") if known.is_bounded("torch") else ""
    wanted = release(asked)
    if oldest and (oldest > wanted or (oldest == wanted and not strictly)):
        return True
    return False if is_older(newest, asked) is True else None


def _is_version(script: Script, node: ast.expr, depth: int = 2) -> bool:
    """``torch.__version__``, also parsed, or as a name for it."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and _PARSES.match(last_name(node.func)):
        return _is_version(script, node.args[0], depth)
    if script.name(node) == _VERSION:
        return True
    values = script.values_of(node) if isinstance(node, ast.Name) and depth else ()
    return len(values) == 1 and values[0] is not node and _is_version(script, values[0], depth - 1)


def _number(script: Script, node: ast.expr) -> str:
    """``"2.2"``, ``Version("2.2")`` and ``(2, 2)`` as text."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and _PARSES.match(last_name(node.func)):
        node = node.args[0]
    if isinstance(node, ast.Tuple):
        parts = [one.value for one in node.elts if isinstance(one, ast.Constant)]
        return ".".join(map(str, parts)) if len(parts) == len(node.elts) else ""
    value = script.value(node)
    return value if isinstance(value, str) and value[:1].isdigit() else ""

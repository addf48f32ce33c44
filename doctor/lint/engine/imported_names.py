"""Finds imports that fail: of a name that a module of the project does not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

MODULE_NAMES = frozenset({"__file__", "__name__", "__doc__", "__spec__", "__path__", "__all__", "__version__"})
_DYNAMIC = ("import *", "globals()", "exec(", "sys.modules", "setattr(", "vars()", "locals()")
"""Ways to give a module names that its text does not show."""
_OF_A_MODULE = re.compile(r"(?<!\.)\b__getattr__\b(?!\(\s*self\b)")
"""The function that finds the attributes of a module, which has no ``self``."""


def names_in(text: str) -> frozenset[str] | None:
    """Every name that a module binds anywhere; ``None`` if its text does not tell, or it is not valid Python."""
    if any(word in text for word in _DYNAMIC) or _OF_A_MODULE.search(text) is not None:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return MODULE_NAMES | bound_names(tree)


def bound_names(tree: ast.AST) -> frozenset[str]:
    """Every name that is bound anywhere below a node: assigned, imported, defined, caught, or a parameter."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {one.asname or one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            found |= set(node.names)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.MatchMapping):
            found.add(node.rest or "")
        elif isinstance(name := getattr(node, "name", None), str):
            found.add(name)
    return frozenset(found)


def failing_import(
    text: str,
    names_of: Callable[[str, str], tuple[bool, frozenset[str] | None]],
    is_meant: Callable[[str], bool] = lambda _module: False,
) -> str:
    """The first name that a module imports at its top level from a module that lacks it; empty if there is none.
    ``names_of``: by a dotted module and a name in it, whether that is a module too, and the names of the module, which
    are ``None`` if it is not of the project or they are unknown. At least one import from the same module must succeed,
    which shows that the module of the project is meant, and not a distribution of the same name, unless ``is_meant``
    says so."""
    for module, wanted in imports_at_top(text):
        known = names_of(module, wanted[0])[1]
        lacking = [] if known is None else [one for one in wanted if not (one in known or names_of(module, one)[0])]
        if lacking and (len(lacking) < len(wanted) or module.startswith(".") or is_meant(module)):
            return lacking[0]
    return ""


def imports_at_top(text: str) -> list[tuple[str, list[str]]]:
    """The dotted modules that a module imports names from at its top level, with the names."""
    return [
        ("." * one.level + (one.module or ""), [name.name for name in one.names])
        for one in _statements(text)
        if isinstance(one, ast.ImportFrom) and one.names[0].name != "*"
    ]


def modules_at_top(text: str) -> list[str]:
    """The dotted modules that a module imports, or imports names from, at its top level."""
    plain = (name.name for one in _statements(text) if isinstance(one, ast.Import) for name in one.names)
    return [*(module for module, _ in imports_at_top(text)), *plain]


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []

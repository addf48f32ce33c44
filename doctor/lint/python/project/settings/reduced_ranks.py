"""Ranks that an object keeps modulo their own number, so that they are the ranks themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.script import Script, last_name, parsed

_DEPTH = 3
"""Bases of bases that are looked at."""
_COUNTS = (
    (re.compile(r"local_?rank", re.IGNORECASE), re.compile(r"(?:get_)?local_(?:world_)?size$", re.IGNORECASE)),
    (re.compile(r"(?:^|_)(?:global_?)?rank", re.IGNORECASE), re.compile(r"(?:get_)?world_?size$", re.IGNORECASE)),
)
"""Names of ranks, and those of their numbers."""


def is_rank_itself(script: Script, rank: ast.expr, other: ast.expr) -> bool:
    """Whether an attribute of an object is the rank in another one, in all objects of the class around it: a base sets
    ``self.part = self.local_rank % self.parts()``, and ``parts`` of the class returns the local world size."""
    owner, modules = script.class_of(rank), script.modules
    if owner is None or modules is None or not (_is_of_self(rank) and isinstance(other, ast.Attribute)):
        return False
    if not _is_of_self(other) or not isinstance(rank, ast.Attribute):
        return False
    derived = re.compile(rf"^[ \t]*class \w+\([^)]*\b{owner.name}\b", re.MULTILINE)
    stored = re.compile(rf"\.{other.attr}\s*(?::[^=\n]*)?[-+*/%]?=(?!=)|[\"']{other.attr}[\"']")
    if any(derived.search(text) for _, text in modules.mentioning(owner.name)):
        return False
    if sum(len(stored.findall(text)) for _, text in modules.mentioning(other.attr)) != 1:
        return False
    owners = list(_lineage(script, owner, _DEPTH))
    for method in (one for cls in owners for one in cls.body if isinstance(one, ast.FunctionDef)):
        for one in ast.walk(method):
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == ast.unparse(other):
                return _is_reduced(owners, method, one.value, rank)
    return False


def _is_of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _lineage(script: Script, owner: ast.ClassDef, depth: int) -> Iterator[ast.ClassDef]:
    """A class and its bases in the project, those of which there is one of that name."""
    yield owner
    for name in map(last_name, owner.bases if depth else ()):
        texts = script.modules.mentioning(f"class {name}") if script.modules is not None and name else ()
        found = [one for shown, text in texts if shown.endswith(".py") for one in _classes(text, name)]
        if len(found) == 1:
            yield from _lineage(script, found[0], depth - 1)


def _classes(text: str, name: str) -> Iterator[ast.ClassDef]:
    try:
        yield from (one for one in parsed(text).body if isinstance(one, ast.ClassDef) and one.name == name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return


def _is_reduced(owners: list[ast.ClassDef], method: ast.FunctionDef, value: ast.expr, rank: ast.Attribute) -> bool:
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mod):
        return False
    if ast.unparse(value.left) != ast.unparse(rank):
        return False
    count = value.right
    if isinstance(count, ast.Name):
        values = [one.value for one in ast.walk(method) if isinstance(one, ast.Assign) and _binds(one, count.id)]
        count = values[0] if len(values) == 1 else count
    if isinstance(count, ast.Call) and _is_of_self(count.func):
        count = _returned(owners, last_name(count.func)) or count
    called = last_name(count.func if isinstance(count, ast.Call) else count)
    return next((number.match(called) is not None for kind, number in _COUNTS if kind.search(rank.attr)), False)


def _binds(assignment: ast.Assign, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in assignment.targets)


def _returned(owners: list[ast.ClassDef], name: str) -> ast.expr | None:
    """What a method returns, that of the nearest class which has one."""
    methods = (one for cls in owners for one in cls.body if isinstance(one, ast.FunctionDef) and one.name == name)
    method = next(methods, None)
    returned = [one.value for one in ast.walk(method) if isinstance(one, ast.Return)] if method is not None else []
    return returned[0] if len(returned) == 1 else None

"""Follows values inside a function: what an expression is computed from, and calls of functions of the file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from doctor.lint.python.script import Script
from doctor.lint.python.training import calls_of

MOST_NODES = 600
"""Nodes of a function that one value is followed through."""


def computed_from(script: Script, node: ast.expr, *, above: int | None = None) -> Iterator[ast.AST]:
    """The nodes of an expression, and of all values that its names get in the same function. ``above``: only in lines
    above this one, outside of loops."""
    scope = script.function_of(node) or script.tree
    waiting: list[ast.AST] = [node]
    seen: set[str] = set()
    for _ in range(MOST_NODES):
        if not waiting:
            return
        current = waiting.pop()
        yield current
        waiting.extend(ast.iter_child_nodes(current))
        if isinstance(current, ast.Name) and current.id not in seen:
            seen.add(current.id)
            found = script.scope_of(node, current.id)
            if found is not None and found.node is scope:
                values = values_bound(found.names[current.id])
                waiting.extend(one for one in values if above is None or getattr(one, "lineno", 0) < above)


def values_bound(bindings: Iterable[ast.AST | str]) -> Iterator[ast.AST]:
    """The expressions that a name gets its values from: what a loop runs over, for that of a loop."""
    for one in bindings:
        if isinstance(one, ast.AugAssign):
            yield one.value
        elif isinstance(one, (ast.For, ast.AsyncFor, ast.comprehension)):
            yield one.iter
        elif isinstance(one, ast.expr):
            yield one


def handed_in(script: Script, name: ast.expr) -> Iterator[ast.expr]:
    """The arguments that callers in the file give for a parameter that ``name`` reads."""
    function = script.function_of(name)
    if function is None or not isinstance(name, ast.Name):
        return
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    if name.id not in parameters:
        return
    place = parameters.index(name.id) - (parameters[0] in ("self", "cls"))
    for call in calls_of(script, function):
        given = script.argument(call, name.id, place) if place >= 0 else None
        if given is not None:
            yield given


def origins(script: Script, name: ast.expr, depth: int = 3) -> Iterator[ast.expr]:
    """The values that a name is assigned, also by callers if it is a parameter. A part of an unpacked value is
    ``Starred``."""
    for value in script.values_of(name):
        if value is not name:
            yield value
            if depth and isinstance(value, (ast.Name, ast.Attribute)):
                yield from origins(script, value, depth - 1)
    if depth:
        for given in handed_in(script, name):
            yield given
            if isinstance(given, (ast.Name, ast.Attribute)):
                yield from origins(script, given, depth - 1)


def part_of(script: Script, name: ast.expr, unpacked: ast.Starred) -> ast.expr | None:
    """What a name gets of several values that a function of the file returns; ``None`` if that is not known."""
    function = script.definition(unpacked.value.func) if isinstance(unpacked.value, ast.Call) else None
    statement = script.parent(unpacked.value)
    targets = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if function is None or not isinstance(targets, (ast.Tuple, ast.List)):
        return None
    for returned in script.inside(function, ast.Return):
        parts = returned.value.elts if isinstance(returned.value, ast.Tuple) else []
        for target, part in zip(targets.elts, parts, strict=False):
            if ast.unparse(target) == ast.unparse(name) and len(parts) == len(targets.elts):
                return next(iter(script.values_of(part)), None)
    return None

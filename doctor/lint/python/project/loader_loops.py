"""What a project does with the batches of a data loader: the loops over it, in any file, and those of the functions
that get it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from doctor.lint.python.script import last_name, parsed

_PASSES_ON = frozenset(
    {"enumerate", "tqdm", "trange", "len", "iter", "next", "print", "zip", "range", "prepare", "cycle", "islice"}
)
"""Functions that are handed a loader, and compute nothing."""
_LOOPS = (ast.For, ast.AsyncFor)
_STEPS = frozenset({"backward", "manual_backward"})


def computed_over(name: str, texts: Iterable[str], near: Iterable[str]) -> Iterator[list[ast.stmt] | None]:
    """The bodies of the loops over a loader, also by another name (``bar = tqdm(self.val_loader)``), and those of the
    functions that it is handed to, which ``near`` may define; ``None`` for a text or a function that is not known."""
    known = list(_trees(near))
    for text in texts:
        tree = next(_trees((text,)), None)
        if tree is None:
            yield None
            continue
        read = {name, *_other_names(tree, name)}
        loops = [one for one in ast.walk(tree) if isinstance(one, _LOOPS) and _reads(one.iter, read)]
        yield from (one.body for one in loops)
        for function in _handed(tree, read) - _PASSES_ON:
            places = (tree, *known)
            if any(_keeps_as_attribute(one, function, name) for one in places):
                continue  # its loops are over that attribute
            bodies = [one.body for place in places for one in _functions(place, function)]
            yield from bodies or (None,)


def trains(body: Iterable[ast.stmt]) -> bool:
    """Whether statements compute gradients: ``loss.backward()``."""
    calls = (one for part in body for one in ast.walk(part) if isinstance(one, ast.Call))
    return any(last_name(one.func) in _STEPS for one in calls)


def _trees(texts: Iterable[str]) -> Iterator[ast.Module]:
    for text in texts:
        try:
            yield parsed(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue


def _reads(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is a loader, or hands it on to what loops over it: not ``len(loader)`` in a condition."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return last_name(node) in names
    return isinstance(node, ast.Call) and any(_reads(one, names) for one in node.args)


def _other_names(tree: ast.AST, name: str) -> Iterator[str]:
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
            value = one.value
            passes_on = isinstance(value, ast.Call) and last_name(value.func) in _PASSES_ON - {"len", "next"}
            if (passes_on or isinstance(value, (ast.Name, ast.Attribute))) and _reads(value, {name}):
                yield one.targets[0].id


def _handed(tree: ast.AST, names: set[str]) -> set[str]:
    """The functions that are given a loader itself."""
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    return {
        last_name(call.func)
        for call in calls
        if any(
            isinstance(one, (ast.Name, ast.Attribute)) and last_name(one) in names
            for one in (*call.args, *(word.value for word in call.keywords))
        )
    }


def _functions(tree: ast.AST, name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for one in ast.walk(tree):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name == name:
            yield one


def _keeps_as_attribute(tree: ast.AST, name: str, loader: str) -> bool:
    """Whether a class of that name has the loader as an attribute: ``self.val_loader = val_loader``."""
    owners = (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == name)
    return any(
        isinstance(one, ast.Attribute) and one.attr == loader and ast.unparse(one.value) == "self"
        for owner in owners
        for one in ast.walk(owner)
    )

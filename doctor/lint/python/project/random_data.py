"""Recognizes datasets whose items are random numbers: the order in which they are read has no meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.project.imported_functions import ModuleSummary
from doctor.lint.python.script import Script, per_script
from doctor.lint.python.value_flow import origins, part_of

_DRAWS = re.compile(r"^(?:torch|numpy\.random|random)\.(?:rand\w*|normal|uniform|integers|standard_normal)$")
_COMPUTES = re.compile(r"^(?:torch|numpy|random|math)\.(?!load|hub|jit|from_?file|fromfile|memmap|genfromtxt)")
_BUILTINS = frozenset({"abs", "float", "int", "len", "list", "max", "min", "range", "round", "sum", "super", "tuple"})


def is_random(script: Script, dataset: ast.expr) -> bool:
    """Whether all values that a dataset may be are instances of classes, of the file or of another module of the
    project, whose items are drawn at random."""
    made = list(_objects(script, dataset))
    return bool(made) and all(_is_of_random_class(script, one) for one in made)


def _objects(script: Script, dataset: ast.expr) -> Iterator[ast.expr]:
    """The values of an expression that are not names themselves."""
    for name in (dataset, *origins(script, dataset)):
        for value in script.values_of(name) if not isinstance(name, ast.Starred) else ():
            found = part_of(script, name, value) if isinstance(value, ast.Starred) else value
            for one in script.values_of(found) if found is not None else (value,):
                if not isinstance(one, (ast.Name, ast.Attribute)):
                    yield one


def _is_of_random_class(script: Script, made: ast.expr) -> bool:
    if not isinstance(made, ast.Call):
        return False
    if script.name(made.func) == "torch.utils.data.TensorDataset":
        return bool(made.args) and all(_is_drawn(script, one) for one in made.args)
    owner = script.class_definition(made.func)
    if owner is not None:
        return owner.name in random_datasets(script)
    module, _, name = script.name(made.func).rpartition(".")
    if script.modules is None or not module or not script.modules.has(script.location, module):
        return False
    summary: ModuleSummary | None = script.modules.find(script.location, module, whole=True)
    return summary is not None and name in summary.random_datasets


@per_script
def random_datasets(script: Script) -> frozenset[str]:
    """The classes of a file whose ``__getitem__`` returns random numbers, or entries of a collection of them."""
    return frozenset(name for name, owner in script.bindings.classes.items() if _draws_its_items(script, owner))


def _draws_its_items(script: Script, owner: ast.ClassDef) -> bool:
    getter = script.bindings.methods.get((owner.name, "__getitem__"))
    if getter is None or not all(map(_is_computed, _names_of_calls(script, owner))):
        return False
    entries = [one.value for one in script.inside(getter, ast.Subscript) if isinstance(one.value, ast.Attribute)]
    read = [values for one in entries if (values := script.values_of(one))]
    if len(read) < len(entries):
        return False
    drawn = (any(_draws(script, value) for value in values) for values in read)
    return all(drawn) if read else _draws(script, getter)


def _is_drawn(script: Script, tensor: ast.expr) -> bool:
    """Whether a tensor is computed from random numbers and nothing else above it, as far as its function shows."""
    calls = [script.name(one.func) for one in _above(script, tensor, tensor.lineno) if isinstance(one, ast.Call)]
    drawn = any(_DRAWS.match(one) for one in calls)
    return drawn and all(map(_is_computed, calls))


def _above(script: Script, value: ast.expr, line: int, depth: int = 4) -> Iterator[ast.AST]:
    """The nodes of an expression, and of the values that its names get no later than a line."""
    for node in ast.walk(value):
        yield node
        for one in script.values_of(node) if depth and isinstance(node, ast.Name) else ():
            if one is not value and one.lineno <= line:
                yield from _above(script, one, line, depth - 1)


def _names_of_calls(script: Script, owner: ast.ClassDef) -> Iterator[str]:
    return (script.name(call.func) for call in script.inside(owner, ast.Call))


def _is_computed(name: str) -> bool:
    """Whether a function makes numbers of numbers: it reads no file."""
    return name in _BUILTINS or _COMPUTES.match(name) is not None or name.startswith(("super()", "torch.utils.data."))


def _draws(script: Script, node: ast.AST) -> bool:
    return any(_DRAWS.match(script.name(one.func)) for one in ast.walk(node) if isinstance(one, ast.Call))

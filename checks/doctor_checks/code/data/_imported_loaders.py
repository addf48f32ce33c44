"""Training loaders that a function of another module of the project makes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.loader_calls import LoaderCall, depends_on_ranks, evaluates, loaders, mentions_ranks
from doctor.lint.python.project.imported_functions import called_function
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import FunctionNode, Script, last_name, parsed

_MAY_PART = re.compile(
    r"rank|world|sampler|shard|replica|distribut|accelerat|fabric|lightning|worker_info|\bddp\b|\bfsdp\b", re.IGNORECASE
)
"""Words of modules that may divide the data among ranks, or ask for the order of samples."""


class ImportedLoader(NamedTuple):
    """``call``: of the function in the script; ``name``: what its loader is called there; ``loader``: the call that
    makes it, in the module ``made_in``."""

    call: ast.Call
    name: str
    loader: LoaderCall
    made_in: Script


def imported_loaders(script: Script, trained: set[str]) -> Iterator[ImportedLoader]:
    """The loaders of the training loops over these names that a module makes on all ranks if it mentions none."""
    for assigned in script.all(ast.Assign):
        call = assigned.value
        if not isinstance(call, ast.Call) or len(assigned.targets) != 1 or not _is_on_all_ranks(script, call):
            continue
        for place, target in targets_of(assigned.targets[0]):
            if target.id not in trained or evaluates(target.id) is True or len(assignments_of(script, target)) != 1:
                continue
            found = called_function(script, call)
            if found is None or found[0] is script or _MAY_PART.search(found[0].text):
                continue
            made_in, function = found
            loader = _returned(made_in, function, place)
            if loader is not None and loader.evaluates is not True:
                yield ImportedLoader(call, target.id, loader, made_in)


def _is_on_all_ranks(script: Script, call: ast.Call) -> bool:
    """Whether all ranks make an identical call, with arguments that do not name the rank."""
    given = [*call.args, *(one.value for one in call.keywords)]
    words = {last_name(part) for one in given for part in ast.walk(one) if isinstance(part, (ast.Name, ast.Attribute))}
    if script.function_of(call) not in run_by_all(script) or mentions_ranks(frozenset(words)):
        return False
    return not depends_on_ranks(script, call) and not runs_alone(script, call)


def targets_of(target: ast.expr) -> Iterator[tuple[int | None, ast.Name]]:
    """The names that a statement assigns, each with its place in a tuple."""
    if isinstance(target, ast.Name):
        yield None, target
    elif isinstance(target, ast.Tuple) and not any(isinstance(one, ast.Starred) for one in target.elts):
        yield from ((place, one) for place, one in enumerate(target.elts) if isinstance(one, ast.Name))


def assignments_of(script: Script, name: ast.Name) -> list[ast.Assign]:
    """The statements of the file that assign a name, wherever."""
    return [
        one
        for one in script.all(ast.Assign)
        if any(isinstance(part, ast.Name) and part.id == name.id for target in one.targets for part in ast.walk(target))
    ]


def _returned(made_in: Script, function: FunctionNode, place: int | None) -> LoaderCall | None:
    """The only loader that a function returns, or has at a place of the tuple that it returns."""
    values = [one.value for one in made_in.inside(function, ast.Return)]
    value = values[0] if len(values) == 1 else None
    if place is not None:
        is_tuple = isinstance(value, ast.Tuple) and place < len(value.elts)
        value = value.elts[place] if is_tuple and isinstance(value, ast.Tuple) else None
    made = made_in.values_of(value) if value is not None else ()
    return next((one for one in loaders(made_in) if len(made) == 1 and one.call is made[0]), None)


_ASKS_RANK = re.compile(r"\bget_rank\(|\bprocess_index\b|[\"'](?:LOCAL_)?RANK[\"']")
_ASKS_SIZE = re.compile(r"\bget_world_size\(|\bnum_processes\b|[\"']WORLD_SIZE[\"']")


def is_made_by_rank(script: Script, data: ast.expr) -> bool:
    """Whether a function of another module of the project that an expression calls returns a class of the project which
    asks for the rank and for the number of ranks, as one that divides its data does: ``kind_of(config)().read()``."""
    for call in (one for one in ast.walk(data) if isinstance(one, ast.Call)):
        found = called_function(script, call)
        if found is not None and found[0] is not script:
            made_in, function = found
            named = [one.value for one in made_in.inside(function, ast.Return)]
            if any(isinstance(one, ast.Name) and _asks_for_ranks(made_in, one.id) for one in named):
                return True
    return False


def _asks_for_ranks(made_in: Script, name: str) -> bool:
    """Whether a class of a module, or of one that gives it all its names, asks for the rank and the number of ranks."""
    modules, texts = made_in.modules, [made_in.text]
    for one in made_in.all(ast.ImportFrom) if modules is not None else ():
        if modules is not None and one.names[0].name in ("*", name):
            given = modules.named(made_in.path, "." * one.level + (one.module or ""))
            texts += [modules.text_at(shown) for shown in given]
    classes = (_class_in(text, name) for text in texts)
    return any(_ASKS_RANK.search(one) and _ASKS_SIZE.search(one) for one in classes)


def _class_in(text: str, name: str) -> str:
    """The code of a class at the top level of a module; empty if it has none."""
    if not re.search(rf"^class {re.escape(name)}\b", text, re.MULTILINE):
        return ""
    try:
        body = parsed(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return next((ast.unparse(one) for one in body if isinstance(one, ast.ClassDef) and one.name == name), "")

"""Calls that log to an experiment tracker in processes in which no run of it has been started."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import PurePath

from doctor.lint.python.project.unreached import may_import
from doctor.lint.python.script import Script, per_script

_LOGS = "wandb.log"
_STARTS = "wandb.init"
_SPAWN = "torch.multiprocessing.spawn"


def logs_without_run(script: Script, call: ast.Call) -> bool:
    """Whether ``wandb.log`` is only reached in processes that the file spawns, while it starts the run in their parent:
    it raises "You must call wandb.init() before wandb.log()" (wandb/sdk/lib/preinit.py). A spawned process is a new
    interpreter, which has nothing of its parent (torch/multiprocessing/spawn.py)."""
    return script.name(call.func) == _LOGS and script.function_of(call) in _functions_without_run(script)


@per_script
def _functions_without_run(script: Script) -> frozenset[ast.AST]:
    """The functions that only spawned processes run, if these start no run of the tracker and the parent does."""
    starts = list(script.calls(_STARTS))
    targets = [script.argument(call, "fn", 0) for call in script.calls(_SPAWN)]
    spawned = [script.definition(one) if one is not None else None for one in targets]
    if not starts or not spawned or None in spawned or _may_start_elsewhere(script):
        return frozenset()
    inside = _reached(script, (one for one in spawned if one is not None), frozenset())
    outside = _reached(script, _at_import(script), frozenset(one for one in targets if one is not None))
    if any(script.function_of(one) in inside or script.function_of(one) is None for one in starts):
        return frozenset()
    return inside - outside


def _may_start_elsewhere(script: Script) -> bool:
    """Whether a module of the project that the file imports starts a run, or one imports the file and may do so."""
    if script.modules is None:
        return True
    place = PurePath(script.location or script.path)
    texts = [text for text in script.modules.texts_around(script.location) if _STARTS in text]
    texts += [text for _, text in script.modules.mentioning(place.stem) if may_import(place, text)]
    return any(text != script.text for text in texts)


def _at_import(script: Script) -> list[ast.AST]:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [one for one in script.tree.body if not isinstance(one, definitions)]


def _reached(script: Script, roots: Iterable[ast.AST], apart: frozenset[ast.AST]) -> frozenset[ast.AST]:
    """The functions that parts of a file name, also through others; not by the expressions ``apart``."""
    waiting = list(roots)
    found = {one for one in waiting if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    while waiting:
        for node in ast.walk(waiting.pop()):
            function = script.definition(node) if isinstance(node, ast.expr) and node not in apart else None
            if function is not None and function not in found:
                found.add(function)
                waiting.append(function)
    return frozenset(found)

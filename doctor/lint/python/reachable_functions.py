"""Functions of a script that every rank runs."""

from __future__ import annotations

import ast

from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.script import Script, per_script
from doctor.lint.python.training import CALLBACK, DATA_MODULE, MODULE, constructor_of

_LAUNCHERS = frozenset(
    {
        *("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "accelerate.notebook_launcher"),
        *("torch.multiprocessing.Process", "multiprocessing.Process", "ray.train.torch.TorchTrainer"),
        *("accelerate.debug_launcher", "detectron2.engine.launch", "torch_xla.distributed.xla_multiprocessing.spawn"),
        "lightning.fabric.Fabric().launch",
    }
)
"""Calls that start ranks with a function."""


@per_script
def run_by_all(script: Script) -> frozenset[ast.AST | None]:
    """Functions of this file that every rank runs; ``None`` stands for the statements of the module.

    Ranks that the file starts run the function of its launcher; others run the module. A notebook is one process, so
    its ranks run only what it launches. Calls without a rank condition, and functions that are passed on, are followed
    from there.
    """
    return frozenset(_reached(script, _started(script)))


def is_run_by_all(script: Script, node: ast.AST) -> bool:
    """Whether every rank runs a node: in a function that every rank runs, under no condition on the rank."""
    return script.function_of(node) in run_by_all(script) and rank_condition(script, node) is None


def _started(script: Script) -> set[ast.AST | None]:
    targets: set[ast.AST | None] = {
        function
        for call in script.all(ast.Call)
        if script.name(call.func) in _LAUNCHERS
        for argument in (*call.args, *(one.value for one in call.keywords))
        if (function := script.definition(argument)) is not None
    }
    hooked = {
        method
        for owner in script.all(ast.ClassDef)
        if script.derives(owner, MODULE, CALLBACK, DATA_MODULE)
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name != "prepare_data"
    }
    whole: set[ast.AST | None] = set() if script.path.endswith(".ipynb") else {None}
    return {*(targets or whole), *hooked}


def _reached(script: Script, roots: set[ast.AST | None]) -> set[ast.AST | None]:
    edges: dict[ast.AST | None, set[ast.AST]] = {}
    for call in script.all(ast.Call):
        handed = [call.func, *call.args, *(one.value for one in call.keywords)]
        named = (constructor_of(script, call), *map(script.definition, handed))
        targets = {one for one in named if one is not None}
        if targets and rank_condition(script, call) is None:
            edges.setdefault(script.function_of(call), set()).update(targets)
    reached, waiting = set(roots), list(roots)
    while waiting:
        for function in edges.get(waiting.pop(), ()):
            if function not in reached:
                reached.add(function)
                waiting.append(function)
    return reached

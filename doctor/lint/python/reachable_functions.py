"""Functions of a script that every rank runs, and what they run whenever they are called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.rank_branches import asks_for_one, is_of_the_job, rank_condition
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
_TRAINERS_OF_RAY = re.compile(r"ray\.train\.(?:[\w.]+\.)?\w*Trainer$")
"""Classes whose ``fit()`` runs a function on the workers; the program that calls it is one process."""


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
        if script.name(call.func) in _LAUNCHERS or _TRAINERS_OF_RAY.match(script.name(call.func))
        for argument in (*call.args, *(one.value for one in call.keywords))
        for function in _started_by(script, argument)
    }
    hooked = {
        method
        for owner in script.all(ast.ClassDef)
        if script.derives(owner, MODULE, CALLBACK, DATA_MODULE)
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name != "prepare_data"
    }
    is_driver = any(_TRAINERS_OF_RAY.match(script.name(call.func)) for call in script.all(ast.Call))
    whole: set[ast.AST | None] = set() if is_driver or script.path.endswith(".ipynb") else {None}
    return {*(targets or whole), *hooked}


def _started_by(script: Script, argument: ast.expr) -> Iterator[ast.AST]:
    """The function that an argument names, or those inside of the one that makes it: ``TorchTrainer(make_loop())``."""
    function = script.definition(argument)
    if function is not None:
        yield function
    for made in script.values_of(argument):
        maker = script.definition(made.func) if isinstance(made, ast.Call) else None
        if isinstance(maker, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (one for one in maker.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))


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


def is_certain(script: Script, node: ast.AST) -> bool:
    """Whether a node runs whenever its function is called in a job of several ranks: unconditionally, or under
    conditions on there being several ranks."""
    inner = node
    for outer in script.around(node):
        if _is_optional(script, outer, inner) or _may_leave(script, getattr(outer, "body", None), inner):
            return False
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return True
        inner = outer
    return True


def _is_optional(script: Script, outer: ast.AST, inner: ast.AST) -> bool:
    if isinstance(outer, ast.If):
        several = _is_for_several(script, outer.test)
        taken = [] if several is None else outer.body if several else outer.orelse
        return inner is not outer.test and inner not in taken
    if isinstance(outer, ast.BoolOp):
        return inner is not outer.values[0]
    if isinstance(outer, ast.While):
        return inner is not outer.test and not isinstance(outer.test, ast.Constant)
    if isinstance(outer, ast.IfExp):
        return inner is not outer.test
    return isinstance(outer, (ast.ExceptHandler, ast.Lambda, ast.ClassDef))


def _may_leave(script: Script, block: object, inner: ast.AST) -> bool:
    """Whether the statements before ``inner`` in a block may return for another reason than a single rank."""
    if not isinstance(block, list) or inner not in block:
        return False
    for statement in block[: block.index(inner)]:
        leaves = not isinstance(statement, ast.FunctionDef) and any(True for _ in script.inside(statement, ast.Return))
        if leaves and not (isinstance(statement, ast.If) and _is_for_several(script, statement.test) is False):
            return True
    return False


def _is_for_several(script: Script, test: ast.expr) -> bool | None:
    """Whether a test holds in every job of several ranks (true), in none of them (false), or in some (``None``)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        holds = _is_for_several(script, test.operand)
        return None if holds is None else not holds
    if isinstance(test, ast.BoolOp):
        decisive = isinstance(test.op, ast.Or)
        held = [_is_for_several(script, one) for one in test.values]
        if decisive in held:
            return decisive
        return None if None in held else not decisive
    if not is_of_the_job(script, test):
        return None
    if asks_for_one(test):
        return False
    is_equal = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.Is, ast.In))
    return None if is_equal else True

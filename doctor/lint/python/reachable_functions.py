"""Functions of a script that every rank runs, and what they run whenever they are called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.rank_branches import asks_for_one, is_of_the_job, rank_condition
from doctor.lint.python.script import Script, last_name, per_script
from doctor.lint.python.training import (
    CALLBACK,
    DATA_MODULE,
    MODULE,
    TRAINER,
    constructor_of,
    several_ranks,
    trains_on_several,
)

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
_STARTERS = re.compile(
    r"(?:torch\.)?multiprocessing\.get_context\(\)\.Process|submitit\.\w*Executor\(\)\.(?:submit|map_array)|"
    r"pyspark\.ml\.torch\.distributor\.TorchDistributor\(\)\.run|horovod\.(?:spark\.)?run|"
    r"sparkdl\.HorovodRunner\(\)\.run|torch\.distributed\.launcher\.(?:api\.)?elastic_launch|torch_xla\.launch"
)
"""Calls that start processes with a function: ranks, if it makes their job."""
_SPAWNS = re.compile(r"spawn|fork|notebook|tpu")
"""Strategies with which Lightning starts ranks by a function, and not by running the script again."""


RUNS_ON_ONE = re.compile(r"rank_?(?:zero|0)|(?:on|only)_?(?:main|master|primary|chief)|(?:main|master)_process", re.I)
"""Functions that run what they are given on one rank: ``run_on_main(save, state)``."""


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
    is_driver = is_driver or _has_actors(script) or _spawns_in_fit(script)
    whole: set[ast.AST | None] = set() if is_driver or script.path.endswith(".ipynb") else {None}
    return {*(targets or _started_with_job(script) or whole), *hooked}


def _started_with_job(script: Script) -> set[ast.AST | None]:
    """The functions with which a script starts processes that make a job of several ranks: ``executor.submit(train)``.
    A process for something else leaves the ranks those of the script."""
    started: set[ast.AST | None] = {
        function
        for call in script.all(ast.Call)
        if _STARTERS.fullmatch(script.name(call.func))
        for argument in (*call.args, *(one.value for one in call.keywords))
        for function in _started_by(script, argument)
    }
    return started if _make_job(script, started) else set()


def _make_job(script: Script, functions: set[ast.AST | None]) -> bool:
    """Whether the call that shows that a script is for several ranks is in one of the functions, or in what they
    call."""
    shown = several_ranks(script) if functions else None
    return shown is not None and script.function_of(shown) in _reached(script, functions)


def _has_actors(script: Script) -> bool:
    """Whether the ranks are actors or tasks of Ray, which a program of one process starts."""
    marked = {
        owner
        for owner in (*script.all(ast.ClassDef), *script.functions)
        for one in getattr(owner, "decorator_list", ())
        if script.name(one.func if isinstance(one, ast.Call) else one) == "ray.remote"
    }
    methods = {one for owner in marked if isinstance(owner, ast.ClassDef) for one in owner.body}
    return _make_job(script, {*marked, *methods})


def _spawns_in_fit(script: Script) -> bool:
    """Whether a Trainer starts the ranks by a function, so that the statements around ``fit()`` are one process."""
    trainers = [one for one in script.calls(TRAINER) if trains_on_several(script, one)]
    return several_ranks(script) in trainers and all(_spawns(script, one) for one in trainers)


def _spawns(script: Script, trainer: ast.Call) -> bool:
    """Also the releases with ``gpus`` did so on one host, where they were left to choose (``_choose_strategy`` of
    trainer/connectors/accelerator_connector.py, Lightning 1.9)."""
    given = [script.argument(trainer, name) for name in ("strategy", "accelerator", "distributed_backend")]
    methods = [script.argument(one, "start_method") for one in given if isinstance(one, ast.Call)]
    if any(_SPAWNS.search(value) for one in (*given, *methods) if isinstance(value := script.value(one), str)):
        return True
    chosen = (one is not None and script.value(one) not in ("gpu", "cuda", "auto", None) for one in given)
    is_left = not any(script.is_given(trainer, name) for name in ("plugins", "num_nodes"))
    return is_left and script.argument(trainer, "gpus") is not None and not any(chosen)


def _started_by(script: Script, argument: ast.expr) -> Iterator[ast.AST]:
    """The function that an argument names, or those inside of the one that makes it: ``TorchTrainer(make_loop())``."""
    function = script.definition(argument)
    if function is not None:
        yield function
    for made in script.values_of(argument):
        if isinstance(made, ast.Call) and script.name(made.func) == "functools.partial" and made.args:
            yield from _started_by(script, made.args[0])
        maker = script.definition(made.func) if isinstance(made, ast.Call) else None
        if isinstance(maker, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (one for one in maker.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _reached(script: Script, roots: set[ast.AST | None]) -> set[ast.AST | None]:
    edges: dict[ast.AST | None, set[ast.AST]] = {}
    for call in script.all(ast.Call):
        handed = [call.func, *call.args, *(one.value for one in call.keywords)]
        if RUNS_ON_ONE.search(last_name(call.func)):
            handed = [call.func]
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

"""Calls of a program before it joins a job, of helpers that then wait for nobody."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.project.imported_functions import called_function
from doctor.lint.python.script import FunctionNode, Script, last_name
from doctor.lint.python.training import calls_of

_DEPTH = 4
"""Callers in a row."""
_MAY_JOIN = re.compile(
    r"process_?group|\bdist(?:ributed)?\b|_dist|_start|ddp|\bfit\b|launch|spawn|accelerat|deepspeed|fabric|trainer|"
    r"\binit|_init|set_?up|\bstart|engine|horovod|hvd|\bray\b|\bjoin_|parallel|\btrain\b|\brun\b|instantiat|"
    r"import_module|getattr",
    re.IGNORECASE,
)
"""Words of calls that may create a process group."""
_OF_TORCH = re.compile(r"torch\.(?!distributed\b|multiprocessing\b|nn\b)")
_OF_OUTPUT = re.compile(r"logg|callback", re.IGNORECASE)
"""Objects of a configuration that join no job."""


def waits_for_nobody(script: Script, call: ast.Call, word: str) -> bool:
    """Whether a call is of a function that runs a collective only ``if torch.distributed.is_initialized()``, and it is
    in a program that has made nothing yet which may create a process group."""
    found = called_function(script, call)
    if found is None or not _asks_before(*found, word):
        return False
    return _is_before_group(script, call, last_name(call.func), _DEPTH)


def _asks_before(script: Script, function: FunctionNode, word: str) -> bool:
    """Whether each call of a collective in a function is in a branch for initialized groups."""
    calls = [one for one in script.inside(function, ast.Call) if last_name(one.func) == word]
    return bool(calls) and all(_is_in_branch(script, one) for one in calls)


def _is_in_branch(script: Script, node: ast.AST) -> bool:
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.If) and inner in outer.body and _asks(outer.test):
            return True
        inner = outer
    return False


def _asks(test: ast.expr) -> bool:
    """``dist.is_initialized()``, alone or with ``and``."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(isinstance(one, ast.Call) and last_name(one.func) == "is_initialized" for one in parts)


def _is_before_group(script: Script, node: ast.AST, helper: str, depth: int) -> bool:
    """Whether no call above a place, nor above that of each caller up to the start of the program, may join a job."""
    function = script.function_of(node)
    if depth == 0 or any(_may_join(script, one, helper) for one in _calls_above(script, node, function)):
        return False
    if function is None:
        return True
    callers = list(calls_of(script, function))
    if not callers:
        # The start that Hydra, Click or Fire give a program
        return bool(function.decorator_list) and isinstance(script.parent(function), ast.Module)
    return all(_is_before_group(script, one, helper, depth - 1) for one in callers)


def _calls_above(script: Script, node: ast.AST, function: FunctionNode | None) -> Iterator[ast.Call]:
    line = getattr(node, "lineno", 0)
    for one in script.all(ast.Call):
        if script.function_of(one) in (None, function) and one.lineno < line:
            yield one


def _may_join(script: Script, call: ast.Call, helper: str, depth: int = _DEPTH) -> bool:
    """Whether a call may create a process group: a function of the project by what it calls, another one by its
    name."""
    if last_name(call.func) == helper or _OF_TORCH.match(script.name(call.func)):
        return False
    given = " ".join(ast.unparse(one) for one in (*call.args, *(word.value for word in call.keywords)))
    if _OF_OUTPUT.search(given):
        return False
    found = called_function(script, call)
    if found is None or depth == 0:
        return _MAY_JOIN.search(ast.unparse(call.func)) is not None
    other, function = found
    return any(_may_join(other, one, helper, depth - 1) for one in other.inside(function, ast.Call))

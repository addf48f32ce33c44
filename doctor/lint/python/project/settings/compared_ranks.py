"""Whether a test of the rank certainly differs among ranks: it is compared with what is the same on all of them."""

from __future__ import annotations

import ast
import re

from doctor.lint.python.rank_branches import (
    OF_THE_JOB,
    RANK_NAMES,
    RankCondition,
    is_rank,
    is_rank_test,
    rank_conditions,
)
from doctor.lint.python.script import UNKNOWN, FunctionNode, Script, last_name, module_of

_DEPTH = 4
_MOST_USERS = 8
"""Files with the name of a function that are parsed."""
_CHOSEN = re.compile(
    r"^(?:\w+_)?(?:src|dst|dest|source|target|root|main|master|chief|leader|lead|head|writer|saver|save|logging|log|primary|"
    r"first|last|zero|coordinator|driver|server|owner|broadcast\w*|save\w*|print\w*|eval\w*|num\w*|n|"
    r"max\w*|min\w*|total\w*)(?:_?(?:rank|index|idx|id|proc|process|node)s?)?$|"
    r"(?:^|_)size$|^(?:RANK_ZERO|(?!(?:\w+_)?RANK$)[A-Z][A-Z_0-9]+)$"
)
"""Names of ranks that a program chooses for all: ``src``, ``root_rank``, ``main_process_index``."""
_SETTINGS = re.compile(r"(?:^|_)(?:args?|opts?|options|cfg|config|conf|flags|hparams|params|settings)$", re.IGNORECASE)
_KEEPS = frozenset(
    {"int", "str", "len", "min", "max", "range", "list", "set", "tuple", "sorted", "abs", "round", "bool"}
)
_OF_ALL = re.compile(r"world_?size|_size$|device_count|process_count|num_|getenv|^get$", re.IGNORECASE)
"""Functions that give the same number on all ranks of a job."""


def is_never_certain(script: Script, node: ast.AST) -> bool:
    """Whether a place runs under conditions on the rank, of which none certainly differs among ranks."""
    found = list(rank_conditions(script, node))
    return bool(found) and not any(is_certain_of(script, one) for one in found)


def is_certain_of(script: Script, condition: RankCondition) -> bool:
    """Whether a condition on the rank certainly differs among ranks."""
    test = getattr(condition.where, "test", condition.where)
    if condition.test.startswith("not (") and isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        # Ranks are kept out only with that option: ``if opt["model"] == "sr" and rank == 0: ... else: reduce(x)``.
        if any(_asks_for_option(one) for one in test.values if not is_rank_test(script, one)):
            return False
    return not isinstance(test, ast.expr) or differs(script, test)


def _asks_for_option(test: ast.expr) -> bool:
    """``opt["model"] in ("sr", "srgan")``, ``args.mode == "test"``, ``not args.train``."""
    if isinstance(test, ast.UnaryOp):
        return _asks_for_option(test.operand)
    if isinstance(test, ast.Compare):
        values = (part for one in test.comparators for part in ast.walk(one) if isinstance(part, ast.expr))
        is_constant = all(isinstance(one, (ast.Constant, ast.Tuple, ast.List, ast.Set)) for one in values)
        return is_constant and _asks_for_option(test.left)
    inner = test
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
    return inner is not test and isinstance(inner, ast.Name) and bool(_SETTINGS.search(inner.id))


def differs(script: Script, test: ast.expr, depth: int = _DEPTH) -> bool:
    """Whether a test of the rank is true on some ranks and false on others in any job of several: it asks for the main
    process, or compares the rank with what is the same on all ranks. Of two values that the program computes of the
    rank (``send_to == rank``), each rank may have the same ones."""
    if isinstance(test, ast.BoolOp):
        return any(is_rank_test(script, one) and differs(script, one, depth) for one in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_rank(script, test.operand) or differs(script, test.operand, depth)
    if isinstance(test, ast.Name):
        values = script.values_of(test)
        return not (len(values) == 1 and depth) or values[0] is test or differs(script, values[0], depth - 1)
    if not isinstance(test, ast.Compare):
        return True
    sides = (test.left, *test.comparators)
    of_ranks = [one for one in sides if _is_of_own_rank(script, one)]
    return len(of_ranks) < 2 and all(one in of_ranks or _is_shared(script, one, depth) for one in sides)


def _is_of_own_rank(script: Script, side: ast.expr) -> bool:
    """Whether a side of a comparison is computed of the rank of the process, by its names."""
    parts = (one for one in ast.walk(side) if isinstance(one, ast.expr))
    return any(is_rank(script, one) and not _is_chosen(script, one) for one in parts)


def _is_chosen(script: Script, node: ast.expr) -> bool:
    """Whether a name of a rank is that of one which the program chooses, or only has constants."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    if _CHOSEN.match(last_name(node)):
        return True
    values = script.values_of(node)
    return bool(values) and values != (node,) and all(script.value(one) is not UNKNOWN for one in values)


def _is_shared(script: Script, node: ast.expr, depth: int) -> bool:
    """Whether an expression has the same value on all ranks, as far as the project shows."""
    if script.value(node) is not UNKNOWN:
        return True
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(_is_shared(script, one, depth) for one in node.elts)
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.BoolOp)):
        return all(_is_shared(script, one, depth) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))
    if isinstance(node, ast.Subscript):
        return _is_shared(script, node.value, depth)
    if isinstance(node, ast.Call):
        called = last_name(node.func)
        if called in _KEEPS:
            return all(_is_shared(script, one, depth) for one in node.args)
        return bool(_OF_ALL.search(called))
    if isinstance(node, ast.Attribute):
        return _is_shared_attribute(script, node, depth)
    return isinstance(node, ast.Name) and _is_shared_name(script, node, depth)


def _is_shared_attribute(script: Script, node: ast.Attribute, depth: int) -> bool:
    if _CHOSEN.match(node.attr) or OF_THE_JOB.search(node.attr) or _SETTINGS.search(last_name(node.value)):
        return not RANK_NAMES.search(node.attr) or bool(_CHOSEN.match(node.attr))
    values = script.values_of(node)
    return bool(depth and values) and values != (node,) and all(_is_shared(script, one, depth - 1) for one in values)


def _is_shared_name(script: Script, node: ast.Name, depth: int) -> bool:
    if _CHOSEN.match(node.id) or OF_THE_JOB.search(node.id) or _SETTINGS.search(node.id):
        return True
    scope = script.scope_of(node, node.id)
    bound = scope.names[node.id] if scope is not None else []
    return bool(depth and bound) and all(_is_shared_binding(script, node, one, depth) for one in bound)


def _is_shared_binding(script: Script, node: ast.Name, bound: ast.AST | str, depth: int) -> bool:
    if isinstance(bound, (ast.For, ast.comprehension)):
        return not any(is_rank(script, one) for one in ast.walk(bound.iter) if isinstance(one, ast.expr))
    if isinstance(bound, ast.arg):
        function = script.function_of(bound)
        return function is not None and _is_given_the_same(script, function, bound, depth - 1)
    return isinstance(bound, ast.expr) and _is_shared(script, bound, depth - 1)


def _is_given_the_same(script: Script, function: FunctionNode, parameter: ast.arg, depth: int) -> bool:
    """Whether every call of a function in the project, of which there is one, gives a parameter what is the same on all
    ranks, or leaves it at its constant default."""
    modules, name = script.modules, function.name
    arguments = [*function.args.posonlyargs, *function.args.args]
    place = arguments.index(parameter) if parameter in arguments else None
    if place is not None and arguments[0].arg in ("self", "cls") and script.class_of(function) is not None:
        place -= 1
    files = [(script.path, script.text)] if modules is None else list(modules.mentioning(f"{name}("))
    if name.startswith("__") or not depth or len(files) > _MOST_USERS:
        return False
    count = 0
    for shown, text in files:
        try:
            other = script if shown == script.path or modules is None else module_of(modules, shown, text)
        except (SyntaxError, ValueError, RecursionError):
            return False
        for call in other.all(ast.Call):
            if last_name(call.func) != name:
                continue
            count += 1
            given = other.argument(call, parameter.arg, place)
            if other.is_open(call) or (given is not None and not _is_given_to_all(other, given, depth)):
                return False
    return count > 0


def _is_given_to_all(script: Script, given: ast.expr, depth: int) -> bool:
    parts = (one for one in ast.walk(given) if isinstance(one, ast.expr))
    return not any(is_rank(script, one) for one in parts) and _is_shared(script, given, depth)

"""Code that no run reaches: every way to it ends at a name without a value yet, or a call that its function refuses."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from doctor.knowledge.lightning_api import argument as trainer_argument
from doctor.knowledge.releases import release
from doctor.lint.engine.releases import Releases
from doctor.lint.python.gpu_use import block_with_ranks, runs_alone
from doctor.lint.python.project.absent_values import reads_absent_value
from doctor.lint.python.project.call_graph import CALLED_BY_TORCH, INERT, PLAIN_BASES
from doctor.lint.python.project.failing_start import names_by_star
from doctor.lint.python.project.never_used import is_defined_nowhere
from doctor.lint.python.project.settings.options import lacks_option
from doctor.lint.python.project.tracker_runs import logs_without_run
from doctor.lint.python.project.unreached import may_import
from doctor.lint.python.rank_branches import (
    RankCondition,
    is_rank_test,
    plain_test,
    rank_condition,
    statements_above,
)
from doctor.lint.python.script import FunctionNode, ProjectModules, Script, last_name, parsed, per_script
from doctor.lint.python.training import TRAINER

_DEPTH = 4
"""Functions that are followed to their callers."""
_EXECUTED = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
_NOT_ALWAYS = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OWN_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOADER = "torch.utils.data.DataLoader"
_UNKNOWN_NAMES = re.compile(r"(?<![.\w])(?:exec|globals|__import__|get_ipython)\(")
"""Ways to bind names of a module that the order of lines does not show."""


class _Method(NamedTuple):
    """A definition in a class, whose first parameter a call of ``self.method()`` gives."""

    function: FunctionNode


_Meant = FunctionNode | ast.ClassDef | _Method


def fails_before(script: Script, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Whether every run fails before it comes to a place: above it, or above each use of its function or class, a
    statement reads a name that only lines below bind, or an option that nothing declares, or calls a function of the
    file with arguments that it does not take; or the place, or each use of its function, does so itself."""
    if script.path.endswith(".ipynb"):
        return False  # cells run in any order
    if any(_is_known_to_fail(script, one) for one in _run_before(script, node)):
        return True
    if any(lacks_option(script, one) and not _is_conditional(script, one, node) for one in ast.walk(node)):
        return True
    if depth and _is_method_vain(script, node, depth):
        return True
    holder = _holder(script, node)
    if holder is None or depth == 0 or holder.decorator_list:
        return False
    uses = _uses(script)[holder.name]
    return (
        bool(uses)
        and all(_is_use_vain(script, one, holder, depth) for one in uses)
        and not _is_imported_by_others(script, holder)
    )


def _is_method_vain(script: Script, node: ast.AST, depth: int) -> bool:
    """Whether a place is in a method of a plain class, which only the file uses, and all uses of the method are calls
    that it refuses, or places that no run gets to."""
    around = [node, *script.around(node)]
    owner = next((one for one in around if isinstance(one, ast.ClassDef)), None)
    method = around[around.index(owner) - 1] if owner is not None else None
    if owner is None or not isinstance(method, _FUNCTIONS) or method.decorator_list or _is_hook(method.name):
        return False
    is_plain = all(last_name(one) in PLAIN_BASES for one in owner.bases) and not owner.keywords
    if not isinstance(script.parent(owner), ast.Module) or not is_plain:
        return False
    uses = [one for one in script.all(ast.Attribute) if one.attr == method.name]
    words = len(re.findall(rf"\b{re.escape(method.name)}\b", script.text))
    if not uses or words != len(uses) + 1 or _is_imported_by_others(script, owner):
        return False
    return all(method not in script.around(one) and _fails_at(script, one, depth - 1) for one in uses)


def _is_hook(name: str) -> bool:
    return name.startswith("__") or name in CALLED_BY_TORCH


def _fails_at(script: Script, use: ast.Attribute, depth: int) -> bool:
    call = script.parent(use)
    is_refused = isinstance(call, ast.Call) and call.func is use and refuses(script, call)
    return is_refused or fails_before(script, use, depth)


def _run_before(script: Script, node: ast.AST) -> Iterator[ast.stmt]:
    """The statements above a place in its function, and in the branches there on a name or an attribute that a branch
    around the place requires, too."""
    required = {ast.unparse(one) for outer in script.around(node) for one in _required_by(outer, node)}
    waiting = list(statements_above(script, node))
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, ast.If) and isinstance(one.test, (ast.Name, ast.Attribute)):
            is_entered = ast.unparse(one.test) in required and not _is_set_between(script, one, node)
            waiting += one.body if is_entered else ()


def _is_set_between(script: Script, branch: ast.If, node: ast.AST) -> bool:
    """Whether what a branch asks for may be set again in it, or between it and a place below it."""
    last, last_line = last_name(branch.test), getattr(node, "lineno", branch.lineno)
    named: list[ast.Name | ast.Attribute] = [*script.all(ast.Name), *script.all(ast.Attribute)]
    stores = (one for one in named if isinstance(one.ctx, ast.Store) and last_name(one) == last)
    return any(branch.lineno <= one.lineno <= last_line for one in stores)


def _required_by(outer: ast.AST, node: ast.AST) -> list[ast.expr]:
    """What is true in the body of a branch around a node: ``args.track`` of ``if args.track and rank == 0``."""
    if not isinstance(outer, ast.If) or not any(node is part for one in outer.body for part in ast.walk(one)):
        return []
    test = outer.test
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def is_left_to_one_rank(script: Script, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Whether the other ranks fail before they come to a place, or in its own statement: they read a name that only one
    rank binds; or all that uses its function is for one rank, or is such a place."""
    if script.path.endswith(".ipynb"):
        return False
    own = script.statement_of(node)
    parts = [own.iter] if isinstance(own, (ast.For, ast.AsyncFor)) else list(_always(own))
    above = (part for one in _on_the_way(script, node) for part in _always(one))
    if any(_fails_on_others(script, one) for one in (*parts, *above)):
        return True
    holder = _holder(script, node)
    if not isinstance(holder, _FUNCTIONS) or depth == 0 or holder.decorator_list:
        return False
    uses = [one for one in _uses(script)[holder.name] if holder not in script.around(one)]
    for_all = [one for one in uses if not _is_kept_to_one(script, one)]
    return (
        bool(for_all)
        and all(is_left_to_one_rank(script, one, depth - 1) or fails_before(script, one) for one in for_all)
        and not _is_imported_by_others(script, holder)
    )


def _is_kept_to_one(script: Script, node: ast.AST) -> bool:
    """Whether a place is for one rank, also under a name that has the condition wherever there are ranks."""
    if rank_condition(script, node) is not None:
        return True
    tests = [one for outer in script.around(node) for one in _required_by(outer, node) if isinstance(one, ast.Name)]
    for values in map(script.values_of, tests):
        of_ranks = [one for one in values if not runs_alone(script, one)]
        if of_ranks and all(is_rank_test(script, one) for one in of_ranks):
            return True
    return False


def _on_the_way(script: Script, node: ast.AST) -> Iterator[ast.stmt]:
    """The statements above a place in its function, and in the branches there with the condition of one around it."""
    tests = {ast.unparse(one.test) for one in script.around(node) if isinstance(one, ast.If)}
    waiting = list(statements_above(script, node))
    while waiting:
        one = waiting.pop()
        yield one
        is_entered = isinstance(one, ast.If) and ast.unparse(one.test) in tests
        if isinstance(one, (ast.If, ast.With, ast.AsyncWith)) and (is_entered or not isinstance(one, ast.If)):
            waiting += one.body


def _fails_on_others(script: Script, part: ast.AST) -> bool:
    """Whether a part of a statement reads a name that is bound under one rank condition only, or an entry of what is
    ``None`` on the other ranks, on each rank that gets there."""
    if rank_condition(script, part) is not None:
        return False
    entries = (*script.inside(part, ast.Subscript), *script.inside(part, ast.Attribute))
    if any(reads_absent_value(script, one) and not _is_conditional(script, one, part) for one in entries):
        return True
    return any(
        isinstance(one.ctx, ast.Load) and not _is_conditional(script, one, part) and _is_of_one_rank(script, one)
        for one in script.inside(part, ast.Name)
    )


_OF_SOME = re.compile(r"[<>%]|!=|^not \(|\bin (?![\[(]-1, 0[\])])")
"""Tests of a rank that several pass: ``rank > 0``, ``rank % 2 == 0``, ``rank in (0, 1)``."""


def _is_of_one_rank(script: Script, name: ast.Name) -> bool:
    condition = binding_condition(script, name)
    return condition is not None and not _OF_SOME.search(plain_test(condition.test))


def binding_condition(script: Script, name: ast.Name) -> RankCondition | None:
    """The only condition on the rank under which a name is bound; ``None`` if it is bound in another way, too."""
    scope = script.scope_of(name, name.id)
    if scope is None or isinstance(scope.node, (ast.ClassDef, ast.Lambda)) or hasattr(builtins, name.id):
        return None
    if isinstance(scope.node, ast.Module) and (_UNKNOWN_NAMES.search(script.text) or _may_be_starred(script, name.id)):
        return None
    binders = _binders(script, scope.node).get(name.id, [])
    found = [rank_condition(script, one) if one is not None else None for one in binders]
    tests = {plain_test(one.test) if one is not None else None for one in found}
    return found[0] if len(tests) == 1 else None


def training_fails(script: Script) -> bool:
    """Whether each backward pass of a script is in a loop of a function whose first round always fails, also at a value
    that nothing defines."""
    loops = [_loops_around(script, call) for call in script.method_calls("backward")]
    return bool(loops) and all(
        any(_is_known_to_fail(script, one) or _reads_undefined(script, one) for one in around) for around in loops
    )


def _loops_around(script: Script, node: ast.AST) -> list[ast.stmt]:
    return [one for one in script.around(node) if isinstance(one, _LOOPS)]


def _reads_undefined(script: Script, loop: ast.stmt) -> bool:
    """Whether each round of a loop compares or prints a name that nothing defines. What is called may be left to the
    reader of an example."""
    for part in _always(loop):
        for one in script.inside(part, ast.Name):
            outer = script.parent(one)
            is_read = isinstance(outer, (ast.Compare, ast.FormattedValue, ast.BinOp)) and isinstance(one.ctx, ast.Load)
            if is_read and not _is_conditional(script, one, part) and is_defined_nowhere(script, one.id):
                return True
    return False


def makes_no_trainer(script: Script, node: ast.AST) -> bool:
    """Whether a place is in a script whose Trainers are all refused by every Lightning that the project permits: below
    one of them, or in a class that only they get."""
    trainers = list(script.calls(TRAINER))
    if not trainers or not all(is_refused_by_lightning(script, one) for one in trainers):
        return False
    holder = _outermost(script, node)
    if isinstance(holder, ast.ClassDef) and not _is_imported_by_others(script, holder):
        return not any(holder in script.around(one) for one in trainers)
    above = list(statements_above(script, node))
    return any(script.statement_of(one) in above for one in trainers)


def is_refused_by_lightning(script: Script, trainer: ast.Call) -> bool:
    """Whether a Trainer gets an argument that the oldest Lightning which the project permits has no more."""
    if not isinstance(script.releases, Releases):
        return False
    oldest = release(script.releases.oldest("lightning"))
    oldest = (*oldest, 0, 0)[:3] if oldest else ()
    given = (trainer_argument(one.arg) for one in trainer.keywords if one.arg)
    return bool(oldest) and any(one is not None and one.removed and oldest >= release(one.removed) for one in given)


def fails_with_ranks(script: Script, node: ast.AST) -> bool:
    """Whether every run with several ranks fails above a place of its function: in the branch of the option that makes
    the ranks."""
    branches = (one for one in statements_above(script, node) if isinstance(one, ast.If))
    return any(_is_known_to_fail(script, one) for branch in branches for one in block_with_ranks(script, branch))


def _is_use_vain(script: Script, use: ast.Name, holder: ast.stmt, depth: int) -> bool:
    """Whether a use of a definition fails: above its definition, as a call that is refused, or in a place that no run
    reaches."""
    call = script.parent(use)
    if _is_unbound(script, use):
        return True
    if isinstance(call, ast.Call) and call.func is use and refuses(script, call):
        return True
    return holder not in script.around(use) and fails_before(script, use, depth - 1)


def _holder(script: Script, node: ast.AST) -> FunctionNode | ast.ClassDef | None:
    """The function around a place if it is one of another function, which uses it, else the function or class of the
    module."""
    own = script.function_of(node)
    outer = script.nearest(own, *_OWN_SCOPES) if own is not None else None
    is_local = own is not None and isinstance(outer, _FUNCTIONS) and not own.decorator_list
    return own if own is not None and is_local and _uses(script)[own.name] else _outermost(script, node)


def _outermost(script: Script, node: ast.AST) -> FunctionNode | ast.ClassDef | None:
    """The function or class of the module around a place."""
    around = [node, *script.around(node)]
    found = around[-2] if len(around) > 1 else None
    return found if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else None


@per_script
def _uses(script: Script) -> dict[str, list[ast.Name]]:
    """The places that read each name, besides ``super(Net, self)`` and annotations, which call nothing."""
    found: dict[str, list[ast.Name]] = defaultdict(list)
    for one in script.all(ast.Name):
        call = script.parent(one)
        is_inert = isinstance(call, ast.Call) and call.func is not one and last_name(call.func) == "super"
        if isinstance(one.ctx, ast.Load) and not is_inert and not isinstance(call, (ast.arg, ast.AnnAssign)):
            found[one.id].append(one)
    return found


def _is_imported_by_others(script: Script, holder: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether another file of the project may use a function or class of this one."""
    if script.modules is None or not isinstance(script.parent(holder), ast.Module):
        return False
    name = holder.name
    place, word = PurePath(script.location or script.path), re.compile(rf"\b{re.escape(name)}\b")
    return any(
        shown != script.path and word.search(text) is not None and may_import(place, text)
        for shown, text in script.modules.mentioning(place.stem)
    )


@per_script
def _answers(_script: Script) -> dict[ast.stmt, bool]:
    return {}


def _is_known_to_fail(script: Script, statement: ast.stmt) -> bool:
    answers = _answers(script)
    if statement not in answers:
        answers[statement] = False  # while it is searched: functions that call each other
        answers[statement] = _fails(script, statement)
    return answers[statement]


def _fails(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement fails whenever it is reached, with loops that run at least once."""
    for part in _always(statement):
        for one in script.inside(part, ast.Name):
            if isinstance(one.ctx, ast.Load) and not _is_conditional(script, one, part) and _is_unbound(script, one):
                return True
        for call in script.inside(part, ast.Call):
            is_refused = refuses(script, call) or lacks_method(script, call) or logs_without_run(script, call)
            if not _is_conditional(script, call, part) and (is_refused or _fails_inside(script, call)):
                return True
        for read in script.inside(part, ast.Attribute):
            if lacks_option(script, read) and not _is_conditional(script, read, part):
                return True
    return False


def _fails_inside(script: Script, call: ast.Call) -> bool:
    """Whether the function of the file that a call runs fails in each run, before it may return."""
    called = [_called(one)[0] for one in _meant(script, call.func)]
    return bool(called) and all(one is not None and _fails_in_each_run(script, one) for one in called)


def _fails_in_each_run(script: Script, function: FunctionNode) -> bool:
    known = script.all(type(function))
    if not isinstance(function, ast.FunctionDef) or not any(one is function for one in known):
        return False
    if any(True for kind in (ast.Yield, ast.YieldFrom) for _ in script.inside(function, kind)):
        return False  # a generator runs when it is read
    for one in function.body:
        if _is_known_to_fail(script, one):
            return True
        if any(True for _ in script.inside(one, ast.Return)):
            return False
    return False


def _always(statement: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement that run whenever it is reached. What ``try`` has may be caught."""
    if isinstance(statement, _EXECUTED):
        yield statement
    elif isinstance(statement, (ast.If, ast.While, ast.Assert)):
        yield statement.test
        if isinstance(statement, ast.While) and isinstance(statement.test, ast.Constant) and statement.test.value:
            yield from _of_block(statement.body)
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        yield statement.iter
        yield from _of_block(statement.body)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        yield from (one.context_expr for one in statement.items)


def _of_block(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for one in body:
        yield from _always(one)
        if any(isinstance(part, (ast.Continue, ast.Break, ast.Return, ast.Raise)) for part in ast.walk(one)):
            return  # what is below may never run


def _is_conditional(script: Script, node: ast.AST, last: ast.AST) -> bool:
    if node is last:
        return False
    for one in script.around(node):
        if isinstance(one, _NOT_ALWAYS):
            return True
        if one is last:
            return False
    return True


def _is_unbound(script: Script, name: ast.Name) -> bool:
    """Whether a name has no value at a place of its own function or module when a run first comes there: all that
    binds it is below, outside of loops around both or in branches of them, or nothing binds it, and the place is in the
    block that only a program runs."""
    if not isinstance(name.ctx, ast.Load) or hasattr(builtins, name.id):
        return False
    around = list(script.around(name))
    scope = next((one for one in around if isinstance(one, (*_OWN_SCOPES, ast.Module))), None)
    if scope is None or isinstance(scope, (ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(scope, ast.Module) and (_UNKNOWN_NAMES.search(script.text) or _may_be_starred(script, name.id)):
        return False
    binders = _binders(script, scope).get(name.id, [])
    if not binders:
        is_called = isinstance(around[0], ast.Call) and around[0].func is name  # an example may leave out functions
        is_run = _is_of_main(script, around) if isinstance(scope, ast.Module) else _is_of_project(script)
        return is_run and (not is_called or isinstance(scope, ast.Module)) and is_defined_nowhere(script, name.id)
    loops = [one for one in around[: around.index(scope)] if isinstance(one, _LOOPS)]
    return bool(binders) and all(
        one is not None
        and (one.lineno > (name.end_lineno or name.lineno) or _is_target_of(script, one, name))
        and (_is_in_first_round(script, one, around) or _is_in_branch_of(script, one, loops))
        for one in binders
    )


def _is_target_of(script: Script, binder: ast.stmt | ast.expr, name: ast.Name) -> bool:
    """Whether an assignment binds a name after it has read it: ``scale = scale.detach()``."""
    own = script.statement_of(binder)
    value = own.value if isinstance(own, (ast.Assign, ast.AnnAssign)) else None
    parts = [] if value is None else list(ast.walk(value))
    return name in parts and binder not in parts


def _is_of_main(script: Script, around: Sequence[ast.AST]) -> bool:
    """Whether a place is below ``if __name__ == "__main__":`` of a project's file: an example may leave out names."""
    tests = (ast.unparse(one.test) for one in around if isinstance(one, ast.If))
    return _is_of_project(script) and "__name__ == '__main__'" in tests


def _is_of_project(script: Script) -> bool:
    return script.modules is not None and not script.modules.is_one_file


def _may_be_starred(script: Script, name: str) -> bool:
    """Whether ``from module import *`` may give the module a name: not one of the project without it."""
    names = names_by_star(script)
    return names is None or name in names


_STRAIGHT = (ast.expr, ast.keyword, *_EXECUTED, ast.With, ast.AsyncWith, ast.withitem)
"""What may be around a place that each round of a loop comes to."""


def _is_in_first_round(script: Script, binder: ast.AST, around: Sequence[ast.AST]) -> bool:
    """Whether a place below which a name is bound is read before that in the first round of the loops around both: none
    is around both, or no branch and no other loop is between the innermost of them and the place."""
    of_binder = list(script.around(binder))
    shared = next((one for one in around if isinstance(one, _LOOPS) and one in of_binder), None)
    if shared is None:
        return True
    between = itertools.takewhile(lambda one: one is not shared, around)
    return all(isinstance(one, _STRAIGHT) and not isinstance(one, _NOT_ALWAYS) for one in between)


def _is_in_branch_of(script: Script, node: ast.AST, loops: Sequence[ast.AST]) -> bool:
    """Whether a node is in a branch of the innermost loop, which its first rounds may not take."""
    inner = list(itertools.takewhile(lambda one: one not in loops, script.around(node)))
    return any(isinstance(one, ast.If) and node not in ast.walk(one.test) for one in inner)


_Binders = dict[str, list["ast.stmt | ast.expr | None"]]


def _binders(script: Script, scope: ast.AST) -> _Binders:
    """What binds each name of a function or module, ``None`` for a parameter and other names that it always has."""
    known = _binders_by_scope(script)
    if scope not in known:
        known[scope] = _found_binders(script, scope)
    return known[scope]


@per_script
def _binders_by_scope(_script: Script) -> dict[ast.AST, _Binders]:
    return {}


def _found_binders(script: Script, scope: ast.AST) -> _Binders:
    found: _Binders = defaultdict(list)
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = scope.args
        parameters = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        always = [one.arg for one in parameters if one is not None]
    else:  # what a function gives to the module
        always = [name for one in script.all(ast.Global) for name in one.names]
    for name in always:
        found[name].append(None)
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        for name, binder in _bound_by(script, node):
            found[name].append(binder)
        if not isinstance(node, (*_OWN_SCOPES, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            waiting += ast.iter_child_nodes(node)
    return found


def _bound_by(script: Script, node: ast.AST) -> Iterator[tuple[str, ast.stmt | ast.expr | None]]:
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):  # ``del`` removes what had a value
            yield node.id, None if isinstance(node.ctx, ast.Del) else node
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0], script.statement_of(node)
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from ((name, None) for name in node.names)
    elif isinstance(node, ast.MatchMapping):
        yield node.rest or "", None
    elif isinstance(name := getattr(node, "name", None), str):
        yield name, node if isinstance(node, ast.stmt) else None


def refuses(script: Script, call: ast.Call) -> bool:
    """Whether a function, class or method of the file or its project, the only thing of that name there, does not take
    the arguments of a call: one that it requires is missing, or one is too many; or a data loader gets two that exclude
    each other."""
    if script.name(call.func) == _LOADER:
        return _is_shuffled_twice(script, call)
    if script.is_open(call) or any(one.arg is None for one in call.keywords):
        return False  # what a dictionary holds is not followed
    called = [_called(one) for one in _meant(script, call.func)]
    return bool(called) and all(one is not None and not _takes(one.args, call, given) for one, given in called)


def _meant(script: Script, function: ast.expr) -> list[_Meant]:
    """What a call may run: the only definition of a name in the file, that of a name in each module of the project from
    which it may be imported, or the only method of that name in the class of ``self``. Empty if it is unknown."""
    if isinstance(function, ast.Attribute):
        return _meant_method(script, function)
    if not isinstance(function, ast.Name):
        return []
    scope = script.scope_of(function, function.id)
    bound = scope.names[function.id] if scope is not None else []
    if len(bound) == 1 and scope is not None and isinstance(scope.node, ast.Module):
        if isinstance(bound[0], (*_FUNCTIONS, ast.ClassDef)):
            return [bound[0]]
        if imported := _imported(script, function.id):
            return imported
    return _meant_forward(script, function)


def _imported(script: Script, name: str) -> list[_Meant]:
    """The definitions of an imported name, at the top level of the modules of the project that the import may mean."""
    found = [
        ("." * node.level + (node.module or ""), one.name)
        for node in script.tree.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if (one.asname or one.name) == name
    ]
    if len(found) != 1 or script.modules is None or not script.modules.has(script.location, found[0][0]):
        return []
    module, own = found[0]
    defined = [_only_definition(script.modules, shown, own) for shown in script.modules.named(script.path, module)]
    return [one for one in defined if one is not None] if None not in defined else []


def _only_definition(modules: ProjectModules, shown: str, name: str) -> FunctionNode | ast.ClassDef | None:
    """What a module defines under a name that it binds once, also by none of its other statements."""
    key = ("only definition", shown, name)
    if key not in modules.memo:
        modules.memo[key] = _found_definition(modules.text_at(shown), name)
    found: FunctionNode | ast.ClassDef | None = modules.memo[key]
    return found


def _found_definition(text: str, name: str) -> FunctionNode | ast.ClassDef | None:
    if not re.search(rf"^(?:async )?(?:def|class) {re.escape(name)}\b", text, re.MULTILINE) or "import *" in text:
        return None
    try:
        tree = parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    bound = [one for one in ast.walk(tree) if _binds(one, name)]
    is_one = len(bound) == 1 and bound[0] in tree.body
    return bound[0] if is_one and isinstance(bound[0], (*_FUNCTIONS, ast.ClassDef)) else None


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.alias):
        return (node.asname or node.name.partition(".")[0]) == name
    return isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name


def lacks_method(script: Script, call: ast.Call) -> bool:
    """Whether a call is of a method which the only class of the project that the object may be of does not have, nor
    gets from anything: ``env = Env(args)`` above ``env.set_batch(batch)``."""
    method = call.func
    if not isinstance(method, ast.Attribute) or not isinstance(method.value, ast.Name):
        return False
    values = script.values_of(method.value)
    scope = script.scope_of(method.value, method.value.id)
    if scope is None or len(values) != 1 or len(scope.names[method.value.id]) != 1:
        return False
    made = _meant(script, values[0].func) if isinstance(values[0], ast.Call) else []
    owners = [one for one in made if isinstance(one, ast.ClassDef)]
    if not made or len(owners) != len(made) or not all(_is_without(one, method.attr) for one in owners):
        return False
    sets = re.compile(rf"\.{re.escape(method.attr)}\s*=(?!=)|[\"']{re.escape(method.attr)}[\"']")
    texts = [script.text]
    if script.modules is not None:
        texts += [text for _, text in script.modules.mentioning(method.attr)]
    return not any(map(sets.search, texts))


_GIVES_ANY = frozenset({"__getattr__", "__getattribute__", "__new__", "__dict__", "setattr", "exec", "vars"})
"""Ways of a class to have attributes that its text does not name."""


def _is_without(owner: ast.ClassDef, name: str) -> bool:
    """Whether a class of no other bases than plain ones binds no attribute of a name."""
    if owner.decorator_list or owner.keywords or not all(last_name(one) in ("object", "ABC") for one in owner.bases):
        return False
    words = {word for one in ast.walk(owner) for word in _words_of(one)}
    return name not in words and not words & _GIVES_ANY


def _words_of(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    return (node.name,) if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) else ()


def _meant_method(script: Script, function: ast.Attribute) -> list[_Meant]:
    """The method of ``self`` that a call in its class runs, unless another class derives from that one, or something
    sets an attribute of that name."""
    owner, method = script.class_of(function), script.function_of(function)
    if owner is None or method is None or script.parent(method) is not owner or method.decorator_list:
        return []
    given = [one.arg for one in (*method.args.posonlyargs, *method.args.args)][:1]
    if not isinstance(function.value, ast.Name) or [function.value.id] != given:
        return []
    same = [one for one in owner.body if isinstance(one, _FUNCTIONS) and one.name == function.attr]
    others = rf"\.{re.escape(function.attr)}\s*=(?!=)|\bsetattr\(|\bclass\s+\w+\s*\([^)\n]*\b{re.escape(owner.name)}\b"
    texts = [script.text]
    if script.modules is not None:
        texts += [text for _, text in script.modules.mentioning(owner.name)]
    return [] if len(same) != 1 or any(re.search(others, text) for text in texts) else [_Method(same[0])]


_KEEPS = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "double", "requires_grad_"})
"""Methods of modules that return the module."""
_WRAPS = frozenset(
    {
        *("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "DataParallel", "compile"),
        *("convert_sync_batchnorm", "convert_syncbn_model"),
    }
)
"""Wrappers that give the arguments of a call to the module."""


def _meant_forward(script: Script, model: ast.Name) -> list[_Meant]:
    """``forward`` of the only class of the project of which a name is an object, also in a wrapper."""
    found: list[_Meant] = []
    scope, values = script.scope_of(model, model.id), script.values_of(model)
    if scope is None or len(values) != len(scope.names[model.id]):
        return []
    for value in values:
        inner: ast.expr = value
        while isinstance(inner, ast.Call) and (given := _kept(inner)) is not None:
            inner = given
        if isinstance(inner, ast.Name) and inner.id == model.id:
            continue
        made = _meant(script, inner.func) if isinstance(inner, ast.Call) else []
        if len(made) != 1 or not isinstance(made[0], ast.ClassDef):
            return []
        methods = [one for one in made[0].body if isinstance(one, _FUNCTIONS)]
        forward = [_Method(one) for one in methods if one.name == "forward"]
        if len(forward) != 1 or any(one.name == "__call__" for one in methods) or _has_own_call(script, made[0]):
            return []
        found += forward
    return found


def _has_own_call(script: Script, owner: ast.ClassDef) -> bool:
    """Whether a base of a class may be one of the file or the project with ``__call__``, which may take other
    arguments."""
    bases = [f"class {last_name(one)}" for one in owner.bases]
    texts = [script.text]
    if script.modules is not None:
        texts += [text for base in bases for _, text in script.modules.mentioning(base)]
    return any("def __call__" in text for text in texts if any(base in text for base in bases))


def _kept(call: ast.Call) -> ast.expr | None:
    """The module that a call returns or wraps."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _KEEPS:
        return call.func.value
    return call.args[0] if last_name(call.func) in _WRAPS and call.args else None


def _is_shuffled_twice(script: Script, loader: ast.Call) -> bool:
    """``DataLoader(data, shuffle=True, sampler=sampler)``: "sampler option is mutually exclusive with shuffle"."""
    samplers = (script.argument(loader, name, place) for name, place in (("sampler", 3), ("batch_sampler", 4)))
    given = [script.values_of(one) for one in samplers if one is not None]
    is_certain = any(values and all(isinstance(one, ast.Call) for one in values) for values in given)
    return is_certain and script.value(script.argument(loader, "shuffle", 2)) is True


def _called(definition: _Meant) -> tuple[FunctionNode | None, int]:
    """The function that a call of a definition runs, and how many of its parameters the call itself gives."""
    if isinstance(definition, _Method):
        function = definition.function
        inert = {last_name(one) for one in function.decorator_list}
        is_plain = inert <= INERT - {"property", "cached_property", "setter"}
        return (function if is_plain else None), int("staticmethod" not in inert)
    if isinstance(definition, _FUNCTIONS):
        is_inert = all(last_name(one) in INERT for one in definition.decorator_list)
        return (definition if is_inert else None), 0
    if not isinstance(definition, ast.ClassDef) or definition.decorator_list or definition.keywords:
        return None, 0
    if any("Enum" in last_name(one) for one in definition.bases):
        return None, 0  # a call looks a member up
    methods = {one.name: one for one in definition.body if isinstance(one, ast.FunctionDef)}
    is_made = "__new__" not in methods and "__init__" in methods and not methods["__init__"].decorator_list
    return (methods["__init__"] if is_made else None), 1


def _takes(arguments: ast.arguments, call: ast.Call, given_before: int) -> bool:
    named = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][given_before:]
    by_position, by_name = named[: len(call.args)], {one.arg for one in call.keywords}
    if len(call.args) > len(named) and arguments.vararg is None:
        return False
    possible = {*named, *(one.arg for one in arguments.kwonlyargs)}
    if not by_name <= possible and arguments.kwarg is None:
        return False
    required = set(named[: len(named) - len(arguments.defaults)]) if arguments.defaults else set(named)
    only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required |= {one.arg for one, default in only if default is None}
    return required <= {*by_position, *by_name}

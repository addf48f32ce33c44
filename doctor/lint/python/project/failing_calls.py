"""Code that no run reaches: every way to it ends at a name without a value yet, or a call that its function refuses."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from doctor.lint.engine.imported_names import names_in
from doctor.lint.python.gpu_use import block_with_ranks
from doctor.lint.python.project.call_graph import INERT
from doctor.lint.python.project.options import lacks_option
from doctor.lint.python.project.unreached import may_import
from doctor.lint.python.rank_branches import statements_above
from doctor.lint.python.script import FunctionNode, ProjectModules, Script, last_name, per_script

_DEPTH = 4
"""Functions that are followed to their callers."""
_EXECUTED = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
_NOT_ALWAYS = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_OWN_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOADER = "torch.utils.data.DataLoader"
_UNKNOWN_NAMES = re.compile(r"(?<![.\w])(?:exec|globals|__import__|get_ipython)\(")
"""Ways to bind names of a module that the order of lines does not show."""


def fails_before(script: Script, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Whether every run fails before it comes to a place: above it, or above each use of its function or class, a
    statement reads a name that only lines below bind, or an option that nothing declares, or calls a function of the
    file with arguments that it does not take; or the place, or each use of its function, does so itself."""
    if script.path.endswith(".ipynb"):
        return False  # cells run in any order
    if any(_is_known_to_fail(script, one) for one in statements_above(script, node)):
        return True
    if any(lacks_option(script, one) and not _is_conditional(script, one, node) for one in ast.walk(node)):
        return True
    holder = _outermost(script, node)
    if holder is None or depth == 0 or holder.decorator_list:
        return False
    uses = _uses(script)[holder.name]
    return (
        bool(uses)
        and all(_is_use_vain(script, one, holder, depth) for one in uses)
        and not _is_imported_by_others(script, holder.name)
    )


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
    return _outermost(script, use) is not holder and fails_before(script, use, depth - 1)


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


def _is_imported_by_others(script: Script, name: str) -> bool:
    """Whether another file of the project may use a function or class of this one."""
    if script.modules is None:
        return False
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
        answers[statement] = _fails(script, statement)
    return answers[statement]


def _fails(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement fails whenever it is reached, with loops that run at least once."""
    for part in _always(statement):
        for one in script.inside(part, ast.Name):
            if isinstance(one.ctx, ast.Load) and not _is_conditional(script, one, part) and _is_unbound(script, one):
                return True
        for call in script.inside(part, ast.Call):
            if not _is_conditional(script, call, part) and refuses(script, call):
                return True
        for read in script.inside(part, ast.Attribute):
            if lacks_option(script, read) and not _is_conditional(script, read, part):
                return True
    return False


def _always(statement: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement that run whenever it is reached. What ``try`` has may be caught."""
    if isinstance(statement, _EXECUTED):
        yield statement
    elif isinstance(statement, (ast.If, ast.While, ast.Assert)):
        yield statement.test
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
    """Whether a name has no value at a place of its own function or module: all that binds it is below, and no loop
    around both comes back."""
    if not isinstance(name.ctx, ast.Load) or hasattr(builtins, name.id):
        return False
    around = list(script.around(name))
    scope = next((one for one in around if isinstance(one, (*_OWN_SCOPES, ast.Module))), None)
    if scope is None or isinstance(scope, (ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(scope, ast.Module) and (_UNKNOWN_NAMES.search(script.text) or _may_be_starred(script, name.id)):
        return False
    binders = _binders(script, scope).get(name.id, [])
    loops = [one for one in around[: around.index(scope)] if isinstance(one, _LOOPS)]
    return bool(binders) and all(
        one is not None and one.lineno > (name.end_lineno or name.lineno) and not _is_in_any(script, one, loops)
        for one in binders
    )


def _may_be_starred(script: Script, name: str) -> bool:
    """Whether ``from module import *`` may give the module a name: not one of the project without it."""
    stars = [one for one in script.all(ast.ImportFrom) if one.names[0].name == "*"]
    if script.modules is None:
        return bool(stars)
    for one in stars:
        found = script.modules.named(script.path, "." * one.level + (one.module or ""))
        given = [_names_of(script.modules, shown) for shown in found]
        if not given or any(names is None or name in names for names in given):
            return True
    return False


def _names_of(modules: ProjectModules, shown: str) -> frozenset[str] | None:
    key = ("names in a module", shown)
    if key not in modules.memo:
        modules.memo[key] = names_in(modules.text_at(shown))
    found: frozenset[str] | None = modules.memo[key]
    return found


def _is_in_any(script: Script, node: ast.AST, outer: Sequence[ast.AST]) -> bool:
    return any(one in outer for one in script.around(node))


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
    """Whether a function or class of the file, the only thing of that name, does not take the arguments of a call: one
    that it requires is missing, or one is too many; or a data loader gets two that exclude each other."""
    if script.name(call.func) == _LOADER:
        return _is_shuffled_twice(script, call)
    if not isinstance(call.func, ast.Name) or script.is_open(call):
        return False
    scope = script.scope_of(call.func, call.func.id)
    bound = scope.names[call.func.id] if scope is not None and isinstance(scope.node, ast.Module) else []
    function, is_bound = _called(bound[0]) if len(bound) == 1 else (None, False)
    return function is not None and not _takes(function.args, call, int(is_bound))


def _is_shuffled_twice(script: Script, loader: ast.Call) -> bool:
    """``DataLoader(data, shuffle=True, sampler=sampler)``: "sampler option is mutually exclusive with shuffle"."""
    samplers = (script.argument(loader, name, place) for name, place in (("sampler", 3), ("batch_sampler", 4)))
    given = [script.values_of(one) for one in samplers if one is not None]
    is_certain = any(values and all(isinstance(one, ast.Call) for one in values) for values in given)
    return is_certain and script.value(script.argument(loader, "shuffle", 2)) is True


def _called(definition: ast.AST | str) -> tuple[FunctionNode | None, bool]:
    """The function that a call of a definition runs, and whether its first parameter is given by the call itself."""
    if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        inert = all(last_name(one) in INERT for one in definition.decorator_list)
        return (definition, False) if inert else (None, False)
    if not isinstance(definition, ast.ClassDef) or definition.decorator_list or definition.keywords:
        return None, False
    methods = {one.name: one for one in definition.body if isinstance(one, ast.FunctionDef)}
    is_made = "__new__" not in methods and "__init__" in methods and not methods["__init__"].decorator_list
    return (methods["__init__"] if is_made else None), True


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

"""Parts of a script that one rank may run alone, in more cases than certain rank conditions, or that exclude others."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from doctor.lint.python.collective_paths import ends_process
from doctor.lint.python.gpu_use import MAKES_RANKS, asks_for_several, runs_alone
from doctor.lint.python.loader_calls import branches_on_ranks, depends_on_ranks
from doctor.lint.python.rank_branches import (
    BLOCKS,
    is_rank,
    is_rank_test,
    names_function,
    rank_condition,
    statements_before,
    stops_several,
)
from doctor.lint.python.reachable_functions import RUNS_ON_ONE
from doctor.lint.python.script import FunctionNode, Script, last_name, per_script
from doctor.lint.python.training import MADE_FOR_RANKS, calls_of

_ROLES = re.compile(
    r"(?:^|_)(?:main|master|primary|chief|zero|leader?|coordinator|writer?|logger|verbose|summary_writer)(?:_|$)|"
    r"(?:is|am_i)_?(?:root|first|last|log|save)|(?:root|first|last)_?(?:rank|process|worker|node)|"
    r"(?:should|do|can|will|enable)_?(?:save|log|write|dump|report|print)|save_on|on_last|output_process|^root$|^log$",
    re.IGNORECASE,
)
"""Words of conditions that may test for the rank that writes."""
_ORDERED = re.compile(r"lock|first|zero|main|master|sequential|order", re.IGNORECASE)
"""Words of contexts that ranks enter one after the other, or one alone."""
_BY_NAME = re.compile(
    r"(?<!no_)rank_?(?:zero|0)|(?:on|only)_?(?:main|master|primary|chief)|(?:main|master|primary|chief)_", re.I
)
"""Words of decorators for functions that one rank runs: ``@run_on_master``."""
_DEVICES = re.compile(
    r"(?:^|_)(?:gpu|device|local)(?:_?id|_?index|_rank)?$|^(?:proc|process|p|rank)_?id$|^rank_?0$", re.IGNORECASE
)
"""Device numbers by which scripts distinguish their ranks."""


def may_run_alone(script: Script, node: ast.AST, depth: int = 4) -> bool:
    """Whether one rank may be the only one that runs it: a certain or possible rank condition is around it, or a branch
    for one process, or around every call of its function. In doubt true, which keeps rules silent."""
    if rank_condition(script, node) is not None or runs_alone(script, node) or _is_without_job(script, node):
        return True
    if not all(_is_for_several(*one) for one in branches_on_ranks(script, node)):
        return True
    function = script.function_of(node)
    inner = node
    for outer in script.around(node):
        if _is_in_turns(script, outer, inner):
            return True
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test and _may_ask(script, outer.test):
            return True
        contexts = [script.text_of(item.context_expr) for item in outer.items] if isinstance(outer, ast.With) else []
        if any(_ORDERED.search(text) for text in contexts):
            return True
        if any(_keeps_away(script, one) for one in statements_before(outer, inner, BLOCKS)):
            return True
        inner = outer
    if function is None or depth == 0:
        return False
    calls = _uses_of(script, function)
    asked = _asked_parameters(script, function, node)
    if any(_BY_NAME.search(last_name(one)) for one in function.decorator_list):
        return True
    return _is_left_before(script, function, node) or (
        bool(calls)
        and all(may_run_alone(script, call, depth - 1) or _goes_elsewhere(script, asked, call) for call in calls)
    )


_ROLE = re.compile(
    r"^(?:is_|am_i_|on_|use_)?(?:the_)?(?:main|master|primary|chief|leader|coordinator|root|zero|rank_?(?:0|zero))"
    r"(?:_(?:process|rank|node|worker|proc|only))?$",
    re.IGNORECASE,
)


def is_of_one_rank(script: Script, node: ast.AST, depth: int = 4) -> bool:
    """Whether one rank alone is meant to run it, by the names of roles too: ``if self.main:``, ``if gpu == 0:``,
    ``@run_on_master``. More certain than :func:`may_run_alone`."""
    if rank_condition(script, node) is not None or runs_alone(script, node) or _is_without_job(script, node):
        return True
    inner = node
    for outer in script.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test and _names_role(script, outer.test):
            return True
        if any(_keeps_away(script, one) for one in statements_before(outer, inner, BLOCKS)):
            return True
        inner = outer
    function = script.function_of(node)
    if function is None or depth == 0:
        return False
    if any(_BY_NAME.search(last_name(one)) for one in function.decorator_list):
        return True
    uses = _uses_of(script, function)
    return bool(uses) and all(is_of_one_rank(script, one, depth - 1) for one in uses)


def _uses_of(script: Script, function: FunctionNode) -> list[ast.Call]:
    """The calls of a function, and those that get it to call it: ``mp.spawn(function)``."""
    return [*calls_of(script, function), *_handed_on(script).get(function, ())]


@per_script
def _handed_on(script: Script) -> dict[FunctionNode, list[ast.Call]]:
    found: dict[FunctionNode, list[ast.Call]] = {}
    for call in script.all(ast.Call):
        for given in (*call.args, *(word.value for word in call.keywords)):
            function = script.definition(given) if isinstance(given, (ast.Name, ast.Attribute)) else None
            if function is not None and not RUNS_ON_ONE.search(last_name(call.func)):
                found.setdefault(function, []).append(call)
    return found


def _names_role(script: Script, test: ast.expr) -> bool:
    asked = [part for one in _asked_alone(test) for part in _asked_alone(one)]
    plain = (one for one in asked if isinstance(one, ast.Call) or _is_value(script, one))
    named = [last_name(one) for one in plain]
    if any(map(_ROLE.match, named)) or not _set_by_rank(script).isdisjoint(map(ast.unparse, asked)):
        return True
    pairs = [(one.left, one.comparators[0]) for one in asked if isinstance(one, ast.Compare) and len(one.ops) == 1]
    return any(
        script.value(number) == 0 and _DEVICES.search(ast.unparse(left).replace(".", "_")) for left, number in pairs
    )


def _is_for_several(test: ast.expr, holds: bool) -> bool:
    """Whether a test asks for several ranks alone, as it is answered: ``if args.distributed: save(model)``."""
    is_simple = not any(isinstance(one, ast.BoolOp) for one in ast.walk(test))
    return is_simple and asks_for_several(test) is holds


class _Asked(NamedTuple):
    """A parameter that a branch asks for: its name and place among those of calls, its default, and the answer that a
    value gives."""

    name: str
    place: int
    default: ast.expr | None
    holds: Callable[[object], bool]


def _asked_parameters(script: Script, function: FunctionNode, node: ast.AST) -> list[_Asked]:
    """The parameters of a function that decide whether a call of it reaches a node: ``if last: save()``."""
    named = [*function.args.posonlyargs, *function.args.args]
    is_method = bool(named) and named[0].arg in ("self", "cls")
    given = dict(zip([one.arg for one in named[::-1]], function.args.defaults[::-1], strict=False))
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    places = {one.arg: place - is_method for place, one in enumerate(named)}
    given |= {one.arg: default for one, default in keywords if default is not None}
    stored = {one.id for one in script.inside(function, ast.Name) if isinstance(one.ctx, ast.Store)}
    names = {*places, *(one.arg for one in function.args.kwonlyargs)} - stored
    return [
        _Asked(name, places.get(name, -1), given.get(name), holds)
        for name, holds in _conditions_at(script, function, node)
        if name in names
    ]


def _conditions_at(
    script: Script, function: FunctionNode, node: ast.AST
) -> Iterator[tuple[str, Callable[[object], bool]]]:
    """The names whose value decides alone whether a node is left out, each with the answer that lets it run."""
    inner = node
    for outer in script.around(node):
        if outer is function:
            return
        if isinstance(outer, ast.If) and inner is not outer.test:
            yield from _answers(outer.test, wanted=inner in outer.body)
        inner = outer


def _answers(test: ast.expr, *, wanted: bool) -> Iterator[tuple[str, Callable[[object], bool]]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _answers(test.operand, wanted=not wanted)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is wanted:
        for one in test.values:
            yield from _answers(one, wanted=wanted)
    elif isinstance(test, ast.Name):
        yield test.id, lambda value: bool(value) is wanted
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name):
        other, operator = test.comparators[0], test.ops[0]
        if isinstance(other, ast.Constant) and isinstance(operator, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
            same, constant = isinstance(operator, (ast.Eq, ast.Is)) is wanted, other.value
            yield test.left.id, lambda value: (value == constant) is same


def _goes_elsewhere(script: Script, asked: list[_Asked], call: ast.Call) -> bool:
    """Whether a constant that a call gives, or leaves to the default, takes another branch, or a test of the rank
    decides: ``save(model, writes=rank == 0)``."""
    if script.is_open(call):
        return False
    for one in asked:
        given = script.argument(call, one.name, one.place) if one.place >= 0 else script.argument(call, one.name)
        if given is not None and is_rank_test(script, given):
            return True
        value = given if given is not None else one.default
        if isinstance(value, ast.Constant) and not one.holds(value.value):
            return True
    return False


def _is_in_turns(script: Script, outer: ast.AST, inner: ast.AST) -> bool:
    """``if rank != 0: barrier()`` above it in its block: rank 0 comes first, and the others find its result. The number
    of a device may be asked for instead: ``if gpu != 0: barrier()``."""
    blocks = (getattr(outer, name, None) for name in ("body", "orelse"))
    block: list[ast.AST] = next((one for one in blocks if isinstance(one, list) and inner in one), [inner])
    return any(
        isinstance(one, ast.If)
        and (is_rank_test(script, one.test) or _is_device_test(script, one))
        and _waits(script, one)
        for one in block[: block.index(inner)]
    )


def _is_device_test(script: Script, branch: ast.If) -> bool:
    """``if gpu != 0:``, with a number of a device by which a script distinguishes its ranks."""
    test = branch.test
    is_compared = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.NotEq, ast.Gt))
    is_left_out = is_compared and isinstance(test, ast.Compare) and script.value(test.comparators[0]) == 0
    asked = test.left if is_left_out and isinstance(test, ast.Compare) else test
    return not branch.orelse and _DEVICES.search(last_name(asked)) is not None


def _waits(script: Script, branch: ast.If) -> bool:
    called = (call.func for statement in branch.body for call in script.inside(statement, ast.Call))
    return any(isinstance(one, ast.Attribute) and one.attr in ("barrier", "wait_for_everyone") for one in called)


def _keeps_away(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement may end the round or the run of other ranks: ``if rank: continue``, ``if rank != 0:
    sys.exit()``, ``assert rank == 0``, or all jobs of several ranks: ``assert num_gpus == 1``."""
    if isinstance(statement, ast.Assert):
        return is_rank_test(script, statement.test) or stops_several(script, statement)
    if not isinstance(statement, ast.If) or not _asks_rank(script, statement.test):
        return False
    return isinstance(statement.body[-1], (ast.Continue, ast.Raise)) or ends_process(statement.body[-1])


def _is_left_before(script: Script, function: FunctionNode, node: ast.AST) -> bool:
    """An early return above it for an unknown reason, or any exit of jobs of several ranks."""
    for one in script.inside(function, ast.If):
        if one.lineno >= getattr(node, "lineno", 0):
            continue
        returns = any(isinstance(last, ast.Return) for last in one.body)
        if returns and _may_ask(script, one.test):
            return True
        if (returns or any(map(ends_process, one.body))) and asks_for_several(one.test):
            return True
    return False


def _asks_rank(script: Script, test: ast.expr) -> bool:
    return is_rank_test(script, test) or any(is_rank(script, one) for one in _asked_alone(test))


def _may_ask(script: Script, test: ast.expr) -> bool:
    if _asks_rank(script, test):
        return True
    called = {one.func for one in ast.walk(test) if isinstance(one, ast.Call)}
    named = [
        one
        for one in ast.walk(test)
        if isinstance(one, (ast.Name, ast.Attribute)) and (one in called or _is_value(script, one))
    ]
    names = [last_name(one) for one in named]
    return (
        any(_ROLES.search(name) or _DEVICES.search(name) for name in names)
        or not _never_with_ranks(script).isdisjoint(names)
        or not _set_by_rank(script).isdisjoint(map(ast.unparse, named))
        or any(rank_condition(script, value) is not None for one in named for value in script.values_of(one))
    )


def _is_value(script: Script, node: ast.expr) -> bool:
    """Whether it is a name of something else than a function, which is true on all ranks."""
    return isinstance(node, (ast.Name, ast.Attribute)) and not names_function(script, node)


@per_script
def _set_by_rank(script: Script) -> frozenset[str]:
    """Attributes that a test of the rank is assigned to: ``args.save = rank == 0``."""
    pairs = ((target, one.value) for one in script.all(ast.Assign) for target in one.targets)
    return frozenset(
        ast.unparse(target)
        for target, value in pairs
        if isinstance(target, ast.Attribute) and is_rank_test(script, value)
    )


def _asked_alone(test: ast.expr) -> Iterator[ast.expr]:
    """What a test asks for as it is: ``rank`` of ``if rank or done:``."""
    if isinstance(test, ast.BoolOp):
        yield from test.values
    else:
        yield test.operand if isinstance(test, ast.UnaryOp) else test


def _never_with_ranks(script: Script) -> frozenset[str]:
    """Names that an assertion excludes in jobs of several ranks."""
    asserted = (one for one in script.all(ast.Assert) if depends_on_ranks(script, one))
    parts = (part for one in asserted for part in ast.walk(one.test))
    return frozenset(last_name(part) for part in parts if isinstance(part, (ast.Attribute, ast.Name)))


Way = frozenset[tuple[ast.If, bool]]
"""Each branch on the way through a script to a place, and whether its test holds there."""
_DEPTH = 4
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def ways_to(script: Script, node: ast.AST, depth: int = _DEPTH) -> Iterator[Way]:
    """The ways to a place, one for each call of its function in the file, and of those around them."""
    own = _branches(script, node)
    function = script.function_of(node)
    calls = list(calls_of(script, function)) if function is not None and depth else []
    if not calls:
        yield own
    for call in calls:
        kept = frozenset() if _loops(script, call) else own
        for way in ways_to(script, call, depth - 1):
            yield kept | way


def excludes(one: Way, other: Way) -> bool:
    """Whether two ways need different answers of the same test."""
    return any((branch, not holds) in other for branch, holds in one)


_MAY_JOIN = re.compile(
    r"(?:^|_)(?:dist|ddp|distributed|process_group|slurm|mpi)(?:_|$)|^(?:spawn|launch)$", re.IGNORECASE
)
"""Functions that may make a job of several ranks, or start one."""


def _is_without_job(script: Script, node: ast.AST) -> bool:
    """Whether no run of a script that gets to a place has ranks: its mode is another one than that which joins a
    process group, ``if args.mode == "single": run_alone() else: run_ranks()``."""
    joining = _joining_job(script)
    if not joining or _is_handed_on(script, node):
        return False
    own = list(ways_to(script, node))
    return all(own) and all(excludes(one, other) for one in own for found in joining for other in found)


def _is_handed_on(script: Script, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Whether a function around a place, or one that calls it, is given to a call, as to one that starts ranks."""
    function = script.function_of(node)
    if function is None or depth == 0:
        return False
    return function in _handed_on(script) or any(
        _is_handed_on(script, call, depth - 1) for call in calls_of(script, function)
    )


@per_script
def _joining_job(script: Script) -> list[list[Way]]:
    """The ways to each call that makes or shows a job of several ranks, if the script joins a process group itself."""
    if not any(True for _ in script.calls(*MAKES_RANKS)):
        return []
    shown = [
        one
        for one in script.all(ast.Call)
        if script.name(one.func) in MADE_FOR_RANKS or _MAY_JOIN.search(last_name(one.func))
    ]
    return [list(ways_to(script, one)) for one in shown]


def _branches(script: Script, node: ast.AST) -> Way:
    """The branches around a place in its function, and those above it that leave the function; none inside of a loop,
    whose next round may take another one."""
    found: set[tuple[ast.If, bool]] = set()
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.If) and inner is not outer.test:
            found.add((outer, inner in outer.body))
        for block in (getattr(outer, name, None) for name in ("body", "orelse", "finalbody")):
            above = block[: block.index(inner)] if isinstance(block, list) and inner in block else []
            found |= {(one, False) for one in above if isinstance(one, ast.If) and _leaves(one)}
        if isinstance(outer, _LOOPS):
            found.clear()
        if isinstance(outer, _FUNCTIONS):
            break
        inner = outer
    return frozenset(found)


def _loops(script: Script, node: ast.AST) -> bool:
    nearest = next((one for one in script.around(node) if isinstance(one, (*_LOOPS, *_FUNCTIONS))), None)
    return isinstance(nearest, _LOOPS)


def _leaves(branch: ast.If) -> bool:
    return isinstance(branch.body[-1], ast.Return) or ends_process(branch.body[-1])

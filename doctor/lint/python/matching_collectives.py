"""Decides whether the other ranks join a call of one rank: in the other branch, or under another condition."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from doctor.lint.engine.rule import FlowStep
from doctor.lint.python.collective_paths import FOCUS, UNKNOWN_CALLS, CollectivePath, paths_through
from doctor.lint.python.collectives import CollectiveCall, collectives_and_forwards
from doctor.lint.python.gpu_use import runs_alone
from doctor.lint.python.project.left_defaults import given_by_all
from doctor.lint.python.rank_branches import (
    MAIN_NAMES,
    RANK_NAMES,
    RankCondition,
    asks_for_one,
    is_of_the_job,
    is_rank,
    is_rank_test,
    parsed_test,
    plain_test,
    rank_condition,
    rank_conditions,
    statements_before,
)
from doctor.lint.python.script import UNKNOWN, Script, last_name, step_at
from doctor.lint.python.wrapped_models import FORWARD_OF_DDP

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_OWN_RANK = frozenset({"RANK", "LOCAL_RANK", "GLOBAL_RANK", "WORLD_RANK", "NODE_RANK"})


def unmatched_condition(script: Script, collective: CollectiveCall) -> RankCondition | None:
    """The rank condition that keeps other ranks of the job out of a collective; ``None`` if there is none, or if they
    make the same call elsewhere: in the other branch, or under a condition of their own in the same function. Calls in
    a given group are not judged."""
    if collective.grouped or runs_alone(script, collective.call):
        return None
    for condition in rank_conditions(script, collective.call):
        if collective.word == FORWARD_OF_DDP and _parts_work(script, condition):
            continue
        joined = (
            _is_joined_in_expression(script, collective, condition)
            or _takes_each_turn(script, condition)
            or _is_joined_in_branch(script, collective, condition)
            or _is_joined_apart(script, collective, condition)
            or _is_joined_around(script, collective)
            or _is_joined_in_next_round(script, collective, condition)
            or _asks_again(script, collective, condition)
            or _is_served(script, collective, condition)
            or _is_handed_on(script, collective, condition)
        )
        if not joined and not _asks_a_constant(script, condition) and not _is_for_all(script, collective, condition):
            return condition
    return next(_left_inside(script, collective), None)


def _left_inside(script: Script, collective: CollectiveCall) -> Iterator[RankCondition]:
    """Branches above it in which a rank may leave early: ``if rank == 0: if done: return``."""
    inner: ast.AST = collective.call
    for outer in script.around(collective.call):
        for statement in statements_before(outer, inner):
            if isinstance(statement, ast.If) and is_rank_test(script, statement.test):
                yield from _leaving(script, collective, statement)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        inner = outer


def _leaving(script: Script, collective: CollectiveCall, branch: ast.If) -> Iterator[RankCondition]:
    rest = _below(script, branch)
    for block, other in ((branch.body, branch.orelse), (branch.orelse, branch.body)):
        exits = list(_exits(script, branch, block))
        here = paths_through(script, [*other, *rest], collective.call) if exits else ()
        for leave in exits:
            if _contradict(script, leave, collective.call):
                continue
            gone = list(paths_through(script, block, leave))
            if here and gone and not any(_is_joined(collective, one, gone) for one in here):
                asked = script.nearest(leave, ast.If)
                inside = f" and {script.text_of(asked.test, 30)}" if asked is not None and asked is not branch else ""
                test = script.text_of(branch.test, 40)
                whole = f"not ({test if block is branch.body else f'not ({test})'}{inside})"
                yield RankCondition(whole, branch, certain=False)


def _exits(script: Script, branch: ast.If, block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The returns in a block, and what skips the rest of the loop around it; not at its end, nor for one process, nor
    for a parameter without a gradient, nor for another round or try, in which the rank makes the same calls."""
    loop = script.nearest(branch, *_LOOPS)
    for leave in (*script.inside(branch, ast.Return), *script.inside(branch, ast.Continue)):
        if leave in block or set(script.around(leave)).isdisjoint(block) or runs_alone(script, leave):
            continue
        asked = script.nearest(leave, ast.If)
        is_gradient = asked is not None and "grad" in script.text_of(asked.test)
        if isinstance(leave, ast.Continue) and loop is not None and _is_retry(loop):
            continue
        if not is_gradient and (isinstance(leave, ast.Return) or script.nearest(leave, *_LOOPS) is loop):
            yield leave


def _is_retry(loop: ast.AST) -> bool:
    """A loop that ends with its first round that nothing skips: ``for suffix in names: ...; break``; or one without
    end, in which the others wait for the next round of this rank."""
    if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and loop.test.value:
        return True
    return isinstance(loop, _LOOPS) and isinstance(loop.body[-1], (ast.Break, ast.Return))


def flow_of(script: Script, collective: CollectiveCall, condition: RankCondition) -> tuple[FlowStep, ...]:
    """The steps to a collective that some ranks do not make: the condition, the call, and the calls down to the
    collective."""
    some = f"only ranks for which `{condition.test}` continue to line {collective.call.lineno}"
    if condition.test.startswith("@"):
        some = f"only one rank runs the function with line {collective.call.lineno}"
    calls = [step_at(script, collective.call), *collective.steps]
    last = calls.pop()._replace(note=f"{collective.word}: waits for all ranks")
    return (step_at(script, condition.where, some), *calls, last)


_SERVES = frozenset(
    {"serve", "serve_forever", "run_forever", "wait_for_termination", "run", "run_app", "launch", "start", "mainloop"}
)


def _is_served(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """Whether the others make the collective on request, in functions of the file that they hand to a server: the
    methods of an object, a function that is passed on, or one that is registered by a decorator."""
    calls = [call for one in condition.other for call in script.inside(one, ast.Call)]
    words = {collective.word, *collective.reached}
    reached = collectives_and_forwards(script).reached_words
    is_server = any(last_name(call.func) in _SERVES for call in calls)
    for call in calls if is_server else ():
        for given in (*call.args, *(one.value for one in call.keywords)):
            handed = [script.definition(given), *_methods_of(script, given)]
            if any(not words.isdisjoint(reached.get(one, ())) for one in handed if one is not None):
                return True
    web = (one for one in script.functions if any(_is_route(decorator) for decorator in one.decorator_list))
    return is_server and any(not words.isdisjoint(reached.get(one, ())) for one in web)


_RUNS_TRIALS = frozenset({"optimize", "fmin", "minimize", "agent"})
"""Functions that run what they are given: of Optuna, Hyperopt, SciPy and Weights & Biases."""


def _is_handed_on(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """Whether the others have the same function run for them, as Optuna documents it for several ranks: rank 0 is in
    ``study.optimize(objective, n_trials)``, the others call ``objective(None)`` as often
    (optuna/integration/_pytorch_distributed.py, ``TorchDistributedTrial``)."""
    function = script.definition(collective.call.func)
    calls = (call for one in condition.other for call in script.inside(one, ast.Call))
    handed = (
        given
        for call in calls
        if last_name(call.func) in _RUNS_TRIALS
        for given in (*call.args, *(one.value for one in call.keywords))
    )
    return function is not None and any(_runs(script, given, function) for given in handed)


def _runs(script: Script, given: ast.expr, function: ast.AST) -> bool:
    """Whether what is handed on is a function, or calls it: ``lambda trial: objective(trial, args)``, ``partial``."""
    made = [one for value in script.values_of(given) for one in (value, *ast.walk(value))]
    named = [given, *(one for one in made if isinstance(one, (ast.Name, ast.Attribute)))]
    return any(script.definition(one) is function for one in named)


def _methods_of(script: Script, given: ast.expr) -> Iterator[ast.AST]:
    """The methods of the class of the file that an object is made of."""
    owner = script.class_definition(given) if script.name(given).endswith("()") else None
    if owner is not None:
        yield from (one for (name, _), one in script.bindings.methods.items() if name == owner.name)


def _is_route(decorator: ast.expr) -> bool:
    """``@app.post("/generate")``, ``@app.route(...)``, ``@server.tool()``: something else calls the function."""
    called = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(called, ast.Attribute) and last_name(called.value) in (
        "app",
        "router",
        "server",
        "api",
        "blueprint",
    )


def _asks_a_constant(script: Script, condition: RankCondition) -> bool:
    """``rank != NO_RANK``: a constant of another file, which may not be the number of any rank."""
    test = getattr(condition.where, "test", None)
    for one in ast.walk(test) if test is not None else ():
        if isinstance(one, ast.Compare) and len(one.comparators) == 1:
            for side in (one.left, one.comparators[0]):
                bare = last_name(side)
                if bare.isupper() and bare not in _OWN_RANK and script.value(side) is UNKNOWN:
                    return True
    return False


def _is_for_all(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """``if rank == 0 or sharded``: another reason, equal on all ranks, lets all of them in."""
    where = condition.where
    if not isinstance(where, ast.If):
        return False
    if condition.test == script.text_of(where.test) and _is_asked_by_all(script, where.test):
        return True
    if not isinstance(where.test, ast.BoolOp) or not isinstance(where.test.op, ast.Or):
        return False
    in_body = not set(script.around(collective.call)).isdisjoint(where.body)
    reasons = (one for one in where.test.values if not is_rank_test(script, one))
    return in_body and any(not _asks_for_no_job(script, one) for one in reasons)


def _asks_for_no_job(script: Script, test: ast.expr) -> bool:
    """``local_rank == -1``, ``rank is None``, ``not dist.is_initialized()``: a test that holds on no rank of a job of
    several, and so lets none of them in."""
    if is_of_the_job(script, test):
        return asks_for_one(test)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not is_rank(script, test.left):
        return False
    value = script.value(test.comparators[0])
    return (type(test.ops[0]), value) in ((ast.Eq, -1), (ast.Eq, None), (ast.Is, None), (ast.Lt, 0))


def _is_asked_by_all(script: Script, test: ast.expr, depth: int = 4) -> bool:
    """``several or rank == 0``, also as a part of a conjunction that a name has, where every call in the project gives
    the function ``several=True``."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(given_by_all(script, one) is True for one in test.values)
    if isinstance(test, ast.BoolOp):
        tests = [one for one in test.values if is_rank_test(script, one)]
        return bool(tests) and all(_is_asked_by_all(script, one, depth) for one in tests)
    values = script.values_of(test) if isinstance(test, ast.Name) and depth else ()
    return len(values) == 1 and values[0] is not test and _is_asked_by_all(script, values[0], depth - 1)


def _is_joined_in_branch(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """Whether a path of the others has as many of these collectives as a path up to this one."""
    there = paths_through(script, condition.other)
    return any(
        _is_joined(collective, here, _until_both_meet(script, here, other, condition))
        for here in paths_through(script, _side_of(script, collective, condition), collective.call)
        for other in there
    )


def _is_joined_in_expression(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """``reduce(x, rank) if i == rank else reduce(other, i)``: both parts make the call."""
    where = condition.where
    if not isinstance(where, ast.IfExp):
        return False
    words = {one.call: one.word for one in collectives_and_forwards(script).all()}
    parts = (where.body, where.orelse)
    found = [[words.get(one) for one in ast.walk(part) if isinstance(one, ast.Call)] for part in parts]
    return all(collective.word in one for one in found)


def _takes_each_turn(script: Script, condition: RankCondition) -> bool:
    """``for turn in range(world_size): if turn == rank``: the branch runs once on each rank."""
    test = getattr(condition.where, "test", None)
    loop = script.nearest(condition.where, ast.For)
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq) or condition.test.startswith("not"):
        return False
    if loop is None or not isinstance(loop.iter, ast.Call) or last_name(loop.iter.func) != "range":
        return False
    sides = {ast.unparse(one) for one in (test.left, *test.comparators)}
    return isinstance(loop.target, ast.Name) and loop.target.id in sides


def _side_of(script: Script, collective: CollectiveCall, condition: RankCondition) -> Sequence[ast.stmt]:
    """The statements that the ranks with the collective run because of the condition."""
    where, marked = condition.where, set(script.around(collective.call))
    for block in (getattr(where, "body", None), getattr(where, "orelse", None)):
        if isinstance(block, list) and not marked.isdisjoint(block):
            return block
    if isinstance(where, ast.If) and where not in marked:
        kept = where.orelse if condition.other == tuple(where.body) else where.body
        return [*kept, *_below(script, where)]
    return [script.statement_of(collective.call)]


def _until_both_meet(
    script: Script, here: CollectivePath, other: CollectivePath, condition: RankCondition
) -> list[CollectivePath]:
    """The paths of the others: where one side leaves and the other does not, what follows the branch counts too."""
    if other.leaves or not here.leaves or not isinstance(condition.where, ast.stmt):
        return [other]
    ends_at_loop = here.leaves in ("continue", "break")
    rest = _rest_of(script, condition.where, ends_at_loop=ends_at_loop)
    return [CollectivePath(other.words + one.words, one.leaves) for one in paths_through(script, rest)]


def _below(script: Script, statement: ast.stmt) -> list[ast.stmt]:
    """The statements after one in its block."""
    around = script.parent(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(around, name, None)
        if isinstance(block, list) and statement in block:
            return block[block.index(statement) + 1 :]
    return []


def _rest_of(script: Script, statement: ast.stmt, *, ends_at_loop: bool) -> list[ast.stmt]:
    """The statements that follow one, to the end of its function or of its loop."""
    rest = _below(script, statement)
    for outer in script.around(statement):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if ends_at_loop and isinstance(outer, (ast.For, ast.AsyncFor, ast.While)):
            break
        if isinstance(outer, ast.stmt):
            rest += _below(script, outer)
    return rest


def _is_joined(collective: CollectiveCall, here: CollectivePath, others: list[CollectivePath]) -> bool:
    needed = here.words[: here.words.index(FOCUS)].count(collective.word) if FOCUS in here.words else 1
    for other in others:
        if other.leaves == "raise" or UNKNOWN_CALLS in other.words:
            return True  # gone, or it may do its own part elsewhere
        if collective.through is not None and other.words:
            return True  # a part of its own, of which less is known
        if other.words.count(collective.word) >= needed:
            return True
    return False


def _is_joined_apart(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """The same collective under a different condition, in a statement that does not hold this one."""
    function = script.function_of(collective.call)
    for other in collectives_and_forwards(script).all():
        is_same = other.call is collective.call
        if is_same or other.word != collective.word or script.function_of(other.call) is not function:
            continue
        apart = [one for one in rank_conditions(script, other.call) if one.where is not condition.where]
        if any(_asks_otherwise(one, condition) and condition.where not in script.around(one.where) for one in apart):
            return True
    return False


def _is_joined_around(script: Script, collective: CollectiveCall) -> bool:
    """The same collective of the same tensor in the function around a closure: ranks that do not run the closure by
    themselves wait there for what the others send."""
    inner = script.function_of(collective.call)
    outer = script.function_of(inner) if inner is not None else None
    if outer is None or not collective.call.args:
        return False
    sent = ast.unparse(collective.call.args[0])
    return any(
        call.args and call.func is not collective.call.func and ast.unparse(call.args[0]) == sent
        for call in script.inside(outer, ast.Call)
        if ast.unparse(call.func) == ast.unparse(collective.call.func)
    )


def _is_joined_in_next_round(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """Whether one rank sends a flag and ends the loop, and the others receive it at the top of their next round: the
    same call of the same tensor stands above the branch, and the loop ends if the flag says so."""
    loop, arguments = script.nearest(condition.where, *_LOOPS), collective.call.args
    if loop is None or not arguments:
        return False
    sent, called = ast.unparse(arguments[0]), ast.unparse(collective.call.func)
    received = any(
        call.lineno < getattr(condition.where, "lineno", 0)
        and rank_condition(script, call) is None
        and (ast.unparse(call.func), [ast.unparse(one) for one in call.args[:1]]) == (called, [sent])
        for call in script.inside(loop, ast.Call)
    )
    ends = [one for one in script.inside(loop, ast.Break) if script.nearest(one, *_LOOPS) is loop]
    tests = [script.nearest(one, ast.If) for one in ends if one.lineno > collective.call.lineno]
    return received and any(one is not None and sent in ast.unparse(one.test) for one in tests)


def _asks_again(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """``if alone and rank != 0: return`` above, and the call where ``alone`` does not hold: nobody has left there."""
    where = condition.where
    if not isinstance(where, ast.If) or where in script.around(collective.call):
        return False
    return _contradict(script, where.body[0], collective.call)


def _contradict(script: Script, leave: ast.stmt, call: ast.Call) -> bool:
    """Whether a rank leaves at one place only if a condition holds that the branches around the call rule out."""
    common = set(script.around(call))
    left = {
        fact
        for outer, inner in _branches_around(script, leave)
        if outer not in common
        for fact in _facts(outer.test, holds=inner in outer.body)
    }
    for outer, inner in _branches_around(script, call):
        if inner is not outer.test:
            here = _facts(outer.test, holds=inner in outer.body)
            if any((text, not holds) in left for text, holds in here):
                return True
    return False


def _branches_around(script: Script, node: ast.AST) -> Iterator[tuple[ast.If, ast.AST]]:
    """The branches around a node in its function, each with its part that holds the node."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(outer, ast.If):
            yield outer, inner
        inner = outer


def _facts(test: ast.expr, *, holds: bool) -> Iterator[tuple[str, bool]]:
    """The parts of a test that are known where it holds, or does not: their text without a negation, and whether that
    is true."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _facts(test.operand, holds=not holds)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if holds else ast.Or):
        for one in test.values:
            yield from _facts(one, holds=holds)
    elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.NotEq, ast.IsNot, ast.NotIn)):
        positive = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}[type(test.ops[0])]()
        same = ast.Compare(test.left, [positive, *test.ops[1:]], test.comparators)
        yield ast.unparse(same), not holds
    else:
        yield ast.unparse(test), holds


def _parts_work(script: Script, condition: RankCondition) -> bool:
    """``if i % world_size == rank``: every rank runs the branch, for items of its own."""
    test = getattr(condition.where, "test", None)
    return isinstance(test, ast.Compare) and any(
        isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) for side in (test.left, *test.comparators)
    )


def _asks_otherwise(one: RankCondition, other: RankCondition) -> bool:
    tests = [getattr(condition.where, "test", condition.where) for condition in (one, other)]
    is_other = one.test != other.test or ast.dump(tests[0]) != ast.dump(tests[1])
    return is_other and not (_selects_first(one) and _selects_first(other))


def _selects_first(condition: RankCondition) -> bool:
    """Whether a condition selects rank 0, in any words: ``rank == 0``, ``not rank``, ``is_main_process()``. Two such
    conditions leave the same ranks out."""
    node = parsed_test(plain_test(condition.test))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        sides = node.left, node.comparators[0]
        return any(_is_zero(one) and _has_rank_name(other) for one, other in (sides, sides[::-1]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _has_rank_name(node.operand)
    name = last_name(node) if node is not None else ""
    return MAIN_NAMES.match(name) is not None and "last" not in name


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and node.value is not False


def _has_rank_name(node: ast.expr) -> bool:
    return RANK_NAMES.search(last_name(node)) is not None

"""Decides whether the other ranks join a call of one rank: in the other branch, or under another condition."""

from __future__ import annotations

import ast

from doctor.lint.python.collectives import CollectiveCall, collectives_of
from doctor.lint.python.rank_branches import RankCondition, rank_conditions
from doctor.lint.python.script import UNKNOWN, Script, last_name

_OWN_RANK = frozenset({"RANK", "LOCAL_RANK", "GLOBAL_RANK", "WORLD_RANK", "NODE_RANK"})
_LEAVES = frozenset({"exit", "_exit", "quit", "abort"})


def unmatched_condition(script: Script, collective: CollectiveCall) -> RankCondition | None:
    """The rank condition that keeps other ranks of the job out of a collective; ``None`` if there is none, or if they
    make the same call elsewhere: in the other branch, or under a condition of their own in the same function. Calls in
    a given group are not judged."""
    if collective.grouped:
        return None
    for condition in rank_conditions(script, collective.call):
        joined = _is_joined_in_branch(script, collective, condition) or _is_joined_apart(script, collective, condition)
        if not joined and not _asks_a_constant(script, condition):
            return condition
    return None


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


def _is_joined_in_branch(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    for statement in (*condition.other, *_reached_by_others(script, collective, condition)):
        if _ends_process(statement) or (isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call)):
            return True  # gone, or it does its own part elsewhere
        below = set(script.inside(statement, ast.Call))
        there = (one for one in collectives_of(script).all() if one.call in below)
        if any(one.word == collective.word or collective.through for one in there):
            return True
        if collective.through and any(script.definition(call.func) is not None for call in below):
            return True  # a part of its own, of which less is known
    return False


def _reached_by_others(script: Script, collective: CollectiveCall, condition: RankCondition) -> list[ast.stmt]:
    """The statements that the others reach after a branch with a return: ``if rank == 0: reduce(); return``."""
    where = condition.where
    if not isinstance(where, ast.If) or not isinstance(where.body[-1], (ast.Return, ast.Continue)):
        return []
    if collective.call.lineno > (where.end_lineno or 0):
        return []
    around = script.parent(where)
    for block in (getattr(around, "body", []), getattr(around, "orelse", [])):
        if isinstance(block, list) and where in block:
            return block[block.index(where) + 1 :]
    return []


def _is_joined_apart(script: Script, collective: CollectiveCall, condition: RankCondition) -> bool:
    """The same collective under a different condition, in a statement that does not hold this one."""
    function = script.function_of(collective.call)
    for other in collectives_of(script).all():
        is_same = other.call is collective.call
        if is_same or other.word != collective.word or script.function_of(other.call) is not function:
            continue
        apart = [one for one in rank_conditions(script, other.call) if one.where is not condition.where]
        if any(_asks_otherwise(one, condition) and condition.where not in script.around(one.where) for one in apart):
            return True
    return False


def _asks_otherwise(one: RankCondition, other: RankCondition) -> bool:
    tests = [getattr(condition.where, "test", condition.where) for condition in (one, other)]
    return one.test != other.test or ast.dump(tests[0]) != ast.dump(tests[1])


def _ends_process(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return last_name(statement.value.func) in _LEAVES
    return isinstance(statement, ast.Raise)

"""Lists the collectives on each path through a block, so that the calls of different ranks can be counted."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from doctor.lint.python.collectives import CollectiveCall, collectives_and_forwards
from doctor.lint.python.project.imported_functions import imported_function
from doctor.lint.python.script import Script, last_name, per_script

MOST_PATHS = 48
"""Paths through one block that are followed; more are dropped."""
MOST_STEPS = 400_000
"""Steps of paths that are followed in one script; beyond that a path may do anything."""
LONGEST_PATH = 40
"""Collectives on one path that are listed."""
FOCUS = "<focus>"
"""Follows the call in question on a path."""
OF_THE_PROJECT = "<function of the project>"
"""Stands for a call of a function of this file, or of another one of its project."""
UNKNOWN_CALLS = "<unknown calls>"
"""Stands for a returned call of unknown code, which may have any collectives."""
_PLAIN = ("torch.", "numpy.", "math.", "os.")
_KEEP_RECORDS = frozenset(
    {
        *("logging", "json", "shutil", "wandb", "time", "sys", "tqdm", "PIL", "matplotlib", "pickle", "yaml", "random"),
        *("datetime", "subprocess", "warnings", "re", "pathlib", "termcolor", "rich", "loguru", "swanlab", "mlflow"),
    }
)
"""Packages without collectives, which the branch of one rank may call before it returns."""
_ENDS_PROCESS = frozenset({"exit", "_exit", "quit", "abort"})
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CollectivePath(NamedTuple):
    """The ``words`` of the collectives on a path, in order; ``leaves``: how it ends: empty (at the end of the block),
    ``return``, ``continue``, ``break`` or ``raise`` (also the end of the process)."""

    words: tuple[str, ...] = ()
    leaves: str = ""


def paths_through(
    script: Script, block: Sequence[ast.stmt], focus: ast.AST | None = None
) -> tuple[CollectivePath, ...]:
    """The different paths through a block, at most :data:`MOST_PATHS`; with ``focus``, those that reach that node;
    :data:`FOCUS` follows it if it is a call. A loop runs once or not at all."""
    if _steps(script)[0] > MOST_STEPS:
        return (CollectivePath((UNKNOWN_CALLS,)),)
    return tuple(_PathFinder(script, focus).block(block))


@per_script
def _steps(script: Script) -> list[int]:
    """The steps followed so far, in one element."""
    return [0]


class _PathFinder:
    def __init__(self, script: Script, focus: ast.AST | None) -> None:
        self._script = script
        self._calls = _by_call(script)
        self._marked = frozenset() if focus is None else frozenset({focus, *script.around(focus)})
        self._focus = focus
        self._steps = _steps(script)

    def block(self, statements: Sequence[ast.stmt]) -> list[CollectivePath]:
        """Paths that leave before the focus is reached are dropped."""
        going = [CollectivePath()]
        left: list[CollectivePath] = []
        for statement in statements:
            if statement in self._marked:
                left = []
            if not self._matters(statement):
                continue
            ways = self._statement(statement)
            self._steps[0] += len(ways) * len(going)
            both = [
                CollectivePath((*one.words, *way.words)[:LONGEST_PATH], way.leaves) for one in going for way in ways
            ]
            left += [one for one in both if one.leaves]
            going = _distinct([one for one in both if not one.leaves])
            if not going:
                break
        return _distinct([*left, *going])

    def _matters(self, statement: ast.stmt) -> bool:
        return statement in _statements_with_effect(self._script)

    def _statement(self, statement: ast.stmt) -> list[CollectivePath]:
        if isinstance(statement, (ast.If, ast.Match)):
            return self._branches(statement)
        if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(statement)
        if isinstance(statement, _TRIES):
            return self._tried(statement)
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            return self._after([one for item in statement.items for one in self._words(item)], statement.body)
        if isinstance(statement, _FUNCTIONS):
            return [CollectivePath()]
        words = self._words(statement)
        return [CollectivePath(tuple(words), _leaves(statement))]

    def _after(self, words: Sequence[str], block: Sequence[ast.stmt]) -> list[CollectivePath]:
        return [CollectivePath((*words, *one.words), one.leaves) for one in self.block(block)]

    def _branches(self, statement: ast.If | ast.Match) -> list[CollectivePath]:
        if isinstance(statement, ast.If):
            blocks, first = [statement.body, statement.orelse], self._words(statement.test)
        else:
            blocks, first = [*(case.body for case in statement.cases), []], self._words(statement.subject)
        return _distinct([one for block in self._taken(blocks) for one in self._after(first, block)])

    def _taken(self, blocks: list[list[ast.stmt]]) -> list[list[ast.stmt]]:
        """The block with the focus alone, if one has it."""
        return [block for block in blocks if not self._marked.isdisjoint(block)] or blocks

    def _loop(self, loop: ast.For | ast.AsyncFor | ast.While) -> list[CollectivePath]:
        first = self._words(loop.test if isinstance(loop, ast.While) else loop.iter)
        once = self._after(first, loop.body)
        if not self._marked.isdisjoint(loop.body):
            return once
        ended = [one._replace(leaves="") if one.leaves in ("continue", "break") else one for one in once]
        return _distinct([CollectivePath(tuple(first)), *ended])

    def _tried(self, tried: ast.Try) -> list[CollectivePath]:
        blocks = [[*tried.body, *tried.orelse], *(handler.body for handler in tried.handlers)]
        found = [one for block in self._taken(blocks) for one in self.block(block)]
        if not tried.finalbody:
            return _distinct(found)
        last = self.block(tried.finalbody)
        return _distinct([_joined(one, end) for one in found for end in last])

    def _words(self, node: ast.AST) -> list[str]:
        calls = sorted(
            self._script.inside(node, ast.Call), key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0)
        )
        return [word for call in calls for word in self._word(call)]

    def _word(self, call: ast.Call) -> tuple[str, ...]:
        one = self._calls.get(call)
        function = self._script.definition(call.func)
        words: tuple[str, ...] = ()
        if one is not None:
            words = (one.word,) if one.through is None else (OF_THE_PROJECT, *sorted({one.word, *one.reached}))
        elif function is not None:
            reached = collectives_and_forwards(self._script).reached_words
            words = (OF_THE_PROJECT, *sorted(reached.get(function, ())))
        elif (imported := imported_function(self._script, call.func)) is not None:
            words = (OF_THE_PROJECT, *sorted(imported.function.reached))
        elif _is_returned_unknown(self._script, call):
            words = (UNKNOWN_CALLS,)
        return (*words, FOCUS) if call is self._focus else words


def _is_of_project(script: Script, function: ast.expr) -> bool:
    return script.definition(function) is not None or imported_function(script, function) is not None


def _joined(one: CollectivePath, then: CollectivePath) -> CollectivePath:
    return CollectivePath((*one.words, *then.words)[:LONGEST_PATH], then.leaves or one.leaves)


def _is_returned_unknown(script: Script, call: ast.Call) -> bool:
    """``return build(x)``, or ``build(x)`` and ``return``, of another module, which may do the part of these ranks."""
    parent = script.parent(call)
    if not isinstance(parent, (ast.Return, ast.Expr)):
        return False
    if isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id):
        return False
    if isinstance(parent, ast.Expr) and not _hands_over(script, call):
        return False
    return not script.name(call.func).startswith(_PLAIN)


def _hands_over(script: Script, call: ast.Call) -> bool:
    """Whether a function of another package is the last thing that a block runs before its ``return``."""
    statement = script.statement_of(call)
    block = getattr(script.parent(statement), "body", None)
    if not isinstance(block, list) or statement not in block[:-1]:
        return False
    then = block[block.index(statement) + 1]
    if not isinstance(then, ast.Return) or then.value is not None:
        return False
    name = script.name(call.func)
    return "." in name and "()" not in name and name.partition(".")[0] not in _KEEP_RECORDS


def _leaves(statement: ast.stmt) -> str:
    if isinstance(statement, (ast.Return, ast.Continue, ast.Break, ast.Raise)):
        return type(statement).__name__.lower()
    return "raise" if ends_process(statement) else ""


def ends_process(statement: ast.stmt) -> bool:
    """``sys.exit(1)`` as a statement, or ``raise``."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return last_name(statement.value.func) in _ENDS_PROCESS
    return isinstance(statement, ast.Raise)


def ends_in_error(statement: ast.stmt) -> bool:
    """``raise``, or ``sys.exit(1)``: a job that has reached its end leaves with zero."""
    if isinstance(statement, ast.Raise) or not ends_process(statement):
        return isinstance(statement, ast.Raise)
    call = statement.value if isinstance(statement, ast.Expr) else None
    given = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return isinstance(given, ast.JoinedStr) or (isinstance(given, ast.Constant) and given.value not in (0, None))


def _distinct(paths: list[CollectivePath]) -> list[CollectivePath]:
    """Each path once; what is beyond the limit may do anything."""
    found = list(dict.fromkeys(paths))
    return found if len(found) <= MOST_PATHS else [*found[:MOST_PATHS], CollectivePath((UNKNOWN_CALLS,))]


@per_script
def _by_call(script: Script) -> dict[ast.Call, CollectiveCall]:
    return {one.call: one for one in collectives_and_forwards(script).all()}


@per_script
def _statements_with_effect(script: Script) -> frozenset[ast.AST]:
    """The statements with a collective, a call of a function of the file, or an exit."""
    collectives = _by_call(script)
    calls = (
        one
        for one in script.all(ast.Call)
        if one in collectives or _is_of_project(script, one.func) or _is_returned_unknown(script, one)
    )
    exits = (one for kind in (ast.Return, ast.Continue, ast.Break, ast.Raise) for one in script.all(kind))
    ends = (one for one in script.all(ast.Expr) if ends_process(one))
    found: set[ast.AST] = set()
    for node in chain(calls, exits, ends):
        for one in (node, *script.around(node)):
            if one in found:
                break
            found.add(one)
    return frozenset(found)

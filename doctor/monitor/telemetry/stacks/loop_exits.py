"""How a loop over a data loader can end before the loader does, from its source and the values that bound it.

Ranks with different numbers of batches train well in a loop that all of them leave after equally many. The source is
parsed and never run; values are read from the frame without calling anything of the program, and none is kept.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import opcode
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from doctor.core.frames import is_user_code
from doctor.core.stack_dumps.rank_conditions import leaves_loop, loop_at
from doctor.monitor.telemetry.stacks.rank_conditions import source_tree

NEVER = 1 << 62
"""Number of batches of an exit that is not taken with the present values."""
_MOST_FRAMES = 40
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Eq: ast.Eq}


class LoopExits(NamedTuple):
    """``limit``: the loop takes at most so many batches, ``None`` if no such number is known. ``has_others``: it can
    also end for a reason that its source does not show to be a number of batches. ``place``: file and line.
    ``by_next``: it may begin the loader again where that ends, since it calls ``next()``, or takes its batches from a
    generator that yields them, in which another loop is around the one over the loader."""

    limit: int | None = None
    has_others: bool = False
    place: tuple[str, int] = ("", 0)
    by_next: bool = False


def loop_exits(frame: FrameType | None) -> LoopExits:
    """Return how the user's loop that takes a batch, above ``frame``, ends before its loader.

    No number if there is no ``for`` statement, or its source is not available. Reads a source file once, with a
    deadline.
    """
    by_next = False
    for one in user_frames(frame, _MOST_FRAMES):
        if one.f_code.co_name == "__next__":  # of an iterator, which passes on that the loader has ended
            continue
        tree = source_tree(one.f_code.co_filename)
        by_next = by_next or _calls_next(one, tree)
        loop = None if tree is None else loop_at(tree, one.f_lineno)
        if tree is None or loop is None:
            break
        with variables_of(one) as variables:
            exits = _Loop(loop, one, variables).exits()._replace(by_next=by_next)
        if not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own_nodes(loop.body)):
            return exits
        if by_next := by_next or (_passes_on(loop) and _is_repeated(tree, loop)):
            return exits._replace(has_others=True, by_next=True)
        if exits.limit is not None or exits.has_others:
            return exits._replace(has_others=True)  # a generator, which the loop above may leave before
    return LoopExits(by_next=by_next)


def _calls_next(frame: FrameType, tree: ast.AST | None) -> bool:
    """Return whether a frame is in a call of ``next``, and not in a ``for`` statement or in a loop of a library."""
    code, last = frame.f_code.co_code, frame.f_lasti
    if not (0 <= last < len(code) and opcode.opname[code[last]].startswith(("CALL", "PRECALL"))):
        return False
    nodes = ast.walk(tree) if tree is not None else ()
    calls = (one for one in nodes if isinstance(one, ast.Call) and _is_next(one.func))
    return tree is None or any(one.lineno <= frame.f_lineno <= (one.end_lineno or one.lineno) for one in calls)


def _is_next(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("next", "__next__")


def _passes_on(loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether a generator yields the batches that its loop takes, and not what it has made of them."""
    taken = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    given = (node for node in _own_nodes(loop.body) if isinstance(node, (ast.Yield, ast.YieldFrom)))
    return any(isinstance(node, ast.Name) and node.id in taken for one in given for node in ast.walk(one))


def _is_repeated(tree: ast.AST, loop: ast.AST) -> bool:
    """Return whether another loop of the same function is around a loop."""
    others = (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While)) and node is not loop)
    return any(node is loop for other in others for node in _own_nodes(other.body))


def user_frames(frame: FrameType | None, most: int) -> Iterator[FrameType]:
    """Yield the frames of the user's code among the innermost ``most`` ones, from the inside out."""
    for _ in range(most):
        if frame is None:
            return
        if is_user_code(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _own_nodes(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes below statements without those of functions that are defined there."""
    for statement in statements:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(ast.iter_child_nodes(statement))


@contextlib.contextmanager
def variables_of(frame: FrameType) -> Iterator[Mapping[str, Any]]:
    """Provide the local variables of a running frame.

    Before Python 3.13, they are copied into a dictionary that the frame keeps, and with it whatever they refer to: it
    is emptied again. A function that itself asks for that dictionary would see it change, so it has none here.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module, whose variables are no copies
        yield frame.f_locals
        return
    if _SNAPSHOTS.intersection(code.co_names):
        yield {}
        return
    found = frame.f_locals
    try:
        yield found
    finally:
        if type(found) is dict and sys.getrefcount(found) <= _OWN_REFERENCES:
            found.clear()


_SNAPSHOTS = frozenset(("locals", "vars", "dir", "eval", "exec"))
_OWN_REFERENCES = 4
"""Those of the frame, of a variable here and in the caller, and of the call that counts them: nobody else has it."""


class _Unknown(Exception):
    """A value or a condition that can't be told without running code of the program."""


class _Loop:
    """A ``for`` statement, and the frame that is about to take its next batch."""

    def __init__(self, loop: ast.For | ast.AsyncFor, frame: FrameType, variables: Mapping[str, Any]) -> None:
        self._loop = loop
        self._file = frame.f_code.co_filename
        self._locals, self._globals = variables, frame.f_globals
        self._start: dict[str, int] = {}
        self._has_others = False
        self._limits: list[int] = []

    def exits(self) -> LoopExits:
        self._read_header(self._loop.iter, self._loop.target)
        for position, statement in enumerate(self._loop.body):
            if leaves_loop(statement):
                self._read_exit(position, statement)
        limit = min(self._limits, default=NEVER)
        return LoopExits(limit if limit < NEVER else None, self._has_others, (self._file, self._loop.lineno))

    def _read_header(self, iterated: ast.expr, target: ast.expr) -> None:
        """Unwrap ``enumerate(islice(tqdm(loader), 100))``."""
        while isinstance(iterated, ast.Call) and iterated.args:
            name = ast.unparse(iterated.func).rpartition(".")[2]
            arguments = iterated.args
            if name == "islice":
                self._add_limit(functools.partial(self._stop_of, arguments[1:]))
            elif name == "zip":
                self._read_zip(arguments)
                return
            elif name == "enumerate" and isinstance(target, (ast.Tuple, ast.List)) and target.elts:
                first = arguments[1] if len(arguments) > 1 else next((one.value for one in iterated.keywords), None)
                self._count_from(target.elts[0], first)
                target = target.elts[-1]
            iterated = arguments[0]

    def _read_zip(self, arguments: list[ast.expr]) -> None:
        """The shortest ends the loop: a range of numbers, or another source, which may be a loader of this rank."""
        numbers = [one for one in arguments if isinstance(one, ast.Call) and ast.unparse(one.func) == "range"]
        for call in numbers:
            self._add_limit(functools.partial(self._stop_of, call.args))
        self._has_others |= len(arguments) > 1 + len(numbers)

    def _count_from(self, counter: ast.expr, first: ast.expr | None) -> None:
        with contextlib.suppress(_Unknown):
            self._start[ast.unparse(counter)] = 0 if first is None else self._number(first)

    def _stop_of(self, arguments: list[ast.expr]) -> int:
        """Return the number of turns of ``range`` or ``islice`` with these arguments."""
        if not arguments or len(arguments) > 2:
            raise _Unknown
        first = 0 if len(arguments) == 1 else self._number(arguments[0])
        if isinstance(arguments[-1], ast.Constant) and arguments[-1].value is None:
            return NEVER
        return max(self._number(arguments[-1]) - first, 0)

    def _add_limit(self, read: Callable[[], int]) -> None:
        try:
            self._limits.append(read())
        except _Unknown:
            self._has_others = True

    def _read_exit(self, position: int, statement: ast.stmt) -> None:
        """Read one statement of the body that can leave the loop."""
        is_plain = isinstance(statement, ast.If) and not statement.orelse
        if is_plain and isinstance(statement.body[-1], (ast.Break, ast.Return)):  # type: ignore[attr-defined]
            self._read_test(statement.test, position, self._batches_before(position))  # type: ignore[attr-defined]
        else:
            self._has_others = True

    def _read_test(self, test: ast.expr, position: int, taken: int) -> None:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
            for one in test.values:
                self._read_test(one, position, taken)
            return
        parts = test.values if isinstance(test, ast.BoolOp) else [test]
        # A condition without a counter may change at any time; with one, its other parts are settings.
        counted = [one for one in parts if self._counter_in(one, position) is not None]
        if not counted:
            self._has_others |= not any(map(self._stays_false, parts))
            return
        self._add_limit(lambda: min(max(self._turns(one, position, counted) for one in parts) + taken, NEVER))

    def _stays_false(self, part: ast.expr) -> bool:
        """Whether a condition is false, and only of plain values that the loop does not change."""
        names = [node for node in ast.walk(part) if not isinstance(node, (ast.Compare, ast.cmpop, ast.expr_context))]
        if not all(isinstance(node, (ast.Name, ast.Constant)) for node in names):
            return False
        changed = [one for name in names for one in _own_nodes(self._loop.body) if _changes(one, ast.unparse(name))]
        with contextlib.suppress(_Unknown):
            return not changed and not self._value(part)
        return False

    def _turns(self, part: ast.expr, position: int, counted: list[ast.expr]) -> int:
        """Return the number of turns after which a part of a condition is met."""
        if part not in counted:
            return 0 if self._value(part) else NEVER
        counter = self._counter_in(part, position)
        if counter is None or not isinstance(part, ast.Compare):
            raise _Unknown
        first, relation, bound = counter
        return max(self._number(bound) - first + isinstance(relation, ast.Gt), 0)

    def _counter_in(self, part: ast.expr, position: int) -> tuple[int, ast.cmpop, ast.expr] | None:
        """Return the first value of a counter, and what it is compared with: ``number >= steps``."""
        if not isinstance(part, ast.Compare) or len(part.ops) != 1:
            return None
        left, right, relation = part.left, part.comparators[0], part.ops[0]
        first = self._first_value(left, position)
        if first is None and type(relation) in _MIRRORED:
            first, right, relation = self._first_value(right, position), left, _MIRRORED[type(relation)]()
        if first is None or not isinstance(relation, (ast.Gt, ast.GtE, ast.Eq)):
            return None
        return first, relation, right

    def _first_value(self, node: ast.expr, position: int) -> int | None:
        """Return the value of a counter at this place of the first turn; ``None`` if it counts no turns."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Constant):
            inner = self._first_value(node.left, position)
            return None if inner is None or type(node.right.value) is not int else inner + node.right.value
        name = ast.unparse(node)
        changes = [one for one in _own_nodes(self._loop.body) if _changes(one, name)]
        if name in self._start and not changes:
            return self._start[name]
        steps = [place for place, one in enumerate(self._loop.body) if one in changes and _adds_one(one)]
        if len(changes) != 1 or not steps:
            return None
        try:
            return self._number(node) + (steps[0] < position)
        except _Unknown:
            return None

    def _batches_before(self, position: int) -> int:
        """Return 1 if the batch in which the loop is left has been used before, else 0."""
        names = {node.id for node in ast.walk(self._loop.target) if isinstance(node, ast.Name)}.difference(self._start)
        used = (node for node in _own_nodes(self._loop.body[:position]) if isinstance(node, ast.Name))
        return int(any(node.id in names for node in used))

    def _number(self, node: ast.expr) -> int:
        value = self._value(node)
        if type(value) is not int:
            raise _Unknown
        return value

    def _value(self, node: ast.expr) -> Any:
        """Return a plain value of an expression. Raises ``_Unknown`` for all that would run code of the program."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            return self._operated(_COMPARISONS[type(node.ops[0])], node.left, node.comparators[0])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return self._operated(_OPERATIONS[type(node.op)], node.left, node.right)
        value = self._object(node)
        if value is not None and type(value) not in (int, float, str, bool):
            raise _Unknown
        return value

    def _operated(self, operation: Callable[[Any, Any], Any], left: ast.expr, right: ast.expr) -> Any:
        try:
            return operation(self._value(left), self._value(right))
        except (TypeError, ArithmeticError):
            raise _Unknown from None

    def _object(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            for scope in (self._locals, self._globals):
                if node.id in scope:
                    return scope[node.id]
        if isinstance(node, ast.Attribute):
            return _attribute(self._object(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            holder = self._object(node.value)
            if type(holder) is dict and node.slice.value in holder:
                return holder[node.slice.value]
        raise _Unknown


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute that an object stores itself, or its class as a plain value: no property is called."""
    try:
        return inspect.getattr_static(holder, name)
    except AttributeError:
        raise _Unknown from None


def _changes(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return ast.unparse(node.target) == name
    return isinstance(node, ast.Assign) and any(ast.unparse(one) == name for one in node.targets)


def _adds_one(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and isinstance(node.value, ast.Constant)
        and node.value.value == 1
    )

"""Recognizes losses and metrics that a rank computes from its own share of the data alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.loader_calls import LOADERS
from doctor.lint.python.script import FunctionNode, Script, last_name, per_script
from doctor.lint.python.training import ACCELERATOR, SAMPLER, unwrapped
from doctor.lint.python.value_flow import origins

MOST_NODES = 400
"""Nodes that one test is followed through."""
_FUNCTIONS = 2
"""Functions of the file that a value is followed through, each called by the one before."""
_AGREES = re.compile(
    r"reduce|gather|broadcast|(?<!no_)sync(?!hronize$)|vote|consensus|agree|all_ranks|dist_", re.IGNORECASE
)
"""Words in the names of functions that make ranks agree."""
_STOPS = re.compile(r"stop|patience", re.IGNORECASE)
"""Words in the names of objects and functions that decide when training ends."""
_METADATA = frozenset({"len", "size", "numel", "dim", "range", "time", "isinstance", "hasattr", "getattr"})
"""Functions whose result is the same on all ranks, or none of the loss."""
_MOVES = frozenset({"to", "cuda", "cpu", "item", "detach", "float", "numpy", "items", "keys", "values", "get"})
"""Methods that hand on the value that they are called on."""


_COMPOUND = (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List)


def is_own_loss(script: Script, test: ast.expr) -> bool:
    """Whether a test depends on a loss or metric of this rank's share of a distributed dataset.

    Followed are local names, the conditions under which counters and flags change, objects for early stopping, and
    functions of the file. A value that takes part in a collective is no longer of one rank.
    """
    return _is_own(script, test, _FUNCTIONS)


def _is_own(script: Script, value: ast.expr, functions: int) -> bool:
    walk = _Walk(script, script.function_of(value), functions)
    walk.follow(value)
    return walk.is_own and not walk.is_shared


class _Walk:
    """Follows a value inside one function. ``is_own``: it comes from a loop over a distributed loader; ``is_shared``:
    ranks exchanged it, or may have."""

    def __init__(self, script: Script, function: FunctionNode | None, functions: int) -> None:
        self._script = script
        self._function = function
        self._functions = functions
        self._seen: set[str] = set()
        self.is_own = False
        self.is_shared = False

    def follow(self, value: ast.expr) -> None:
        """Follow a value to the loops that it is computed in."""
        waiting: list[tuple[ast.AST, bool]] = [(value, False)]
        for _ in range(MOST_NODES):
            if not waiting or self.is_shared:
                return
            node, is_computed = waiting.pop()
            waiting.extend(self._parts(node, is_computed))

    def _parts(self, node: ast.AST, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        if isinstance(node, ast.Call):
            yield from self._of_call(node, is_computed)
        elif isinstance(node, ast.Name):
            yield from self._of_name(node, is_computed)
        elif isinstance(node, ast.Attribute) and _STOPS.search(ast.unparse(node)):
            yield from ((one, is_computed) for one in self._told(node.value))
        elif isinstance(node, (ast.Subscript, ast.Starred)) or (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)
        ):
            yield node.value, is_computed
        elif isinstance(node, _COMPOUND):
            yield from ((one, is_computed) for one in ast.iter_child_nodes(node))

    def _of_call(self, call: ast.Call, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        bare = last_name(call.func)
        if call in _exchanges(self._script):
            self.is_shared = True
        elif bare not in _METADATA:
            function = self._script.definition(call.func)
            if function is not None and self._script.class_of(function) is None:
                self._of_function(function)
            else:
                passes_on = bare in _MOVES and isinstance(call.func, ast.Attribute)
                if passes_on and isinstance(call.func, ast.Attribute):
                    yield call.func.value, is_computed
                yield from ((one, is_computed or not passes_on) for one in call.args)
                if isinstance(call.func, ast.Attribute) and _STOPS.search(ast.unparse(call.func.value)):
                    yield from ((one, True) for one in self._told(call.func.value))

    def _of_function(self, function: FunctionNode) -> None:
        """A function of the file that computes the value by itself."""
        agreeing = _exchanges(self._script)
        if self._functions == 0 or any(call in agreeing for call in self._script.inside(function, ast.Call)):
            self.is_shared = True
            return
        returned = [one.value for one in self._script.inside(function, ast.Return) if one.value is not None]
        if any(_is_own(self._script, one, self._functions - 1) for one in returned):
            self.is_own = True

    def _of_name(self, name: ast.Name, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        scope = self._script.scope_of(name, name.id)
        if scope is None or scope.node is not (self._function or self._script.tree):
            return
        if self._is_exchanged(name.id):
            self.is_shared = True
        for bound in scope.names[name.id]:
            if isinstance(bound, (ast.For, ast.AsyncFor)):
                is_batch = is_computed and not _is_counter(bound, name.id)
                self.is_own = self.is_own or (is_batch and is_distributed(self._script, bound))
            elif name.id not in self._seen and isinstance(bound, (ast.expr, ast.AugAssign)):
                yield from self._of_binding(bound, is_computed)
        if name.id not in self._seen:
            yield from ((one, is_computed) for one in self._appended(name.id))
        self._seen.add(name.id)

    def _appended(self, name: str) -> Iterator[ast.expr]:
        for call in self._script.inside(self._function or self._script.tree, ast.Call):
            if last_name(call.func) == "append" and isinstance(call.func, ast.Attribute):
                if isinstance(call.func.value, ast.Name) and call.func.value.id == name:
                    yield from call.args

    def _of_binding(self, bound: ast.expr | ast.AugAssign, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        value = bound.value if isinstance(bound, ast.AugAssign) else bound
        if isinstance(value, ast.Constant):  # a counter or a flag: when does it change?
            branches = (one.test for one in self._script.around(value) if isinstance(one, ast.If))
            yield from ((one, is_computed) for one in branches if self._script.function_of(one) is self._function)
        else:
            yield value, is_computed or isinstance(bound, ast.AugAssign)

    def _told(self, keeper: ast.expr) -> Iterator[ast.expr]:
        """What an object for early stopping is called with: ``stopper(val_loss)``, ``stopper.step(val_loss)``."""
        own = ast.unparse(keeper)
        if own in self._seen:
            return
        self._seen.add(own)
        for call in self._script.inside(self._function or self._script.tree, ast.Call):
            if own in (ast.unparse(call.func), ast.unparse(getattr(call.func, "value", call.func))):
                yield from call.args

    def _is_exchanged(self, name: str) -> bool:
        """Whether ranks exchange the value of a name in the function."""
        agreeing = _exchanges(self._script)
        return any(
            call in agreeing and any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(call))
            for call in self._script.inside(self._function or self._script.tree, ast.Call)
        )


@per_script
def _exchanges(script: Script) -> frozenset[ast.Call]:
    """Calls in which ranks exchange values, or may by their names; not those that only wait or reduce gradients."""
    known = {one.call for one in collectives_of(script).all() if _AGREES.search(one.word)}
    return frozenset(known.union(call for call in script.all(ast.Call) if _AGREES.search(last_name(call.func))))


def _is_counter(loop: ast.For | ast.AsyncFor, name: str) -> bool:
    """Whether a name is the number of ``enumerate``."""
    target = loop.target
    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
    return last_name(loop.iter) == "enumerate" and isinstance(first, ast.Name) and first.id == name


def is_distributed(script: Script, loop: ast.For | ast.AsyncFor) -> bool:
    """Whether each rank has its own share of what a loop goes over: a loader with a DistributedSampler, or one that
    Accelerate prepared."""
    source = unwrapped(loop.iter)
    return any(_gives_shares(script, one) for one in (source, *origins(script, source)))


def _gives_shares(script: Script, made: ast.expr) -> bool:
    made = made.value if isinstance(made, ast.Starred) else made
    if not isinstance(made, ast.Call):
        return False
    name = script.name(made.func)
    if name in (f"{ACCELERATOR}().prepare", f"{ACCELERATOR}().prepare_data_loader"):
        return True
    sampler = script.argument(made, "sampler", 3) if name in LOADERS else None
    values = script.values_of(sampler) if sampler is not None else ()
    return any(isinstance(one, ast.Call) and script.name(one.func) == SAMPLER for one in values)

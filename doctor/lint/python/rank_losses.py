"""Recognizes losses and metrics that a rank computes from its own share of the data alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.loader_calls import LOADERS
from doctor.lint.python.script import FunctionNode, Script, last_name, per_script
from doctor.lint.python.training import ACCELERATOR, FABRIC, SAMPLER, unwrapped
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


_SHARING = (
    f"{ACCELERATOR}().prepare",
    f"{ACCELERATOR}().prepare_data_loader",
    f"{FABRIC}().setup_dataloaders",
    "ray.train.torch.prepare_data_loader",
)
"""Calls that give each rank its own share of a loader."""
_COMPOUND = (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List)


def own_loops(script: Script, value: ast.expr, functions: int = _FUNCTIONS) -> frozenset[ast.AST]:
    """The loops over this rank's share of a distributed dataset in which a value is computed; none if ranks exchange
    it.

    Followed are local names and attributes of ``self``, the conditions under which counters and flags change, objects
    for early stopping, and functions of the file.
    """
    walk = _Walk(script, value, functions)
    return frozenset() if walk.is_shared else frozenset(walk.loops)


class _Walk:
    """Follows a value inside one function and its class. ``loops``: those over a distributed loader; ``is_shared``:
    ranks exchanged the value, or may have."""

    def __init__(self, script: Script, value: ast.expr, functions: int) -> None:
        self._script = script
        self._function: ast.AST = script.function_of(value) or script.tree
        self._class = script.class_of(value)
        self._functions = functions
        self._seen: set[str] = set()
        self._called: dict[ast.ClassDef | None, list[ast.Call]] = {}
        self.loops: set[ast.AST] = set()
        self.is_shared = False
        waiting: list[tuple[ast.AST, bool]] = [(value, False)]
        for _ in range(MOST_NODES):
            if not waiting or self.is_shared:
                return
            node, is_computed = waiting.pop()
            waiting.extend(self._parts(node, is_computed))

    def _parts(self, node: ast.AST, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        """What a node is made of, and whether it is computed from that rather than handed on."""
        if isinstance(node, ast.Call):
            yield from self._of_call(node, is_computed)
        elif isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_of_self(node)):
            yield from self._of_name(node, is_computed)
        elif isinstance(node, ast.Attribute) and _STOPS.search(ast.unparse(node)):
            yield from ((one, True) for one in self._told(node.value))
        elif isinstance(node, (ast.Subscript, ast.Starred)) or (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)
        ):
            yield node.value, is_computed
        elif isinstance(node, _COMPOUND):
            yield from ((one, is_computed) for one in ast.iter_child_nodes(node))

    def _of_call(self, call: ast.Call, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        bare = last_name(call.func)
        function = self._script.definition(call.func)
        if call in _exchanges(self._script):
            self.is_shared = True
        elif bare in _METADATA:
            return
        elif function is not None and self._script.class_of(function) in (None, self._class):
            self._of_function(function)
        else:
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            is_computed = is_computed or owner is None or bare not in _MOVES
            yield from ((one, is_computed) for one in (*call.args, *([owner] if owner is not None else ())))
            if owner is not None and _STOPS.search(ast.unparse(owner)):
                yield from ((one, True) for one in self._told(owner))

    def _of_function(self, function: FunctionNode) -> None:
        """A function of the file that computes the value by itself."""
        agreeing = _exchanges(self._script)
        if self._functions == 0 or any(call in agreeing for call in self._script.inside(function, ast.Call)):
            self.is_shared = True
            return
        for one in self._script.inside(function, ast.Return):
            if one.value is not None:
                self.loops |= own_loops(self._script, one.value, self._functions - 1)

    def _of_name(self, name: ast.Name | ast.Attribute, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        own = ast.unparse(name)
        for bound in self._bindings(name):
            if isinstance(bound, (ast.For, ast.AsyncFor)):
                if is_computed and not _is_counter(bound, own) and is_distributed(self._script, bound):
                    self.loops.add(bound)
            elif own not in self._seen:
                yield from self._of_binding(bound, is_computed)
        if own not in self._seen:
            self._seen.add(own)
            calls = self._calls(own)
            self.is_shared = self.is_shared or any(
                _gets(call, own) for call in calls if call in _exchanges(self._script)
            )
            yield from ((call.args[0], is_computed) for call in calls if _appends_to(call, own))

    def _bindings(self, name: ast.Name | ast.Attribute) -> Iterator[ast.AST]:
        bound: Iterable[ast.AST | str] = ()
        if isinstance(name, ast.Attribute):
            bound = self._script.bindings.members(self._class).get(name.attr, ()) if self._class is not None else ()
        elif (scope := self._script.scope_of(name, name.id)) is not None and scope.node is self._function:
            bound = scope.names[name.id]
        yield from (one for one in bound if isinstance(one, (ast.expr, ast.AugAssign, ast.For, ast.AsyncFor)))

    def _of_binding(self, bound: ast.AST, is_computed: bool) -> Iterator[tuple[ast.AST, bool]]:
        value = bound.value if isinstance(bound, ast.AugAssign) else bound
        if isinstance(value, ast.Constant):  # a counter or a flag: when does it change?
            branches = (one for one in self._script.around(value) if isinstance(one, ast.If))
            around = self._script.function_of(value)
            yield from ((one.test, is_computed) for one in branches if self._script.function_of(one) is around)
        else:
            yield value, is_computed or isinstance(bound, ast.AugAssign)

    def _told(self, keeper: ast.expr) -> Iterator[ast.expr]:
        """What an object for early stopping is called with: ``stopper(val_loss)``, ``stopper.step(val_loss)``."""
        own = ast.unparse(keeper)
        if f"{own}()" in self._seen:
            return
        self._seen.add(f"{own}()")
        for call in self._calls(own):
            if own in (ast.unparse(call.func), ast.unparse(getattr(call.func, "value", call.func))):
                yield from call.args

    def _calls(self, name: str) -> list[ast.Call]:
        """The calls in the function, or in all methods of the class for an attribute of ``self``."""
        owner = self._class if name.startswith("self.") else None
        if owner not in self._called:
            scopes = [self._function] if owner is None else owner.body
            self._called[owner] = [call for one in scopes for call in self._script.inside(one, ast.Call)]
        return self._called[owner]


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _gets(call: ast.Call, name: str) -> bool:
    parts = (part for one in call.args for part in ast.walk(one))
    return any(isinstance(part, (ast.Name, ast.Attribute)) and ast.unparse(part) == name for part in parts)


def _appends_to(call: ast.Call, name: str) -> bool:
    is_append = isinstance(call.func, ast.Attribute) and call.func.attr == "append" and bool(call.args)
    return is_append and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == name


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
    Accelerate, Fabric or Ray Train prepared."""
    source = unwrapped(loop.iter)
    return any(_gives_shares(script, one) for one in (source, *origins(script, source)))


def _gives_shares(script: Script, made: ast.expr) -> bool:
    made = made.value if isinstance(made, ast.Starred) else made
    if not isinstance(made, ast.Call):
        return False
    name = script.name(made.func)
    if name in _SHARING:
        return script.value(script.argument(made, "use_distributed_sampler")) is not False
    sampler = script.argument(made, "sampler", 3) if name in LOADERS else None
    values = script.values_of(sampler) if sampler is not None else ()
    return any(isinstance(one, ast.Call) and script.name(one.func) == SAMPLER for one in values)

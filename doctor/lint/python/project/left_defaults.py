"""Values that conditions have in every run of a project: of arguments that each call leaves at their default."""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from doctor.lint.python.project.call_graph import CALLED_BY_TORCH, INERT, PLAIN_BASES
from doctor.lint.python.project.release_branches import by_release
from doctor.lint.python.project.settings.named_configurations import numbers_in_named, values_in_named
from doctor.lint.python.project.settings.option_values import Values, is_chosen_nowhere, numbers_of, option_values
from doctor.lint.python.project.settings.options import number_in
from doctor.lint.python.script import UNKNOWN, FunctionNode, ProjectModules, Script, last_name, parsed

MOST_READ = 40
"""Files with a name that are parsed."""
DEPTH = 4
"""Names that are followed to the argument of a call."""
OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.In: lambda one, others: operator.contains(others, one),
    ast.NotIn: lambda one, others: not operator.contains(others, one),
}
_IS_PATH = re.compile(r"(?:\w+[.:])+\w+$|[A-Z]\w*$")
"""Texts by which a program may find a function or class."""
_SETS_BY_NAME = re.compile(r"\bsetattr\(|__dict__|\bvars\(|save_hyperparameters")


class Uses:
    """How a file uses names: calls by their last name, other reads, attributes that are set, texts, bases."""

    def __init__(self, text: str) -> None:
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        self.reads: Counter[str] = Counter()
        self.stores: Counter[str] = Counter()
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and (name := last_name(node.func)):
                self.calls[name].append(node)
                self.reads[name] -= 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _IS_PATH.match(node.value):
                self.reads[re.split(r"[.:]", node.value)[-1]] += 1
            elif isinstance(node, ast.alias) and node.asname not in (None, node.name):
                self.reads[node.name.rpartition(".")[2]] += 1
            for one in _without_effect(node):
                self.reads[last_name(one)] -= 1
            if isinstance(node, (ast.Name, ast.Attribute)):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if isinstance(node.ctx, ast.Load):
                    self.reads[name] += 1
                elif isinstance(node, ast.Attribute):
                    self.stores[name] += 1


def _without_effect(node: ast.AST) -> Iterator[ast.AST]:
    """The names and attributes that a node reads without calling them: ``super(Net, self)`` and annotations."""
    read: list[ast.AST | None] = []
    if isinstance(node, ast.Call) and last_name(node.func) in ("super", "isinstance", "issubclass"):
        read += node.args
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        read.append(node.returns)
    elif isinstance(node, (ast.arg, ast.AnnAssign)):
        read.append(node.annotation)
    inner = (one for part in read if part is not None for one in ast.walk(part))
    yield from (one for one in inner if isinstance(one, (ast.Name, ast.Attribute)))


def outcome(script: Script, test: ast.expr, depth: int = DEPTH, *, options: bool = False) -> bool | None:
    """What a condition is in every run, as far as it depends on arguments that all calls leave at their default; else
    ``None``. ``options``: also on options and settings, by the values that the project shows."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = outcome(script, test.operand, depth, options=options)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        ends = isinstance(test.op, ast.Or)
        answers = [outcome(script, one, depth, options=options) for one in test.values]
        return ends if ends in answers else None if None in answers else not ends
    if isinstance(test, ast.Compare):
        return _compared(script, test, depth, options=options)
    values = possible_values(script, test, depth, options=options)
    if values is None or (options and any(isinstance(one, str) for one in values)):
        return None  # whether a path is given is for the user to say
    return _agreed({bool(one) for one in values})


def _compared(script: Script, test: ast.Compare, depth: int, *, options: bool) -> bool | None:
    if options and (known := by_release(script, test)) is not None:
        return known
    compare = OPERATORS.get(type(test.ops[0])) if len(test.ops) == 1 else None
    left, right = (possible_values(script, one, depth, options=options) for one in (test.left, test.comparators[0]))
    if options and isinstance(test.ops[0], ast.Eq) and left is None and right is not None and len(right) == 1:
        return False if is_chosen_nowhere(script, test.left, *right) else None
    if compare is None or left is None or right is None:
        return None
    try:
        return _agreed({bool(compare(one, other)) for one in left for other in right})
    except TypeError:
        return None


def _agreed(answers: set[bool]) -> bool | None:
    return answers.pop() if len(answers) == 1 else None


def possible_values(script: Script, node: ast.expr, depth: int = DEPTH, *, options: bool) -> Values | None:
    """The values that an expression has in the runs that the project shows; ``None`` if they are unknown."""
    if isinstance(node, ast.Constant):
        return frozenset({node.value})
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        parts = [one.value for one in node.elts if isinstance(one, ast.Constant)]
        return frozenset({tuple(parts)}) if len(parts) == len(node.elts) else None
    if not depth:
        return None
    if isinstance(node, ast.Name):
        scope = script.bindings.scope_of(node, node.id)
        bound = scope.names[node.id] if scope is not None else ()
        if options and len(bound) > 1:
            taken = [one for one in bound if not _is_in_branch_left_out(script, one, depth - 1)]
            if len(taken) == 1 and isinstance(taken[0], ast.Constant):
                return frozenset({taken[0].value})  # an option selects it
        return _bound_values(script, bound, depth, options=options)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        owner = script.class_of(node)
        bound = script.bindings.members(owner).get(node.attr, ()) if owner is not None else ()
        if bound and not _is_set_elsewhere(script, node.attr):
            return _bound_values(script, bound, depth, options=options)
    return _values_of_setting(script, node, depth) if options else None


def _values_of_setting(script: Script, node: ast.expr, depth: int) -> Values | None:
    if isinstance(node, ast.Subscript) and (option := _entry_of(script, node)) is not None:
        return possible_values(script, option, depth - 1, options=True)
    return values_in_named(script, node) or option_values(script, node)


def _entry_of(script: Script, node: ast.Subscript) -> ast.expr | None:
    """The option or literal that the only dictionary of a name in the file has under a key, if nothing else in the file
    changes it: ``settings = {"plain": args.plain}``. Functions get it under its name, alone or in a tuple."""
    key, name = script.value(node.slice), node.value.id if isinstance(node.value, ast.Name) else ""
    changes = re.compile(rf"\b{name}(?:\[[^\]\n]*\]\s*[-+*/|]?=(?!=)|\.(?:update|pop|setdefault|clear)\()")
    if not isinstance(key, str) or not name or changes.search(script.text):
        return None
    bound = [one for one in script.all(ast.Name) if one.id == name and isinstance(one.ctx, ast.Store)]
    made = [one for one in map(script.parent, bound) if not isinstance(one, ast.Tuple)]
    value = made[0].value if len(made) == 1 and isinstance(made[0], ast.Assign) else None
    if not isinstance(value, ast.Dict) or None in value.keys:
        return None
    pairs = zip(value.keys, value.values, strict=True)
    found = [given for one, given in pairs if one is not None and script.value(one) == key]
    return found[0] if len(found) == 1 and isinstance(found[0], (ast.Attribute, ast.Constant)) else None


def is_off_in_text(script: Script, node: ast.AST) -> bool:
    """Whether a place is in a branch that switches leave out which the file sets to a literal once, and nothing changes
    later: ``ddp = False`` above ``if ddp:``."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.If) and inner is not outer.test and _is_of_literals(script, outer.test):
            is_in_body = any(inner is one for one in outer.body)
            if outcome(script, outer.test, options=True) is (not is_in_body):
                return True
        inner = outer
    return False


def _is_of_literals(script: Script, test: ast.expr) -> bool:
    """Whether a condition reads nothing but names that have one literal."""
    parts = [one for one in ast.walk(test) if isinstance(one, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))]
    scopes = [(script.scope_of(one, one.id), one.id) for one in parts if isinstance(one, ast.Name)]
    bound = [scope.names[name] if scope is not None else [] for scope, name in scopes]
    is_known = all(len(one) == 1 and isinstance(one[0], ast.Constant) for one in bound)
    return bool(parts) and len(bound) == len(parts) and is_known


def has_no_rounds(script: Script, loop: ast.AST) -> bool:
    """Whether a loop counts to an option or setting that is 0 in all starts that the project shows: ``for step in
    range(cfg.warmup_steps):``."""
    call = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(call, ast.Call) or last_name(call.func) != "range":
        return False
    if len(call.args) not in (1, 2) or isinstance(call.args[-1], ast.Constant):
        return False
    stops, first = possible_values(script, call.args[-1], options=True), call.args[0]
    is_from_below = len(call.args) == 2 and isinstance(first, ast.UnaryOp)
    return stops is not None and all(one == 0 and one is not False for one in stops) and not is_from_below


def _is_in_branch_left_out(script: Script, value: object, depth: int) -> bool:
    """Whether the value of a name is in a branch that no start takes which the project shows."""
    inner: ast.AST | None = value if isinstance(value, ast.expr) else None
    for outer in script.around(inner) if inner is not None and depth else ():
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(outer, ast.If) and inner is not outer.test:
            is_in_body = any(inner is one for one in outer.body)
            if outcome(script, outer.test, depth, options=True) is (not is_in_body):
                return True
        inner = outer
    return False


def _bound_values(script: Script, bound: object, depth: int, *, options: bool) -> Values | None:
    """The values of the only thing that a name is bound to. A literal is one for the user to change: a switch or
    number counts among the ``options``, since a start of the project as it is has that value."""
    one = bound[0] if isinstance(bound, (list, tuple)) and len(bound) == 1 else None
    if options and isinstance(one, ast.Constant) and isinstance(one.value, (bool, int)):
        return frozenset({one.value})
    if isinstance(one, ast.arg):
        value = _left_default(script, one)
        return None if value is UNKNOWN else frozenset({value})
    if isinstance(one, (ast.Name, ast.Attribute, ast.Subscript)):
        return possible_values(script, one, depth - 1, options=options)
    if isinstance(one, (ast.BoolOp, ast.UnaryOp, ast.Compare)):
        answer = outcome(script, one, depth - 1, options=options)
        return None if answer is None else frozenset({answer})
    return None


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "int": int,
    "float": float,
    "round": round,
    "abs": abs,
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
}
_OF_NUMBERS: dict[str, Callable[..., object]] = {"round": round, "item": lambda number: number}
"""Methods of the numbers that numpy gives."""
_ENVIRONMENT = ("os.environ.get", "os.getenv", "os.environ.setdefault")
MOST_VALUES = 24
"""Values of an expression that are kept; with more, they count as unknown."""


def shown_numbers(script: Script, node: ast.expr, depth: int = 2 * DEPTH) -> Values:
    """The values that the project shows for a number, by what it is computed from: literals, options and settings, the
    variables of the environment, and what callers give. :data:`UNKNOWN` is among them if there may be others."""
    if not depth:
        return frozenset({UNKNOWN})
    found = frozenset(_numbers_of_kind(script, node, depth - 1))
    return found if 0 < len(found) <= MOST_VALUES else frozenset({UNKNOWN})


def _numbers_of_kind(script: Script, node: ast.expr, depth: int) -> Iterable[object]:
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return shown_numbers(script, node.body, depth) | shown_numbers(script, node.orelse, depth)
    if isinstance(node, ast.BoolOp):
        is_or = isinstance(node.op, ast.Or)
        return _computed(
            lambda *given: _first(given, is_or), [shown_numbers(script, one, depth) for one in node.values]
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _computed(operator.neg, [shown_numbers(script, node.operand, depth)])
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        parts = [shown_numbers(script, one, depth) for one in (node.left, node.right)]
        return _computed(_ARITHMETIC[type(node.op)], parts)
    if isinstance(node, ast.Call):
        return _numbers_of_call(script, node, depth)
    if isinstance(node, ast.Name):
        return _numbers_of_name(script, node, depth)
    return _numbers_of_entry(script, node, depth)


def _first(given: Sequence[object], is_or: bool) -> object:
    """What ``or`` and ``and`` give."""
    return next((one for one in given[:-1] if bool(one) is is_or), given[-1])


def _computed(function: Callable[..., object], parts: list[Values]) -> set[object]:
    found: set[object] = set()
    for given in itertools.product(*parts):
        try:
            found.add(UNKNOWN if UNKNOWN in given else function(*given))
        except (TypeError, ValueError, ArithmeticError):
            found.add(UNKNOWN)
    return found


def _numbers_of_call(script: Script, call: ast.Call, depth: int) -> Iterable[object]:
    name = script.name(call.func) or last_name(call.func)
    if name in _ENVIRONMENT and call.args:
        default = shown_numbers(script, call.args[1], depth) if len(call.args) > 1 else frozenset()
        variable = script.value(call.args[0])
        return {_as_number(one) for one in default} | (
            _exported(script, variable) if isinstance(variable, str) else set()
        )
    if last_name(call.func) == "get" and call.args and isinstance(entry := script.value(call.args[0]), str):
        default = shown_numbers(script, call.args[1], depth) if len(call.args) > 1 else frozenset()
        return numbers_of(script, entry) | default
    if last_name(call.func) == "interp" and len(call.args) == 3 and isinstance(call.args[2], (ast.List, ast.Tuple)):
        # numpy.interp: what is between these numbers; of whole ones that are the same, this one
        return frozenset().union(*(shown_numbers(script, one, depth) for one in call.args[2].elts))
    if isinstance(call.func, ast.Attribute) and call.func.attr in _OF_NUMBERS and not call.args:
        return _computed(_OF_NUMBERS[call.func.attr], [shown_numbers(script, call.func.value, depth)])
    function = _FUNCTIONS.get(name.rpartition(".")[2])
    if function is None or call.keywords or any(isinstance(one, ast.Starred) for one in call.args):
        return ()
    return _computed(function, [shown_numbers(script, one, depth) for one in call.args])


def _as_number(value: object) -> object:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return UNKNOWN


def _exported(script: Script, variable: str) -> set[object]:
    """The numbers that launch files give a variable of the environment."""
    if script.modules is None:
        return set()
    given = re.compile(rf"(?<![\w$]){re.escape(variable)}[\"']?(?:=|:\s?)[\"']?([^\s\"';]+)")
    texts = script.modules.mentioning(variable, launches=True)
    return {_as_number(number_in(one, text)) for _, text in texts for one in given.findall(text)}


def _numbers_of_name(script: Script, name: ast.Name, depth: int) -> Iterable[object]:
    scope = script.bindings.scope_of(name, name.id)
    bound = scope.names[name.id] if scope is not None else ()
    if not bound:
        return numbers_of(script, name.id)
    found: set[object] = set()
    for one in bound:
        if isinstance(one, ast.arg):
            found |= _numbers_of_parameter(script, one, depth)
        elif isinstance(one, str):
            found |= numbers_of(script, one.rpartition(".")[2])
        elif isinstance(one, ast.expr) and not isinstance(one, ast.Starred):
            found |= shown_numbers(script, one, depth)
        else:
            found |= {UNKNOWN}
    return found


def _numbers_of_entry(script: Script, node: ast.expr, depth: int) -> Iterable[object]:
    """Those of ``self.steps``, of ``args.steps`` and of ``cfg["train"]["steps"]``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        values = script.values_of(node)
        if values:
            return frozenset().union(*(shown_numbers(script, one, depth) for one in values))
    name = script.value(node.slice) if isinstance(node, ast.Subscript) else getattr(node, "attr", None)
    if not isinstance(name, str):
        return ()
    return numbers_in_named(script, name) or numbers_of(script, name)


def _numbers_of_parameter(script: Script, parameter: ast.arg, depth: int) -> Values:
    """Those that the calls of the project give a parameter, or else those of an option or a setting of its name."""
    found = frozenset(_given_by_calls(script, parameter, depth))
    if found and UNKNOWN not in found:
        return found
    named = numbers_of(script, parameter.arg)
    return named | (found - {UNKNOWN}) if named else found


def _given_by_calls(script: Script, parameter: ast.arg, depth: int) -> Iterator[object]:
    function = script.function_of(parameter)
    if function is None or isinstance(function, ast.Lambda):
        return
    default, place = _default_of(function, parameter)
    owner = script.parent(function)
    name = owner.name if isinstance(owner, ast.ClassDef) and function.name == "__init__" else function.name
    is_bound = isinstance(owner, ast.ClassDef) and not any(
        last_name(one) == "staticmethod" for one in function.decorator_list
    )
    own = {ast.unparse(one): one for one in reversed(script.all(ast.Call)) if last_name(one.func) == name}
    yield from _given_by_spawns(script, function, place, depth)
    for uses in _uses_of(script, name):
        for call in uses.calls[name] if uses is not None else ():
            given = _argument(call, parameter.arg, place - is_bound)
            if script.is_open(call):
                yield UNKNOWN
            elif given is None:
                yield from shown_numbers(script, default, depth) if default is not None else [UNKNOWN]
            elif isinstance(given, ast.Constant):
                yield given.value
            elif (same := own.get(ast.unparse(call))) is not None:
                yield from shown_numbers(script, _argument(same, parameter.arg, place - is_bound) or given, depth)
            else:
                yield from numbers_of(script, last_name(given)) or [UNKNOWN]


def _given_by_spawns(script: Script, function: FunctionNode, place: int, depth: int) -> Iterator[object]:
    """What processes get that run a function: ``spawn(main, args=(world_size, 10))``, which puts the rank first."""
    for call in script.all(ast.Call):
        kind = last_name(call.func)
        if kind not in _STARTS or not any(
            last_name(one) == function.name for one in (*call.args[:1], *(word.value for word in call.keywords))
        ):
            continue
        given = script.argument(call, "args", 1)
        parts = given.elts if isinstance(given, (ast.Tuple, ast.List)) else []
        at = place - _STARTS[kind]
        yield from shown_numbers(script, parts[at], depth) if 0 <= at < len(parts) else [UNKNOWN]


_STARTS = {"spawn": 1, "start_processes": 1, "Process": 0, "notebook_launcher": 0}
"""Functions that start another one in processes, and the arguments that they give it first."""


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    named = next((one.value for one in call.keywords if one.arg == name), None)
    return named or (call.args[place] if 0 <= place < len(call.args) else None)


def _is_set_elsewhere(script: Script, attribute: str) -> bool:
    """Whether more than one statement of the project sets an attribute of that name, or one may by a computed name."""
    if _SETS_BY_NAME.search(script.text) or script.modules is None:
        return True
    uses = list(_uses_of(script, attribute))
    return None in uses or sum(one.stores[attribute] for one in uses if one is not None) != 1


def _left_default(script: Script, parameter: ast.arg) -> object:
    """The default of a parameter, a literal, if each call in the project leaves it, and there is one."""
    function = script.function_of(parameter)
    modules = script.modules
    if function is None or modules is None:
        return UNKNOWN
    default, place = _default_of(function, parameter)
    name = _called_as(script, function)
    if not isinstance(default, ast.Constant) or not name:
        return UNKNOWN
    if not name.startswith("_") and script.location and modules.installs(script.location):
        return UNKNOWN
    key = ("left default", script.path, name, parameter.arg, str(function.lineno))
    if key not in modules.memo:
        is_static = any(last_name(one) == "staticmethod" for one in function.decorator_list)
        is_bound = isinstance(script.parent(function), ast.ClassDef) and not is_static
        is_left = _is_left(script, name, parameter.arg, place - is_bound)
        modules.memo[key] = default.value if is_left else UNKNOWN
    found: object = modules.memo[key]
    return found


def given_by_all(script: Script, name: ast.expr) -> object:
    """The constant that every call in the project gives a parameter by its name; else :data:`UNKNOWN`."""
    scope = script.scope_of(name, name.id) if isinstance(name, ast.Name) else None
    bound = scope.names[name.id] if scope is not None and isinstance(name, ast.Name) else ()
    parameter = bound[0] if len(bound) == 1 else None
    function = script.function_of(parameter) if isinstance(parameter, ast.arg) else None
    modules = script.modules
    if function is None or modules is None or not isinstance(parameter, ast.arg) or function.name.startswith("__"):
        return UNKNOWN
    if modules.is_one_file or modules.notebooks(function.name) or modules.installs(script.location):
        return UNKNOWN
    uses = list(_uses_of(script, function.name))
    if any(one is None or one.reads[function.name] > 0 for one in uses):
        return UNKNOWN
    calls = [call for one in uses if one is not None for call in one.calls[function.name]]
    given = [[word.value for word in call.keywords if word.arg == parameter.arg] for call in calls]
    values = {one[0].value if one and isinstance(one[0], ast.Constant) else UNKNOWN for one in given}
    return values.pop() if len(values) == 1 else UNKNOWN


def _default_of(function: FunctionNode, parameter: ast.arg) -> tuple[ast.expr | None, int]:
    """The default of a parameter, and its place among those that may be given by position."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    if parameter in named:
        place = named.index(parameter)
        from_end = place - len(named)
        has_one = -from_end <= len(arguments.defaults)
        return (arguments.defaults[from_end] if has_one else None), place
    if parameter in arguments.kwonlyargs:
        return arguments.kw_defaults[arguments.kwonlyargs.index(parameter)], len(named) + 1
    return None, 0


def _called_as(script: Script, function: FunctionNode) -> str:
    """The name by which calls have a function; empty if others than the project's calls may call it."""
    owner = script.parent(function)
    if any(last_name(one) not in INERT - {"staticmethod"} for one in function.decorator_list):
        return ""
    if isinstance(owner, ast.Module):
        return function.name
    if not isinstance(owner, ast.ClassDef) or owner.decorator_list:
        return ""
    if function.name == "__init__":
        return owner.name
    is_plain = function.name not in CALLED_BY_TORCH and all(last_name(one) in PLAIN_BASES for one in owner.bases)
    return function.name if is_plain and not function.name.startswith("__") else ""


def _is_left(script: Script, name: str, parameter: str, place: int) -> bool:
    """Whether each use of a function or class in the project is a call without an argument."""
    modules = script.modules
    if modules is None or any(name in text for text in modules.notebooks(name)):
        return False
    word = re.compile(rf"\b{re.escape(name)}\b")
    gives = re.compile(rf"\b(?:{re.escape(name)}\(|{re.escape(parameter)}\b|_args_\b)")
    others = [text for _, text in modules.mentioning(name, launches=True) if gives.search(text)]
    pages = modules.pages(script.location) if script.location else ()
    others += [text for text in pages if re.search(rf"\b{re.escape(parameter)}\s?[=:]", text)]
    if any(map(word.search, others)):
        return False
    uses = list(_uses_of(script, name))
    if any(one is None or one.reads[name] > 0 for one in uses):
        return False
    calls = [call for one in uses if one is not None for call in one.calls[name]]
    return bool(calls) and not any(_may_give(script, one, parameter, place) for one in calls)


def _may_give(script: Script, call: ast.Call, parameter: str, place: int) -> bool:
    return script.is_open(call) or len(call.args) > place or any(one.arg == parameter for one in call.keywords)


def _uses_of(script: Script, name: str) -> Iterator[Uses | None]:
    """The uses in the script and each other file of the project that has a name; ``None`` for one that cannot be
    read."""
    modules = script.modules
    files = {script.path: script.text}
    files |= {shown: text for shown, text in modules.mentioning(name) if shown.endswith(".py")} if modules else {}
    word = re.compile(rf"\b{re.escape(name)}\b")
    having = [(shown, text) for shown, text in files.items() if word.search(text)]
    if modules is None or len(having) > MOST_READ:
        yield None
        return
    for shown, text in having:
        yield _uses_in(modules, shown, text)


def _uses_in(modules: ProjectModules, shown: str, text: str) -> Uses | None:
    key = ("uses of names", shown)
    if key not in modules.memo:
        try:
            modules.memo[key] = Uses(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            modules.memo[key] = None
    found: Uses | None = modules.memo[key]
    return found

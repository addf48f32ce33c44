"""Loops of the user's code that only ask whether something has come about, or only compute in Python.

Such as ``while not path.exists(): time.sleep(0.01)``, a request that is sent until it succeeds, or a search that never
converges. Every call in them is known by its source: a question to the system, a pause, an operation on numbers or
containers, or a function of the user of which the same holds. A loop that calls a model, a loader or a writer is none
of them, and neither is one that looks at a clock, because it ends by itself. Sources are parsed and never run.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from doctor.core.frames import is_user_code, line_of
from doctor.core.stack_dumps.rank_conditions import innermost_loop
from doctor.core.text import lazy_compile
from doctor.monitor.telemetry.stacks.asyncio_tasks import (
    coroutine_frames,
    event_loop_in,
    unfinished_tasks,
    waits_for_tasks,
)
from doctor.monitor.telemetry.stacks.loop_exits import user_frames, variables_of
from doctor.monitor.telemetry.stacks.rank_conditions import source_tree

_MOST_FRAMES, _MOST_USER_FRAMES, _DEEPEST = 60, 4, 3
"""Frames and frames of the user that are looked at, and calls of functions of the user that are followed."""
_CLOCKS = frozenset({"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "now"})
_PAUSES = frozenset(
    """
    accept acquire get join poll recv recvfrom request result sched_yield select sleep urlopen wait
    """.split()  # noqa: SIM905 - as those below
)
"""Calls that may let a thread sleep, or let others run first."""
_QUESTIONS = frozenset(
    """
    access call cancelled check check_call check_output close connect connect_ex create_connection done empty exists
    expanduser fileno flock full get_nowait getmtime getoutput getpid getsize glob head iterdir json joinpath kill link
    listdir load loads locked lockf lstat makedirs mkdir num_keys open Path ping Popen post put_nowait qsize
    raise_for_status read read_bytes read_text readline readlines rename resolve rmdir run running safe_load scandir
    seek settimeout socket stat state status symlink system tell terminate touch unlink
    critical debug error exception flush info log print warn warning suppress
    """.split()  # noqa: SIM905 - eighty lines otherwise
)
"""Calls that ask the system, a server, another thread or process, and messages."""
_STATES = frozenset(
    """
    access cancelled check done empty exists full getmtime getpid getsize locked lstat num_keys qsize stat state status
    """.split()  # noqa: SIM905 - as those above
)
"""Those of them that take nothing from what they ask, so that the answer may stay the same without end."""
_OPERATIONS = frozenset(
    """
    abs add all any append appendleft argmax argmin clear clip copy cos count cpu cycle decode detach difference discard
    dot encode endswith exp extend find float format index insert int isdigit isfinite isinf isnan item items
    keys len log lower lstrip match matmul max mean min norm numpy pop popleft pow remove repeat replace reshape reverse
    round rstrip search setdefault sin size sort split splitlines sqrt squeeze startswith std strip sum tolist transpose
    union unsqueeze update upper values var view
    """.split()  # noqa: SIM905 - sixty lines otherwise
)
"""Methods of numbers, arrays, texts and containers."""
_ASKS = lazy_compile(
    r"^(?:is|has|can|check|poll|wait)(?:_\w+)?$|(?:^|_)(?:ready|done|exists|alive|finished|completed?)$"
)
"""Names by which functions say that they ask for something."""
_WITHOUT_END = ("count", "cycle", "repeat")
"""Iterators of :mod:`itertools`."""
_MODULES = frozenset({"math", "cmath", "random", "numpy", "operator", "itertools", "statistics", "torch"})
"""Modules whose functions compute."""
_NOT_OF_TORCH = frozenset({"nn", "distributed", "utils", "save", "load", "optim", "autograd", "jit", "compile", "hub"})
_NOT_BUILTIN = frozenset({"eval", "exec", "compile", "input", "__import__", "breakpoint"})


class EndlessLoop(NamedTuple):
    """A loop that a thread is in: ``key`` is the same as long as it is. ``pauses``: it may sleep in there.

    ``repeats``: which loop asks with what it was answered, until that is empty, as of the next page of a list; the
    answer is part of the key. ``answer``: another number for each answer, even if it says the same."""

    key: Hashable
    pauses: bool
    repeats: str = ""
    answer: int | None = None


def endless_loop(frame: FrameType | None) -> EndlessLoop | None:
    """Return the loop that the stack ending in ``frame`` is in; ``None`` if it is in none of this kind.

    In an event loop of :mod:`asyncio`, all of its tasks have to be in such a loop, or wait for one that is. Reads a
    source file once, with a deadline.
    """
    found = None
    for one in itertools.islice(user_frames(frame, _MOST_FRAMES), _MOST_USER_FRAMES):
        if not one.f_code.co_flags & inspect.CO_COROUTINE:  # in which other tasks may do something meanwhile
            found = _loop_at(one) or found
    inner = event_loop_in(frame) if found is None else None
    return found if inner is None else _of_tasks(inner)


def _of_tasks(loop: object) -> EndlessLoop | None:
    tasks = unfinished_tasks(loop)
    found: dict[int, EndlessLoop | None] = {}
    for task in tasks:
        frames = [one for one in coroutine_frames(task) if is_user_code(one.f_code.co_filename)][:_MOST_USER_FRAMES]
        found[id(task)] = next(filter(None, map(_loop_at, frames)), None)
    loops = [one for one in found.values() if one is not None]
    waits = all(found[id(task)] is not None or waits_for_tasks(task, tasks) for task in tasks)
    return (
        EndlessLoop(frozenset(one.key for one in loops), all(one.pauses for one in loops)) if loops and waits else None
    )


def _loop_at(frame: FrameType) -> EndlessLoop | None:
    tree = source_tree(frame.f_code.co_filename)
    loop = None if tree is None else innermost_loop(tree, line_of(frame))
    if loop is None or isinstance(loop, ast.AsyncFor):
        return None
    cursor = _cursor(loop)
    with variables_of(frame) as variables:
        kinds = _Calls({**frame.f_globals, **variables}).kinds(
            [loop.test if isinstance(loop, ast.While) else loop.iter, *loop.body]
        )
        answer, counted = variables.get(cursor), _counted(loop, variables)
    if kinds is None or not _may_last(loop, kinds):
        return None
    key, pauses = (id(frame), id(frame.f_code), loop.lineno, *counted), "pause" in kinds
    if type(answer) not in (str, bytes, int) or "take" not in kinds:
        return EndlessLoop(key, pauses)
    where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{loop.lineno}"
    words = f"`{cursor}`, in the loop at {where}"
    return EndlessLoop((*key, answer), pauses, words, id(answer))


def _counted(loop: ast.For | ast.While, variables: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the whole numbers and lengths that the condition of a loop compares by order: ``len(merges) < most``.

    As long as they change, the loop comes nearer to its end."""
    if not (isinstance(loop, ast.While) and isinstance(loop.test, ast.Compare)):
        return ()
    if not all(isinstance(one, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for one in loop.test.ops):
        return ()
    found: list[int] = []
    for operand in (loop.test.left, *loop.test.comparators):
        is_length = isinstance(operand, ast.Call) and ast.unparse(operand.func) == "len" and len(operand.args) == 1
        named = operand.args[0] if isinstance(operand, ast.Call) and is_length else operand
        value: Any = variables.get(named.id) if isinstance(named, ast.Name) else None
        if is_length and type(value) in (list, dict, set, tuple, str):
            found.append(len(value))
        elif not is_length and type(value) is int:
            found.append(value)
    return tuple(found)


def _cursor(loop: ast.For | ast.While) -> str:
    """Return what a loop asks with until an answer names none, such as the next page; empty if there is no such name.

    It is tested for nothing but whether it is there, assigned from a part of an answer, and given to a call."""
    test = loop.test if isinstance(loop, ast.While) else None
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and len(test.ops) == 1:
        test = test.left
    if not isinstance(test, ast.Name):
        return ""
    nodes = list(_nodes(loop.body))
    taken = any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == test.id for target in node.targets)
        and isinstance(node.value, (ast.Subscript, ast.Attribute, ast.Call))
        for node in nodes
    )
    calls = (node for node in nodes if isinstance(node, ast.Call))
    given = (one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords)))
    names = {node.id for one in given for node in ast.walk(one) if isinstance(node, ast.Name)}
    return test.id if taken and test.id in names else ""


def _may_last(loop: ast.For | ast.While, kinds: set[str]) -> bool:
    """Return whether a loop waits or searches; one that reads to the end of a file ends, and so does one over data.

    One with a number of attempts may have many.
    """
    iterated = loop.iter if isinstance(loop, ast.For) else None
    over = ast.unparse(iterated.func).rpartition(".")[2] if isinstance(iterated, ast.Call) else ""
    if isinstance(loop, ast.While) and kinds == {"question"} and not _changes_anything(loop):
        return True  # it asks again and again, without a pause
    if isinstance(loop, ast.While) or over in _WITHOUT_END:
        return "pause" in kinds or "question" not in kinds
    return over == "range" and "pause" in kinds and any(isinstance(one, ast.Try) for one in loop.body)


def _changes_anything(loop: ast.While) -> bool:
    """Return whether a loop does anything but keep an answer: one that counts comes to an end."""
    for node in _nodes([loop.test, *loop.body]):
        if isinstance(node, (ast.Assign, ast.NamedExpr)) and not isinstance(node.value, ast.Call):
            return True
        if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.Delete, ast.For, ast.With)):
            return True
    return False


class _Calls:
    """Tells what the calls in statements are, with the values that names have."""

    def __init__(self, names: Mapping[str, Any], depth: int = 0) -> None:
        self._names, self._depth = names, depth

    def kinds(self, statements: Iterable[ast.AST]) -> set[str] | None:
        """Return ``pause``, ``question``, ``take`` of what is asked, and ``operation`` as far as they occur.

        ``None`` if any call is another.
        """
        found: set[str] = set()
        for node in _nodes(statements):
            if isinstance(node, (ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)):
                return None
            if isinstance(node, ast.Await) and not isinstance(node.value, ast.Call):
                return None
            if isinstance(node, ast.Call):
                kinds = self._of_call(node)
                if kinds is None:
                    return None
                found |= kinds
        return found

    def _of_call(self, call: ast.Call) -> set[str] | None:
        function = call.func
        value = self._value(function)
        if isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, FunctionType) and is_user_code(value.__code__.co_filename):
            return self._of_function(value)
        if isinstance(function, ast.Name):
            return self._of_name(function.id, value)
        if not isinstance(function, ast.Attribute) or function.attr in _CLOCKS:
            return None
        module = self._module_of(function)
        if module:
            return {"operation"} if not (module[0] == "torch" and _NOT_OF_TORCH.intersection(module)) else None
        return _of_method(function.attr)

    def _of_name(self, name: str, value: object) -> set[str] | None:
        if name in _CLOCKS or name in _NOT_BUILTIN:
            return None
        if value is not None and value is getattr(builtins, name, None):
            return {"question", "take"} if name in ("open", "print") else {"operation"}
        return _of_method(name) if value is None or not callable(getattr(type(value), "forward", None)) else None

    def _of_function(self, function: FunctionType) -> set[str] | None:
        code: CodeType = function.__code__
        tree = source_tree(code.co_filename) if self._depth < _DEEPEST else None
        node = None if tree is None else _definition(tree, code)
        if node is None:
            return None
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        names = {**function.__globals__, **{name: _content(cell) for name, cell in cells}}
        body = node.body if isinstance(node.body, list) else [node.body]
        return _Calls(names, self._depth + 1).kinds(body)

    def _value(self, node: ast.expr) -> Any:
        """Return what a name is bound to, or a method of the user's class; ``None`` if it is not known."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self._names.get(node.value.id)
            kinds = type(owner).__mro__ if owner is not None and not isinstance(owner, ModuleType) else ()
            return next((one.__dict__[node.attr] for one in kinds if node.attr in one.__dict__), None)
        return None

    def _module_of(self, node: ast.Attribute) -> list[str]:
        """Return the parts of ``numpy.linalg.norm``; none if it is not a function of one of these modules."""
        parts = [node.attr]
        inner: ast.expr = node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        value = self._names.get(inner.id) if isinstance(inner, ast.Name) else None
        if not isinstance(value, ModuleType) or value.__name__.partition(".")[0] not in _MODULES:
            return []
        return [*value.__name__.split("."), *reversed(parts)]


def _of_method(name: str) -> set[str] | None:
    if name in _PAUSES:
        return {"pause"}
    if name in _STATES or _ASKS.search(name):
        return {"question"}
    if name in _QUESTIONS:
        return {"question", "take"}
    return {"operation"} if name in _OPERATIONS else None


def _nodes(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _definition(tree: ast.Module, code: CodeType) -> ast.FunctionDef | ast.Lambda | None:
    found = (
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.Lambda))
        and (min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]) == code.co_firstlineno)
    )
    return next(found, None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None

"""What source shows of a call: conditions that let only some ranks reach it, its group, the handle that it waits for,
and the loop around it.

The source is parsed and never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from doctor.core.stack_dumps.native_calls import DEVICE_WAIT
from doctor.core.text import lazy_compile
from doctor.knowledge.waiting_functions import ANY_COLLECTIVE

Loop: TypeAlias = "ast.For | ast.AsyncFor | ast.While"
LONGEST = 100
"""Maximum characters of a condition."""
_RANK_WORD = lazy_compile(
    r"(?<!matrix_)(?<!lora_)(?<![a-z])rank\d*(?![a-z])(?!_(?:loss|score|weight|metric))"
    r"|is_(?:global|world|rank|local)_zero|rank_?zero|is_(?:world|local)_process_zero|process_index"
    r"|(?:is_)?(?:local_)?(?:main|master|chief|primary)_?process|is_(?:main|master|chief|primary)\b",
    re.IGNORECASE,
)
_COLLECTIVES = frozenset(
    """
    all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    gather irecv isend reduce reduce_scatter reduce_scatter_tensor scatter
    """.split()  # noqa: SIM905 - fifteen lines otherwise
)
"""Functions of ``torch.distributed`` that return handles."""
_TRANSFERS = (
    frozenset(("send", "isend", "send_object_list")),
    frozenset(("recv", "irecv", "recv_object_list")),
)
"""Functions of ``torch.distributed`` that send, and those that receive."""
_COPIES = ("item", "cpu", "tolist", "numpy", "synchronize")
"""Methods of tensors and streams that wait for the device."""
_COUNTERS = ("range", "trange", "count", "islice", "itertools.count", "itertools.islice", "tqdm.trange")
"""Functions that end a loop after a number of turns."""
_GROUP_ARGUMENTS = ("group", "process_group")
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def rank_condition(tree: ast.Module, line: int) -> str:
    """Return the innermost rank condition under which ``line`` of a module runs, or ``""``.

    ``if TEST, line N``, ``elif TEST, line N``, ``else of if TEST, line N``, ``after if TEST: return, line N`` (the line
    runs if the test fails) or ``@rank_zero_only``; ``N`` is the line of the first ``if`` of a chain.
    """
    found = ""
    for block, position in _blocks_around(tree, line):
        statement = block[position]
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = statement.decorator_list if line >= statement.body[0].lineno else []
            words = map(ast.unparse, decorators)
            found = next((f"@{word}"[:LONGEST] for word in words if _RANK_WORD.search(word)), "")
            continue
        found = _left_before(block[:position]) or found
        if isinstance(statement, ast.If):
            found = _branch(statement, line) or found
    return found


def group_of_call(tree: ast.Module, line: int) -> str:
    """Return the argument ``group`` of the call in a line of a module, as written; ``""`` if it has none or several."""
    found = {
        ast.unparse(keyword.value)[:LONGEST]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for keyword in node.keywords
        if keyword.arg in _GROUP_ARGUMENTS
    }
    return found.pop() if len(found) == 1 else ""


def awaited_call(tree: ast.Module, line: int) -> str:
    """Return the collective whose handle a line waits for (``work.wait()``); ``""`` if it waits for none.

    A line that copies a value from the device (``loss.item()``) waits for the device. ``collective`` if the module
    does not show in the same function which one it is. Of :class:`threading.Event` and the like, ``wait`` is Python
    code, so that a thread in it has another innermost line.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "wait":
            name = _name_in(node.func.value)
            if node.lineno <= line <= (node.end_lineno or node.lineno) and name != "os":
                return _collective_in(_function_around(tree, line), name) or ANY_COLLECTIVE
    return DEVICE_WAIT if _copies_from_device(tree, line) else ""


def is_answered(tree: ast.Module, line: int) -> bool:
    """Return whether the function around a line that sends or receives also makes the other of the two calls.

    Its ranks then exchange messages there, each with its part of the calls.
    """
    function = _function_around(tree, line)
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    here = {_last_name(one) for one in calls if one.lineno <= line <= (one.end_lineno or one.lineno)}
    made = {_last_name(one) for one in calls}
    return any(here & ours and made & theirs for ours, theirs in (_TRANSFERS, _TRANSFERS[::-1]))


def _last_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else _name_of_call(call)


def _copies_from_device(tree: ast.Module, line: int) -> bool:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    lines = ((node.lineno, node.end_lineno or node.lineno) for node in calls if _name_of_call(node) in _COPIES)
    return any(first <= line <= last for first, last in lines)


def _name_of_call(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _function_around(tree: ast.Module, line: int) -> ast.AST:
    found: ast.AST = tree
    for block, position in _blocks_around(tree, line):
        if isinstance(block[position], (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = block[position]
    return found


def _collective_in(function: ast.AST, name: str, depth: int = 2) -> str:
    """Return the collective whose result a function assigns or appends to a name, or to a name that it iterates."""
    for node in ast.walk(function):
        value: ast.AST | None = None
        if isinstance(node, ast.Assign) and any(_name_in(target) == name for target in node.targets):
            value = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            value = node.args[0] if node.args and _name_in(node.func.value) == name else None
        elif isinstance(node, (ast.For, ast.comprehension)) and _name_in(node.target) == name:
            value = node.iter
        if value is not None and (found := _collective_of(function, value, depth)):
            return found
    return ""


def _collective_of(function: ast.AST, value: ast.AST, depth: int) -> str:
    called = (node.func for node in ast.walk(value) if isinstance(node, ast.Call))
    names = [_name_in(one).rpartition(".")[2] for one in called]
    known = next((one for one in names if one in _COLLECTIVES), "")
    if known or not depth:
        return {"isend": "send", "irecv": "recv"}.get(known, known)
    return (
        _collective_in(function, _name_in(value), depth - 1)
        if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript))
        else ""
    )


def _name_in(node: ast.AST) -> str:
    """Return the name or attribute of an expression without indices: ``self.works`` of ``self.works[-1]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def loop_around(tree: ast.Module, line: int) -> tuple[int, ...]:
    """Return the first and the last line of the innermost loop around a line in its function; ``()`` if in none."""
    loop = innermost_loop(tree, line)
    return () if loop is None else (loop.lineno, loop.end_lineno or loop.lineno)


def data_of_loop(tree: ast.Module, line: int) -> str:
    """Return what the innermost loop around a line iterates over, as written, if only the end of that can end the loop.

    ``""`` for ranges of numbers, which data does not end, and for loops with ``break`` or ``return``."""
    loop = innermost_loop(tree, line)
    if not isinstance(loop, (ast.For, ast.AsyncFor)) or any(leaves_loop(one) for one in loop.body):
        return ""
    numbers = any(isinstance(node, ast.Call) and _name_in(node.func) in _COUNTERS for node in ast.walk(loop.iter))
    return "" if numbers else ast.unparse(loop.iter)[:LONGEST]


def loop_at(tree: ast.Module, line: int) -> ast.For | ast.AsyncFor | None:
    """Return the ``for`` statement in whose first line, which takes its next element, ``line`` is."""
    loop = innermost_loop(tree, line)
    if not isinstance(loop, (ast.For, ast.AsyncFor)) or line > (loop.iter.end_lineno or loop.lineno):
        return None
    return loop


def innermost_loop(tree: ast.Module, line: int) -> Loop | None:
    """Return the innermost loop that ``line`` is in."""
    return next(reversed(loops_around(tree, line)), None)


def loops_around(tree: ast.Module, line: int) -> list[Loop]:
    """Return the loops that ``line`` is in, outermost first, up to the function that it is in."""
    found: list[Loop] = []
    for block, position in _blocks_around(tree, line):
        statement = block[position]
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = []
        elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            found.append(statement)
    return found


def leaves_loop(statement: ast.AST, *, is_inner: bool = False) -> bool:
    """Whether a statement of a loop can leave it; ``is_inner``: it is in a loop inside of that one."""
    if isinstance(statement, ast.Return) or (isinstance(statement, ast.Break) and not is_inner):
        return True
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    is_inner = is_inner or isinstance(statement, (ast.For, ast.AsyncFor, ast.While))
    return any(leaves_loop(one, is_inner=is_inner) for one in ast.iter_child_nodes(statement))


def _blocks_around(tree: ast.Module, line: int) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield every list of statements around ``line``, outermost first, and the line's index."""
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        block = blocks.pop()
        for position, statement in enumerate(block):
            if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                yield block, position
                blocks = list(_blocks_of(statement))
                break


def _blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks inside a statement; blocks of ``elif`` belong to the first ``if``."""
    if isinstance(statement, ast.If) and (following := _elif_of(statement)):
        yield statement.body
        yield from _blocks_of(following)
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if block:
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _left_before(block: Sequence[ast.stmt]) -> str:
    """Return a statement before the line, in its own block, by which some ranks leave."""
    for statement in reversed(block):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVES) and not statement.orelse:
            if test := _rank_test(statement):
                leaves = type(statement.body[-1]).__name__.lower()
                return f"after if {test}: {leaves}, line {statement.lineno}"
    return ""


def _branch(first: ast.If, line: int) -> str:
    """Return the branch of an ``if`` that contains ``line``, if its test mentions ranks."""
    word, statement = "if", first
    while not _within(statement.body, line) and (following := _elif_of(statement)):
        word, statement = "elif", following
    test = _rank_test(statement)
    if test and _within(statement.body, line):
        return f"{word} {test}, line {first.lineno}"
    return f"else of if {test}, line {first.lineno}" if test and _within(statement.orelse, line) else ""


def _elif_of(statement: ast.If) -> ast.If | None:
    """Return the following ``elif``: an ``if`` in the ``else`` at the same column."""
    inner = statement.orelse[0] if len(statement.orelse) == 1 else None
    return inner if isinstance(inner, ast.If) and inner.col_offset == statement.col_offset else None


def _within(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno)


def _rank_test(statement: ast.If) -> str:
    test = ast.unparse(statement.test)
    return test[:LONGEST] if _RANK_WORD.search(test) else ""

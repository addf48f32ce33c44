"""Conditions on the rank: parts of a script that run on some ranks only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from doctor.core.text import lazy_compile
from doctor.lint.python.project.imported_functions import imported_function
from doctor.lint.python.project.settings.reduced_ranks import is_rank_itself
from doctor.lint.python.script import FunctionNode, Script, last_name, per_script

RANK_NAMES = lazy_compile(
    r"^(?!.*(?:lora|low|matrix|tensor|page|adapter|max|num)_rank$)(?:.*_)?"
    r"(?:rank|RANK|procid|PROCID|process_index|process_idx)$"
)
"""Variables, attributes and environment variables that hold a rank. ``world_size`` and ``rank_zero_only`` do not, nor
do the ranks of matrices."""

MAIN_NAMES = lazy_compile(
    r"^_?(?:is|on|am_i)_?(?:the_)?(?:(?:local|world|global|node)_)*(?:"
    r"(?:main|master|primary|rank_?(?:zero|0)|global_zero|process_zero|chief|logging_process)"
    r"(?:_process|_proc|_rank|_node|_ordinal|_worker)?|(?:first|last)_(?:process|rank|worker|node))$"
    r"|^_?(?:main|master)_(?:process|proc|rank)$"
)
"""Names that test for the one rank that writes: ``is_main_process``, ``trainer.is_global_zero``."""

OF_THE_JOB = lazy_compile(
    r"(?:^|_)(?:is_)?(?:distributed|dist|ddp|fsdp|deepspeed|parallel|multi_?gpus?|multi_?node|n_?gpus?|nprocs?|"
    r"world_size|nums?_(?:processes|procs?|gpus?|nodes?|replicas|devices?|ranks)|(?:gpus?|ranks?|procs?|nodes?)_nums?|"
    r"is_initialized|is_available|multiprocess(?:ing)?)"
    r"(?:_|$)",
    re.IGNORECASE,
)
"""Names that test whether, or over how many ranks, the job is distributed: equal on all ranks."""

ON_ONE_RANK = frozenset(
    {
        "lightning.pytorch.utilities.rank_zero_only",
        "accelerate.Accelerator().on_main_process",
        "accelerate.Accelerator().on_local_main_process",
        "accelerate.Accelerator().on_last_process",
        "accelerate.Accelerator().on_process",
    }
)
"""Decorators of functions that run on one rank and return at once on the others."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DECORATORS = frozenset({"rank_zero_only", "master_only", "main_process_only", "on_main_process", "main_rank_only"})
_ASKED = lazy_compile(r"^(?:get_(?:\w+_)?rank|(?:local_|node_|cross_)?rank|process_index)$")
_FIRST = lazy_compile(r"^(?:\w+_)?(?:main_process|rank_zero|zero|process_zero|rank0)_first$")


class RankCondition(NamedTuple):
    """Why a node runs on some ranks only: the ``test`` as written, and its statement or decorator ``where``. ``other``:
    the branch of the other ranks. ``certain``: false if another condition, which may never hold, has a part in it."""

    test: str
    where: ast.AST
    other: tuple[ast.stmt, ...] = ()
    certain: bool = True


def plain_test(test: str) -> str:
    """A test without double negation: ``not (rank != 0)`` as ``rank == 0``, ``not (not is_main)`` as ``is_main``."""
    node = parsed = parsed_test(test)
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = node.operand
        if isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not):
            node = inner.operand
            continue
        if not isinstance(inner, ast.Compare) or len(inner.ops) != 1 or type(inner.ops[0]) not in _OPPOSITES:
            break
        node = ast.Compare(inner.left, [_OPPOSITES[type(inner.ops[0])]()], inner.comparators)
    return test if node is None or node is parsed else ast.unparse(node)


def denied_test(test: str) -> str:
    """What keeps a rank from a place: ``rank == 0 and done`` of ``not (rank == 0 and done)``; else empty."""
    inner = test.removeprefix("not (").removesuffix(")")
    if inner == test or isinstance(parsed_test(test), ast.BoolOp):
        return ""
    return inner if isinstance(parsed_test(inner), ast.BoolOp) or "…" in inner else ""


_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def parsed_test(test: str) -> ast.expr | None:
    """The expression; ``None`` for a text that was cut off."""
    try:
        return ast.parse(test, mode="eval").body
    except SyntaxError:
        return None


def is_rank(script: Script, node: ast.expr) -> bool:
    """Whether an expression is a rank of this process: ``rank``, ``args.local_rank``, ``dist.get_rank()``,
    ``int(os.environ["RANK"])``."""
    if isinstance(node, ast.Name):
        return bool(RANK_NAMES.search(node.id)) and not _is_counted(script, node)
    if isinstance(node, ast.Attribute):
        return bool(RANK_NAMES.search(node.attr))
    if isinstance(node, ast.Subscript):
        key = script.value(node.slice)
        return isinstance(key, str) and bool(RANK_NAMES.search(key)) and key.isupper()
    if isinstance(node, ast.Call):
        return _is_asked_rank(script, node)
    return False


def _is_counted(script: Script, node: ast.Name, depth: int = 3) -> bool:
    """Whether a name only has numbers of loops that all ranks run through: ``for rank in range(world_size)``, or
    ``row * columns + column`` of two such numbers."""
    scope = script.scope_of(node, node.id)
    bound = scope.names[node.id] if scope is not None else []
    return bool(bound) and all(_counts(script, one, depth) for one in bound)


def _counts(script: Script, bound: ast.AST | str, depth: int) -> bool:
    if isinstance(bound, (ast.For, ast.comprehension)):
        over = bound.iter
        return isinstance(over, ast.Call) and last_name(over.func) in ("range", "enumerate") and not _names_rank(over)
    if not isinstance(bound, ast.BinOp) or depth == 0:
        return False
    named = [one for one in ast.walk(bound) if isinstance(one, ast.Name)]
    counted = [one for one in named if _is_counted(script, one, depth - 1)]
    return bool(counted) and not _names_rank(bound, but=counted)


def _names_rank(node: ast.AST, but: Sequence[ast.Name] = ()) -> bool:
    named = (one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)) and one not in but)
    return any(RANK_NAMES.search(last_name(one)) for one in named)


def _is_asked_rank(script: Script, call: ast.Call) -> bool:
    called = last_name(call.func)
    if _ASKED.match(called):
        return True
    if called in ("int", "str") and len(call.args) == 1:
        return is_rank(script, call.args[0])
    if called in ("getenv", "get") and call.args:
        key = script.value(call.args[0])
        return isinstance(key, str) and key.isupper() and bool(RANK_NAMES.search(key))
    return False


def is_rank_test(script: Script, node: ast.expr, depth: int = 4) -> bool:
    """Whether the value of an expression differs between ranks because it tests the rank. Tests for the presence of
    several ranks (``local_rank != -1``, ``rank is None``) do not."""
    if depth == 0:
        return False
    if isinstance(node, ast.BoolOp):
        alone = isinstance(node.op, ast.And) and any(asks_for_one(one) for one in node.values)
        return not alone and any(is_rank_test(script, one, depth) for one in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return is_rank(script, node.operand) or is_rank_test(script, node.operand, depth)
    if isinstance(node, ast.Compare):
        return _is_rank_compared(script, node)
    if isinstance(node, ast.Call):
        return _is_asked_main(script, node, depth)
    if isinstance(node, ast.Attribute):
        return bool(MAIN_NAMES.match(node.attr)) and not names_function(script, node)
    if isinstance(node, ast.Name):
        if MAIN_NAMES.match(node.id):
            return not names_function(script, node)
        values = script.values_of(node)  # ``master = rank == 0`` and later ``if master``
        return len(values) == 1 and values[0] is not node and is_rank_test(script, values[0], depth - 1)
    return False


def names_function(script: Script, node: ast.Name | ast.Attribute) -> bool:
    """Whether a name is a function that nothing calls: ``if is_main_process:`` holds on all ranks then. A decorator, as
    that of a property, may make something else of it."""
    function = script.definition(node)
    if function is not None:
        return not function.decorator_list
    return "()" not in script.name(node) and imported_function(script, node, whole=True) is not None


def _is_rank_compared(script: Script, node: ast.Compare) -> bool:
    sides = (node.left, *node.comparators)
    if not any(_mentions_rank(script, side) for side in sides):
        return False
    others = [script.value(side) for side in sides if not _mentions_rank(script, side)]
    if len(sides) != 2 or len(others) != 1:
        return True
    if is_rank_itself(script, *sorted(sides, key=lambda side: not _mentions_rank(script, side))):
        return False
    is_bound = isinstance(node.ops[0], (ast.GtE, ast.Lt))
    # ``rank == -1``, ``rank is not None``, ``local_rank >= 0``, ``rank > -1``: the same on all ranks of a job.
    if others[0] in (None, -1) or (others[0] == 0 and is_bound):
        return False
    # ``rank < world_size``, ``rank >= nprocs``: leaves out processes that are not ranks.
    return not (is_bound and _is_world_size(script, node.comparators[0]))


def _is_world_size(script: Script, node: ast.expr) -> bool:
    """Also ``size`` next to ``rank`` in the parameters of a function, as in PyTorch's tutorial of torch.distributed."""
    if OF_THE_JOB.search(last_name(node)):
        return True
    if not isinstance(node, ast.Name):
        return False
    function = script.function_of(node)
    names = [one.arg for one in function.args.args] if isinstance(function, _FUNCTIONS) else []
    is_given = node.id == "size" and "size" in names and "rank" in names
    values = script.values_of(node)
    asked = bool(values) and all(
        isinstance(one, ast.Call) and last_name(one.func) == "get_world_size" for one in values
    )
    return is_given or asked


def asks_for_one(node: ast.expr) -> bool:
    """``world_size == 1``, ``not distributed``: a test for jobs of one process."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return bool(OF_THE_JOB.search(last_name(node.operand)))
    if not isinstance(node, ast.Compare) or not OF_THE_JOB.search(last_name(node.left)):
        return False
    value = node.comparators[0].value if isinstance(node.comparators[0], ast.Constant) else None
    return (type(node.ops[0]), value) in ((ast.Eq, 1), (ast.Lt, 2), (ast.LtE, 1))


def is_of_the_job(script: Script, node: ast.expr) -> bool:
    """Whether a test asks how the job is distributed (``dist.is_initialized()``, ``args.distributed``, ``world_size >
    1``): true on all ranks of a job of several. Parameters that switch it for one call do not, nor do variables that
    say what some objects are (``is_distributed = any(is_sharded(one) for one in models)``)."""
    named = [one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))]
    if any(isinstance(one, ast.Name) and (_is_switch(script, one) or _is_of_objects(script, one)) for one in named):
        return False
    return any(OF_THE_JOB.search(last_name(one)) for one in named)


def _is_switch(script: Script, node: ast.Name) -> bool:
    scope = script.scope_of(node, node.id)
    given = scope.names[node.id] if scope is not None else []
    owned = isinstance(script.parent(node), ast.Attribute)
    return not owned and "size" not in node.id and any(isinstance(one, ast.arg) for one in given)


def _is_of_objects(script: Script, node: ast.Name) -> bool:
    values = [one for one in script.values_of(node) if not isinstance(one, ast.Constant)]
    return bool(values) and all(isinstance(one, ast.Call) and last_name(one.func) in ("any", "all") for one in values)


def _mentions_rank(script: Script, node: ast.expr) -> bool:
    """A rank, also in sums such as ``rank % 8``."""
    if isinstance(node, ast.BinOp):
        return _mentions_rank(script, node.left) or _mentions_rank(script, node.right)
    return is_rank(script, node)


def _is_asked_main(script: Script, call: ast.Call, depth: int) -> bool:
    called = last_name(call.func)
    if MAIN_NAMES.match(called):
        return True
    if called == "bool" and len(call.args) == 1:
        return is_rank_test(script, call.args[0], depth)
    function = script.definition(call.func)
    if function is None and (imported := imported_function(script, call.func)) is not None:
        return imported.function.tests_rank
    returned = [one.value for one in script.inside(function, ast.Return)] if function is not None else []
    return len(returned) == 1 and returned[0] is not None and is_rank_test(script, returned[0], depth - 1)


def rank_condition(script: Script, node: ast.AST) -> RankCondition | None:
    """The nearest rank condition under which ``node`` runs, inside its function: a branch, a decorator, or an earlier
    return of the other ranks."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.If) and is_rank_test(script, outer.test):
            if inner in outer.body:
                return RankCondition(script.text_of(outer.test), outer, tuple(outer.orelse))
            if inner in outer.orelse:
                return RankCondition(f"not ({script.text_of(outer.test)})", outer, tuple(outer.body))
        if isinstance(outer, ast.IfExp) and inner is not outer.test and is_rank_test(script, outer.test):
            return RankCondition(script.text_of(outer.test), outer)
        if isinstance(outer, ast.match_case) and (matched := _matched(script, outer)) is not None:
            return matched
        if found := _short_circuited(script, outer, inner) or _left_before(script, outer, inner):
            return found
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _decorated(script, outer) if inner in outer.body else None
        if isinstance(outer, ast.Lambda):
            return None
        inner = outer
    return None


def _matched(script: Script, case: ast.match_case) -> RankCondition | None:
    """``match rank: case 0:``, and the case of the others after it. A guard may leave out more ranks."""
    switch = script.parent(case)
    if not isinstance(switch, ast.Match) or not _mentions_rank(script, switch.subject):
        return None
    before = switch.cases[: switch.cases.index(case)]
    if not _constants_in(case.pattern) and not any(_constants_in(one.pattern) for one in before):
        return None
    subject = script.text_of(switch.subject)
    others = tuple(part for one in switch.cases if one is not case for part in one.body)
    if named := _constants_in(case.pattern):
        return RankCondition(_is_one_of(subject, named), switch, others)
    left = [one for other in before for one in _constants_in(other.pattern)]
    return RankCondition(f"not ({_is_one_of(subject, left)})", switch, others)


def _constants_in(pattern: ast.pattern) -> list[str]:
    """The numbers of a pattern; none for one that matches anything, or something else."""
    parts = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    values = [one.value for one in parts if isinstance(one, ast.MatchValue)]
    numbers = [one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, int)]
    return list(map(str, numbers)) if len(numbers) == len(parts) else []


def _is_one_of(subject: str, numbers: list[str]) -> str:
    return f"{subject} == {numbers[0]}" if len(numbers) == 1 else f"{subject} in ({', '.join(numbers)})"


def _short_circuited(script: Script, outer: ast.AST, inner: ast.AST) -> RankCondition | None:
    """``rank == 0 and save()``."""
    if not isinstance(outer, ast.BoolOp) or inner not in outer.values:
        return None
    before = outer.values[: outer.values.index(inner)]
    test = next((one for one in before if is_rank_test(script, one)), None)
    return RankCondition(script.text_of(test), outer) if test is not None else None


def _left_before(script: Script, outer: ast.AST, inner: ast.AST) -> RankCondition | None:
    """``if rank != 0: return`` (or continue or break, in a loop) above it in the same block, or in its ``else``."""
    for statement in statements_before(outer, inner):
        if not isinstance(statement, ast.If) or not is_rank_test(script, statement.test):
            continue
        leaves, others_leave = _leaves(script, statement.body), _leaves(script, statement.orelse)
        always = not _is_asked_for(script, statement.test)
        if leaves and not others_leave:
            return RankCondition(f"not ({script.text_of(statement.test)})", statement, tuple(statement.body), always)
        if others_leave and not leaves:
            return RankCondition(script.text_of(statement.test), statement, tuple(statement.orelse), always)
    return None


def _is_asked_for(script: Script, test: ast.expr) -> bool:
    """``if args.only_test and rank == 0: return``: in runs without that option, no rank leaves. What is computed, such
    as ``done(loss)``, holds at some time in any run."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else []
    others = [one for one in parts if not is_rank_test(script, one) and not is_of_the_job(script, one)]
    return bool(others) and all(isinstance(one, (ast.Name, ast.Attribute)) for one in others)


BLOCKS = ("body", "orelse", "finalbody")
"""Attributes of statements with blocks."""


def block_of(outer: ast.AST, inner: ast.AST, names: tuple[str, ...] = BLOCKS) -> list[ast.stmt]:
    """The block of ``outer``, one of those with these names, that holds ``inner``."""
    blocks = (getattr(outer, name, None) for name in names)
    return next((one for one in blocks if isinstance(one, list) and inner in one), [])


def statements_before(outer: ast.AST, inner: ast.AST, names: tuple[str, ...] = BLOCKS[:2]) -> list[ast.stmt]:
    """The statements above ``inner`` in the block of ``outer`` that holds it."""
    block = block_of(outer, inner, names)
    return block[: block.index(inner)] if isinstance(inner, ast.stmt) and block else []


def statements_above(script: Script, node: ast.AST) -> Iterator[ast.stmt]:
    """The statements that have run in the function around a place, or in the module, before it is reached."""
    inner = node
    for outer in script.around(node):
        yield from statements_before(outer, inner, BLOCKS)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        inner = outer


def _leaves(script: Script, block: list[ast.stmt]) -> bool:
    if not block or not isinstance(block[-1], ast.Break):
        return bool(block) and isinstance(block[-1], (ast.Return, ast.Continue))
    loop = script.nearest(block[-1], ast.For, ast.While)
    # With another break in the loop, the other ranks may leave it at the same step.
    return loop is not None and sum(1 for _ in script.inside(loop, ast.Break)) == 1


def _decorated(script: Script, function: FunctionNode) -> RankCondition | None:
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if script.name(called) in ON_ONE_RANK or last_name(called) in _DECORATORS:
            return RankCondition(f"@{script.text_of(decorator)}", decorator)
    return None


@per_script
def has_rank_conditions(script: Script) -> bool:
    """Whether any part of a script runs on some ranks only."""
    tests = [one.test for one in script.all(ast.If)] + [one.test for one in script.all(ast.IfExp)]
    tests += [value for one in script.all(ast.BoolOp) for value in one.values]
    return (
        any(is_rank_test(script, one) for one in tests)
        or any(_mentions_rank(script, one.subject) for one in script.all(ast.Match))
        or any(_decorated(script, one) is not None for one in script.functions)
        or any(_is_first(item.context_expr) for one in script.all(ast.With) for item in one.items)
    )


def rank_conditions(script: Script, node: ast.AST) -> Iterator[RankCondition]:
    """All rank conditions under which it runs, the nearest first, inside its function."""
    current: ast.AST = node
    while (found := rank_condition(script, current)) is not None:
        yield found
        if not isinstance(found.where, ast.stmt):
            return
        current = found.where


def main_first(script: Script, node: ast.AST) -> ast.Call | None:
    """The call of ``with accelerator.main_process_first():`` around a node, inside its function: the other ranks wait
    at a barrier until one rank has left the block."""
    inner = node
    for outer in script.around(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return None
        if isinstance(outer, ast.With) and inner in outer.body:
            for item in outer.items:
                if isinstance(item.context_expr, ast.Call) and _is_first(item.context_expr):
                    return item.context_expr
        inner = outer
    return None


def _is_first(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and bool(_FIRST.match(last_name(context.func)))


_NUMBER_OF_RANKS = lazy_compile(
    r"\b(?:device_count|world_?size|get_world_size|num_processes|nprocs|ws|(?:n|num)?_?gpus?)\b", re.IGNORECASE
)


def stops_several(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement ends jobs of several ranks: ``assert world_size == 1``, ``if num_gpus > 1: raise ...``."""
    if isinstance(statement, ast.Assert):
        return _compares_ranks(script, statement.test, ast.Eq)
    if isinstance(statement, ast.If) and statement.body and isinstance(statement.body[0], ast.Raise):
        return _compares_ranks(script, statement.test, ast.Gt) or _compares_ranks(script, statement.test, ast.NotEq)
    return False


def _compares_ranks(script: Script, test: ast.expr, operator: type[ast.cmpop]) -> bool:
    """Whether a test compares the number of ranks with one."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], operator):
        return False
    if script.value(test.comparators[0]) != 1:
        return False
    texts = [ast.unparse(one) for one in (test.left, *script.values_of(test.left))]
    return any(map(_NUMBER_OF_RANKS.search, texts))

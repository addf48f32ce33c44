"""CODE043: a variable that is assigned on one rank only, and read on all ranks."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.collective_paths import ends_in_error
from doctor.lint.python.rank_branches import BLOCKS, RankCondition, block_of, plain_test, rank_condition
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import FunctionNode
from doctor.lint.python.single_rank import may_run_alone
from doctor.lint.python.training import RANK_WORDS, is_test, several_ranks
from doctor.testing.script_cases import fails, passes

_OPTIONS = re.compile(r"^(?:\w+_)?(?:args?|opts?|options|cfg|config|conf|flags|hparams|params)$", re.IGNORECASE)
"""Names of objects that hold what a run was started with, which is the same on all ranks."""
_OWN_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class _Bound(NamedTuple):
    """A name and its scope's function, all bindings of which are in branches of ``branch.test``."""

    name: str
    function: FunctionNode | None
    branch: ast.If
    condition: RankCondition


@rule(
    id="CODE043",
    severity=Severity.ERROR,
    reads=Script,
    mentions=RANK_WORDS,
    cases=lambda: (
        fails("a folder that rank 0 names and all ranks use", _script("folder = make()", "load(folder)  # !")),
        fails("in a loop further down", _script("writer = make()", "for x in loader:\n        writer.add(x)  # !")),
        fails("reported once", _script("best = 0", "if_better(best)  # !\n    best_of(best)")),
        fails("under an option", _script("folder = make()", "if args.save:\n        load(folder)  # !")),
        fails("the branch of the others", _script("folder = make()", "load(folder)  # !", test="rank != 0")),
        fails("in the module", _MODULE),
        passes("both branches", _script("folder = make()\n    else:\n        folder = None", "load(folder)")),
        passes("a value before", _script("folder = make()", "load(folder)", before="folder = None\n    ")),
        passes("read on the same rank", _script("folder = make()", "if rank == 0:\n        load(folder)")),
        passes("the others have left", _script("folder = make()", "if rank:\n        return\n    load(folder)")),
        passes(
            "the others fail above", _script("folder = make()\n    else:\n        raise ValueError", "load(folder)")
        ),
        passes("read by a flag of that rank", _FLAG),
        passes(
            "read by what only that rank has",
            _script("folder = make()", "if args.kept and shown:\n        load(folder)"),
        ),
        passes(
            "an exception is caught",
            _script("folder = make()", "try:\n        load(folder)\n    except NameError:\n        pass"),
        ),
        passes("a function that one rank calls", _CALLED),
        passes("one process", "rank = 0\nif rank == 0:\n    folder = make()\nload(folder)\n"),
    ),
)
def name_bound_on_one_rank(script: Script) -> Iterator[Violation]:
    """Ask whether variables that all ranks read are assigned on all ranks.

    Why it hurts: the other ranks fail with a `NameError` (`UnboundLocalError` in a function), which a run with one
    process never shows, and the first one waits for them in the next collective.
    Fix: Assign the variable on all ranks, or broadcast the value of one rank with
    `torch.distributed.broadcast_object_list`.
    """
    ranks = several_ranks(script)
    if ranks is None or is_test(script) or script.path.endswith(".ipynb"):
        return
    for bound in _bound_on_some(script):
        read = next((one for one in _reads(script, bound) if _reached_by_all(script, one, bound)), None)
        if read is not None:
            yield _violation(script, bound, read)


def _violation(script: Script, bound: _Bound, read: ast.Name) -> Violation:
    line = bound.branch.lineno
    test = plain_test(bound.condition.test)
    return Violation(
        read,
        f"`{bound.name}` is assigned only if {test} (line {line}), but read on all ranks",
        severity=Severity.WARNING if _conditions(script, read, bound.branch) else None,
        evidence=(("condition", test), ("line_of_condition", line)),
    )


def _bound_on_some(script: Script) -> Iterator[_Bound]:
    """Names all bindings of which are in branches with the same condition on the rank, in the order of the file."""
    seen: set[tuple[FunctionNode | None, str]] = set()
    for node in script.all(ast.Name):
        if not isinstance(node.ctx, ast.Store) or hasattr(builtins, node.id):
            continue
        function = script.function_of(node)
        if (function, node.id) in seen:
            continue
        seen.add((function, node.id))
        scope = script.scope_of(node, node.id)
        if scope is None or scope.node is not (function or script.tree) or function not in run_by_all(script):
            continue
        found = [_branch_of(script, one) for one in scope.names[node.id]]
        first = found[0]
        if first is None or _is_shared(script, node.id):
            continue
        if all(one is not None and one[1].test == first[1].test for one in found):
            yield _Bound(node.id, function, first[0], first[1])


def _is_shared(script: Script, name: str) -> bool:
    """Whether functions bind the name of an outer scope."""
    return any(name in one.names for kind in (ast.Global, ast.Nonlocal) for one in script.all(kind))


def _branch_of(script: Script, binding: ast.AST | str) -> tuple[ast.If, RankCondition] | None:
    """The branch that a binding is in, and that the other ranks do not leave the function at."""
    if not isinstance(binding, ast.AST):
        return None
    condition = rank_condition(script, binding)
    if condition is None or not isinstance(condition.where, ast.If) or condition.where not in script.around(binding):
        return None
    others = condition.other
    return None if others and ends_in_error(others[-1]) else (condition.where, condition)


def _reads(script: Script, bound: _Bound) -> Iterator[ast.Name]:
    """Reads below the branch in the same function, in the order of the file."""
    end = bound.branch.end_lineno or bound.branch.lineno
    reads = (
        one
        for one in script.all(ast.Name)
        if one.id == bound.name and isinstance(one.ctx, ast.Load) and one.lineno > end
        if script.function_of(one) is bound.function and script.nearest(one, *_OWN_SCOPES) is bound.function
    )
    yield from sorted(reads, key=lambda one: (one.lineno, one.col_offset))


def _reached_by_all(script: Script, read: ast.Name, bound: _Bound) -> bool:
    """Whether ranks without the value come to a read: below the branch, under conditions on options only."""
    if may_run_alone(script, read):
        return False
    inner: ast.AST = read
    above = {*script.around(bound.branch)}
    for outer in script.around(read):
        if outer in above:
            return True
        if isinstance(outer, ast.Try) and (inner in outer.body or inner in outer.handlers) and outer.handlers:
            return False
        if isinstance(outer, ast.BoolOp) and inner is not outer.values[0]:
            return False
        if isinstance(outer, (ast.IfExp, ast.comprehension, ast.match_case)) and inner is not getattr(
            outer, "test", None
        ):
            return False
        if isinstance(outer, ast.If) and inner is not outer.test and not _asks_for_options(outer.test):
            return False
        inner = outer
    return True


def _conditions(script: Script, read: ast.Name, branch: ast.If) -> bool:
    above = {*script.around(branch)}
    return any(
        isinstance(outer, (ast.If, ast.While))
        and outer not in above
        and block_of(outer, script.statement_of(read), BLOCKS)
        for outer in script.around(read)
    )


def _asks_for_options(test: ast.expr) -> bool:
    """``args.resume``, ``not cfg.train.debug``, ``args.mode == "test"``."""
    if isinstance(test, ast.BoolOp):
        return all(_asks_for_options(one) for one in test.values)
    if isinstance(test, ast.UnaryOp):
        return _asks_for_options(test.operand)
    if isinstance(test, ast.Compare):
        return _asks_for_options(test.left) and all(isinstance(one, ast.Constant) for one in test.comparators)
    inner = test
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return isinstance(test, ast.Attribute) and isinstance(inner, ast.Name) and bool(_OPTIONS.match(inner.id))


def _script(binds: str, reads: str, *, before: str = "", test: str = "rank == 0") -> str:
    return f"""\
import torch.distributed as dist

def main(args):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    {before}if {test}:
        {binds}
    model = DDP(build())
    {reads}

main(parse())
"""


_MODULE = """\
dist.init_process_group("nccl")
model = DDP(build())
if dist.get_rank() == 0:
    folder = make()
load(folder)  # !
"""
_FLAG: str = _script(
    "folder = make()", "if is_saved:\n        load(folder)", before="is_saved = args.save and rank == 0\n    "
)
_CALLED = """\
def report(rank):
    if rank == 0:
        folder = make()
    load(folder)

dist.init_process_group("nccl")
model = DDP(build())
if dist.get_rank() == 0:
    report(0)
"""

"""CODE043: a variable that is assigned on one rank only, and read on all ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.collective_paths import ends_in_error
from doctor.lint.python.project.failing_calls import binding_condition
from doctor.lint.python.project.settings.compared_ranks import is_certain_of
from doctor.lint.python.rank_branches import RankCondition, is_rank_test, plain_test
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.single_rank import may_run_alone
from doctor.lint.python.training import RANK_WORDS, is_test, several_ranks
from doctor.testing.script_cases import fails, passes

_OPTIONS = re.compile(r"^(?:\w+_)?(?:args?|opts?|options|cfg|config|conf|flags|hparams|params)$", re.IGNORECASE)
"""Names of objects that hold what a run was started with, which is the same on all ranks."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


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
        passes(
            "a comprehension with a variable of that name",
            _script("for one in rows:\n            print(one)", "load([one for one in rows])"),
        ),
        passes("a function that one rank calls", _CALLED),
        passes(
            "each rank in its turn",
            _script("    model = make()", "fit(model)", test="rank == turn", before="for turn in range(4):\n        "),
        ),
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
    if several_ranks(script) is None or is_test(script) or script.path.endswith(".ipynb"):
        return
    seen: set[tuple[ast.AST, str]] = set()
    for read in _candidates(script):
        scope = script.function_of(read) or script.tree
        condition = binding_condition(script, read) if (scope, read.id) not in seen else None
        if condition is not None and isinstance(condition.where, ast.If) and _fails(script, read, condition.where):
            if condition.other and ends_in_error(condition.other[-1]):
                continue
            seen.add((scope, read.id))
            yield _violation(script, read, condition)


def _violation(script: Script, read: ast.Name, condition: RankCondition) -> Violation:
    test, line = plain_test(condition.test), getattr(condition.where, "lineno", 0)
    is_certain = is_certain_of(script, condition)  # else it may hold on all ranks
    is_asked_for = _is_asked_for(script, read, condition.where)
    return Violation(
        read,
        f"`{read.id}` is assigned only if {test} (line {line}), but read on all ranks",
        severity=Severity.INFO if not is_certain else Severity.WARNING if is_asked_for else None,
        preview=not is_certain,
        evidence=(("condition", test), ("line_of_condition", line)),
    )


def _candidates(script: Script) -> list[ast.Name]:
    """Reads of names that a branch on the rank binds, in functions that all ranks run, in the order of the file."""
    branches = [one for one in script.all(ast.If) if is_rank_test(script, one.test)]
    bound = {name.id for one in branches for name in script.inside(one, ast.Name) if isinstance(name.ctx, ast.Store)}
    bound.difference_update(name for one in script.all(ast.Nonlocal) for name in one.names)
    reads = [one for one in script.all(ast.Name) if one.id in bound and isinstance(one.ctx, ast.Load)]
    own = [one for one in reads if script.function_of(one) in run_by_all(script) and _is_in_its_scope(script, one)]
    return sorted(own, key=lambda one: (one.lineno, one.col_offset))


def _is_in_its_scope(script: Script, read: ast.Name) -> bool:
    """Whether a name is read where it is bound, and not in a comprehension that binds it, nor in a function or class,
    which may run later or never."""
    scope = script.scope_of(read, read.id)
    own = (one for outer in script.around(read) for one in getattr(outer, "generators", ()))
    if any(read.id == name.id for one in own for name in script.inside(one.target, ast.Name)):
        return False
    return scope is not None and scope.node is (script.nearest(read, *_SCOPES) or script.tree)


def _fails(script: Script, read: ast.Name, branch: ast.If) -> bool:
    """Whether ranks that did not take a branch reach a read below it, under conditions on options only."""
    if read.lineno <= (branch.end_lineno or branch.lineno) or may_run_alone(script, read):
        return False
    if _comes_to_all(script, read, branch):
        return False
    inner: ast.AST = read
    for outer in _around_but(script, read, branch):
        if isinstance(outer, ast.Try) and outer.handlers and (inner in outer.body or inner in outer.handlers):
            return False
        if isinstance(outer, ast.BoolOp) and inner is not outer.values[0]:
            return False
        if isinstance(outer, (ast.comprehension, ast.match_case)):
            return False
        if isinstance(outer, ast.IfExp) and inner is not outer.test:
            return False
        if isinstance(outer, ast.If) and inner is not outer.test and not _asks_for_options(outer.test):
            return False
        inner = outer
    return True


def _comes_to_all(script: Script, read: ast.Name, branch: ast.If) -> bool:
    """Whether a loop that ends before the read compares the rank with its variable: ranks bind the name in turn."""
    loops = (one for one in _around_but(script, branch, read) if isinstance(one, (ast.For, ast.AsyncFor)))
    turns = {name.id for loop in loops for name in script.inside(loop.target, ast.Name)}
    return any(name.id in turns for name in script.inside(branch.test, ast.Name))


def _around_but(script: Script, inner: ast.AST, other: ast.AST) -> Iterator[ast.AST]:
    """What is around a node, but not around the other."""
    above = {*script.around(other)}
    return (one for one in script.around(inner) if one not in above)


def _is_asked_for(script: Script, read: ast.Name, branch: ast.AST) -> bool:
    """Whether the read depends on an option."""
    around = (one for one in _around_but(script, read, branch) if isinstance(one, ast.If))
    return any(read not in {*ast.walk(one.test)} for one in around)


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

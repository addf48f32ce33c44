"""Parts of a program that are in no job: before it makes a process group, or where it never makes one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.project.imported_functions import called_function
from doctor.lint.python.rank_branches import BLOCKS, statements_above, statements_before
from doctor.lint.python.script import FunctionNode, Script, last_name, module_of
from doctor.lint.python.single_rank import excludes, ways_to
from doctor.lint.python.training import FABRIC, MADE_FOR_RANKS, TRAINER, calls_of, several_ranks

_DEPTH = 4
"""Callers in a row."""
_MAY_JOIN = re.compile(
    r"process_?group|\bdist(?:ributed)?\b|_dist|_start|ddp|\bfit\b|launch|spawn|accelerat|deepspeed|fabric|trainer|"
    r"\binit|_init|set_?up|\bstart|engine|horovod|hvd|\bray\b|\bjoin_|parallel|\btrain\b|\brun\b|instantiat|"
    r"import_module|getattr|Training_?Arg|HfArgumentParser|into_dataclasses|PartialState|AcceleratorState",
    re.IGNORECASE,
)
"""Words of calls that may create a process group; transformers' ``TrainingArguments`` does when it is made."""
_JOINS_NONE = re.compile(
    r"(?:^|[._])(?:(?:model|net|network|encoder|decoder|backbone|module)\.train|"
    r"(?:dset|dataset|tokenizer|processor|transform|vocab|vocabulary)s?\.\w+)$"
)
"""Calls that join no job: ``model.train()``, and methods of data."""
_ONLY_ASKS = re.compile(
    r"is_(?:available|initialized|torchelastic_launched|\w+_available)|get_(?:rank|world_size|backend)"
)
_OF_SEVERAL_WORDS = re.compile(r"[a-z0-9]{3,}(?:_[a-z0-9]+)+")
_OF_TORCH = re.compile(r"torch\.(?!distributed\b|multiprocessing\b|nn\b(?!\.init\b))")
_PLAIN_BASE = re.compile(r"torch\.(?:nn\.(?!parallel\b|DataParallel\b)|utils\.data\.)\w+")
"""Classes of torch whose initialization joins no job."""
_OF_OUTPUT = re.compile(r"logg|callback", re.IGNORECASE)
"""Objects of a configuration that join no job."""


def waits_for_nobody(script: Script, call: ast.Call, word: str) -> bool:
    """Whether a call is of a function that runs a collective only ``if torch.distributed.is_initialized()``, and the
    program has made nothing yet which may create a process group, or has just destroyed it."""
    found = called_function(script, call)
    if found is None or not _asks_before(*found, word):
        return False
    return _is_after_group(script, call) or _is_before_group(script, call, last_name(call.func), _DEPTH)


def is_apart_from_group(script: Script, node: ast.AST) -> bool:
    """Whether a place is in a branch that excludes every call which may create a process group, and every one that
    shows ranks: in ``run_single()`` of ``if mode == "single": run_single()`` with ``else: run_distributed()``."""
    ways = list(ways_to(script, node))
    if not all(ways) or several_ranks(script) is None:
        return False

    def may_meet(call: ast.Call) -> bool:
        return any(not excludes(way, other) for other in ways_to(script, call) for way in ways)

    if any(map(may_meet, script.calls(*MADE_FOR_RANKS, TRAINER, FABRIC))):
        return False  # most do; to follow all other calls takes long
    others = (one for one in script.all(ast.Call) if script.definition(one.func) is None)  # what they call is there
    return not any(may_meet(one) for one in others if _may_join(script, one, ""))


def _asks_before(script: Script, function: FunctionNode, word: str) -> bool:
    """Whether each call of a collective in a function is in a branch for initialized groups, or below a ``return`` for
    others."""
    calls = [one for one in script.inside(function, ast.Call) if last_name(one.func) == word]
    return bool(calls) and all(_is_in_branch(script, one) for one in calls)


def _is_in_branch(script: Script, node: ast.AST) -> bool:
    inner = node
    for outer in script.around(node):
        if isinstance(outer, ast.If) and inner in outer.body and _asks(script, outer.test):
            return True
        if any(_returns_without_group(script, one) for one in statements_before(outer, inner, BLOCKS)):
            return True
        inner = outer
    return False


def _returns_without_group(script: Script, statement: ast.stmt) -> bool:
    """``if not dist.is_initialized(): return``, also with other conditions for it."""
    if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], ast.Return):
        return False
    test = statement.test
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
    return any(
        isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Not) and _asks(script, one.operand) for one in parts
    )


def _asks(script: Script, test: ast.expr, depth: int = _DEPTH) -> bool:
    """``dist.is_initialized()``, alone or with ``and``, or a function of the project that returns it."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    calls = [one for one in parts if isinstance(one, ast.Call)]
    if any(last_name(one.func) == "is_initialized" for one in calls):
        return True
    found = [called_function(script, one) for one in calls] if depth else []
    return any(one is not None and _returns_it(*one, depth - 1) for one in found)


def _returns_it(script: Script, function: FunctionNode, depth: int) -> bool:
    """Whether a function returns true only with a process group."""
    values = [one.value for one in script.inside(function, ast.Return)]
    return bool(values) and all(_is_false_without(script, function, one, depth) for one in values)


def _is_false_without(script: Script, function: FunctionNode, value: ast.expr | None, depth: int) -> bool:
    """Whether a value that a function returns is false without a process group: it asks for one, is a constant, or
    stands below statements that return ``False`` for other processes."""
    if value is None or (isinstance(value, ast.Constant) and not value.value):
        return True
    if _asks(script, value, depth):
        return True
    return isinstance(value, ast.Constant) and any(
        _returns_without_group(script, one) for one in function.body if one.lineno < value.lineno
    )


def _is_before_group(script: Script, node: ast.AST, helper: str, depth: int) -> bool:
    """Whether no call above a place, nor above that of each caller up to the start of the program, may join a job."""
    function = script.function_of(node)
    if depth == 0 or any(_may_join(script, one, helper) for one in _calls_above(script, node, function)):
        return False
    if function is None:
        return True
    callers = list(calls_of(script, function))
    if not callers:
        # The start that Hydra, Click or Fire give a program
        return bool(function.decorator_list) and isinstance(script.parent(function), ast.Module)
    return all(_is_before_group(script, one, helper, depth - 1) for one in callers)


def _is_after_group(script: Script, node: ast.AST) -> bool:
    """Whether the process group is destroyed above a place, also under a condition that asks for one
    (``if world_size > 1``), and not made again."""
    above = sorted(statements_above(script, node), key=lambda one: one.lineno)
    ends = [one for one in above if any(map(_destroys, _on_the_way(one)))]
    if not ends:
        return False
    later = (call for one in above if one.lineno > ends[-1].lineno for call in script.inside(one, ast.Call))
    return not any(_may_join(script, one, "") for one in later)


def _on_the_way(statement: ast.stmt) -> list[ast.stmt]:
    """A statement, or those of the branch of an ``if`` without another one."""
    return statement.body if isinstance(statement, ast.If) and not statement.orelse else [statement]


def _destroys(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Call) and last_name(value.func) == "destroy_process_group" and not value.args


def _calls_above(script: Script, node: ast.AST, function: FunctionNode | None) -> Iterator[ast.Call]:
    line = getattr(node, "lineno", 0)
    for one in script.all(ast.Call):
        if script.function_of(one) in (None, function) and one.lineno < line:
            yield one


def _may_join(script: Script, call: ast.Call, helper: str, depth: int = _DEPTH) -> bool:
    """Whether a call may create a process group: a function of the project by what it calls, another one by its
    name."""
    if last_name(call.func) == helper or _OF_TORCH.match(script.name(call.func)):
        return False
    if _initializes_plain_base(script, call) or _sets_mode_of_module(script, call):
        return False
    given = " ".join(ast.unparse(one) for one in (*call.args, *(word.value for word in call.keywords)))
    if _OF_OUTPUT.search(given):
        return False
    found = called_function(script, call)
    if found is None or depth == 0:
        called = ast.unparse(call.func)
        if not _MAY_JOIN.search(called) or _JOINS_NONE.search(called) or _ONLY_ASKS.fullmatch(last_name(call.func)):
            return False
        methods = list(_methods(script, call)) if depth else []
        return not methods or any(
            _may_join(other, one, helper, depth - 1)
            for other, method in methods
            for one in other.inside(method, ast.Call)
        )
    other, function = found
    return any(_may_join(other, one, helper, depth - 1) for one in other.inside(function, ast.Call))


def _initializes_plain_base(script: Script, call: ast.Call) -> bool:
    """``super().__init__()`` in a class whose bases are modules and datasets of torch."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Call):
        return False
    if function.attr != "__init__" or last_name(function.value.func) != "super":
        return False
    owner = script.nearest(call, ast.ClassDef)
    bases = owner.bases if isinstance(owner, ast.ClassDef) else []
    return bool(bases) and all(_PLAIN_BASE.fullmatch(script.name(one)) for one in bases)


def _sets_mode_of_module(script: Script, call: ast.Call) -> bool:
    """``head.train()``, whose value is not used, of what the program also calls as ``head(features)``, which it does
    with modules and not with trainers."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr != "train" or call.args or call.keywords:
        return False
    if not isinstance(script.parent(call), ast.Expr):
        return False
    owner = ast.unparse(function.value)
    return any(ast.unparse(one.func) == owner for one in script.all(ast.Call) if one.args)


def _methods(script: Script, call: ast.Call) -> Iterator[tuple[Script, FunctionNode]]:
    """The methods of the project that a call on an object may be of: those of a name of several words
    (``tokenizer.setup_images()``), which no library has as well."""
    name, modules = last_name(call.func), script.modules
    if modules is None or not isinstance(call.func, ast.Attribute) or not _OF_SEVERAL_WORDS.fullmatch(name):
        return
    for shown, text in modules.mentioning(f"def {name}("):
        if not shown.endswith(".py"):
            continue
        try:
            other = module_of(modules, shown, text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for one in other.all(ast.FunctionDef):
            if one.name == name:
                yield other, one

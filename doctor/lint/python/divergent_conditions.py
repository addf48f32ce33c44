"""Recognizes conditions that may differ between ranks: values of their own data, clocks and signals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.collectives import METRIC, collectives_of
from doctor.lint.python.rank_branches import BLOCKS, statements_before
from doctor.lint.python.script import Script, last_name, per_script
from doctor.lint.python.value_flow import MOST_NODES, values_bound

_VALUES = frozenset(
    {"isnan", "isinf", "isfinite", "isneginf", "isposinf", "any", "all", "item", "sum", "nonzero", "count_nonzero"}
)
"""Functions and methods that read a value from a tensor."""
_OF_TENSORS = ("torch.", "numpy.", "math.")
_CLOCKS = frozenset(
    {"time.time", "time.monotonic", "time.perf_counter", "time.process_time", "datetime.datetime.now", "timeit."}
)
_AGREE = re.compile(r"reduce|gather|broadcast|sync|is_parallel|vote|consensus|agree|all_ranks|world|dist_")
"""Words in the names of functions that make ranks agree."""
_OWN = re.compile(r"loss|logit|pred|batch|target|label|mask|input|output|score|sample|image|token", re.IGNORECASE)
_COMPUTES = frozenset({"float", "int", "bool", "abs", "max", "min", "sum", "any", "all", "round", "isnan", "isfinite"})
_COUNTS = frozenset({"len", "numel"})
_GATHER = frozenset({"all_gather", "allgather", "all_reduce", "allreduce", "gather", "gather_for_metrics", "reduce"})
"""Collectives that return the same values of all ranks on each."""
_DATA = re.compile(r"loader|batch|^(?:x|y|inputs?|images?)$|(?:^|_)dl$", re.IGNORECASE)
"""Names of what one rank reads."""
_SELECTS = frozenset({"nonzero", "masked_select", "argwhere", "unique"})
_ADDS = frozenset({"append", "extend", "add"})
_PARTS_OF_MODELS = re.compile(r"^(?:named_)?(?:layers|modules|children|parameters|blocks|gates|experts|buffers|heads)$")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OPTIONS = frozenset({"args", "cfg", "config", "conf", "opt", "opts", "options", "hparams", "flags"})
"""Names of objects whose attributes are the settings of a run."""
_STEPS = 4


def disagreement(script: Script, test: ast.expr) -> str:
    """``data``, ``time`` or ``signal`` if ranks may evaluate a test differently; empty if they agree as far as the file
    shows: they reduced the value before, or nothing makes it rank-specific.

    ``signal`` is a race rather than a certain disagreement: torchrun, srun and scancel signal all ranks, which diverge
    if one evaluates the test before its signal is delivered and another one after that."""
    seen = tuple(_behind(script, test))
    before = test.lineno if isinstance(script.parent(test), ast.If) else None
    if any(_is_shared(script, one, before) for one in seen):
        return ""
    if any(isinstance(one, ast.Call) and script.name(one.func) in _CLOCKS for one in seen):
        return "time"
    if any(_is_set_by_signal(script, one) for one in seen):
        return "signal"
    asked = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    is_own = any(
        (_is_read(script, one) or _is_counted(script, one)) and not _is_of_all(script, one, before) for one in seen
    )
    return "data" if is_own or _is_selected(script, asked) else ""


def _behind(script: Script, test: ast.expr) -> Iterator[ast.AST]:
    """The nodes of an expression and of the values of its local variables, as far as they compute with numbers and
    tensors; contents of dictionaries and results of unknown functions are not followed."""
    function = script.function_of(test) or script.tree
    waiting: list[tuple[ast.AST, int]] = [(test, _STEPS)]
    names: set[str] = set()
    while waiting:
        node, steps = waiting.pop()
        yield node
        waiting.extend((one, steps) for one in _parts(script, node))
        if not isinstance(node, ast.Name) or node.id in names or steps == 0:
            continue
        names.add(node.id)
        scope = script.scope_of(node, node.id)
        if scope is not None and scope.node is function:
            waiting.extend((value, steps - 1) for value in scope.names[node.id] if isinstance(value, ast.expr))


def _parts(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        bare = last_name(node.func)
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
        if bare in _COMPUTES | _COUNTS or script.name(node.func).startswith(_OF_TENSORS):
            yield from node.args
    elif isinstance(node, ast.Subscript) and not isinstance(script.value(node.slice), str):
        yield node.value
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
        value = node.comparators[0].value if isinstance(node.comparators[0], ast.Constant) else None
        yield from (node.left,) if isinstance(value, bool) else ()
    elif isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
        yield from (node.generators[0].iter,) if isinstance(node.generators[0].iter, ast.Name) else ()
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.NamedExpr, ast.Attribute)):
        yield from ast.iter_child_nodes(node)


def _is_shared(script: Script, node: ast.AST, before: int | None) -> bool:
    """A value that a collective returned or changed before that line, or a function with a name that says so."""
    if isinstance(node, ast.Call):
        return bool(_AGREE.search(last_name(node.func)))
    if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
        return False
    line = _exchanged(script, script.function_of(node)).get(ast.unparse(node))
    return bool(_AGREE.search(last_name(node))) or (line is not None and (before is None or line < before))


def _exchanged(script: Script, function: ast.AST | None) -> dict[str, int]:
    """The arguments of collectives, and of functions named like one, in a function, with their first lines."""
    kept: dict[ast.AST | None, dict[str, int]] = script.__dict__.setdefault("_exchanged", {})
    if function not in kept:
        kept[function] = {}
        direct = {one.call for one in collectives_of(script).all()}
        for call in script.inside(function or script.tree, ast.Call):
            if call in direct or _AGREE.search(last_name(call.func)):
                for part in (part for argument in call.args for part in ast.walk(argument)):
                    if isinstance(part, (ast.Name, ast.Attribute)):
                        kept[function].setdefault(ast.unparse(part), call.lineno)
    return kept[function]


def _is_of_all(script: Script, value: ast.AST, before: int | None) -> bool:
    """Whether a value is computed from what all ranks have gathered above a line, and from no data of its own: also
    through lists and functions, which return the same on all ranks then, and from tensors that a line above it has
    reduced in place."""
    function = script.function_of(value) or script.tree
    reduced = _reduced_in_place(script, script.function_of(value))
    gathering = {one.call for one in collectives_of(script).all() if one.word in _GATHER}
    waiting: list[ast.AST] = [value]
    seen: set[str] = set()
    found = False
    for _ in range(MOST_NODES):
        if not waiting:
            return found
        node = waiting.pop()
        if node in gathering and (before is None or getattr(node, "lineno", 0) < before):
            found = True
            continue
        if _is_setting(node):
            continue
        if isinstance(node, ast.Name) and reduced.get(node.id, node.lineno) < node.lineno:
            found = True
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if not isinstance(node, ast.Name) or node.id in seen:
            continue
        seen.add(node.id)
        scope = script.scope_of(value, node.id)
        bound = scope.names[node.id] if scope is not None and scope.node is function else []
        if _DATA.search(node.id) or any(isinstance(one, ast.arg) for one in bound):
            return False
        waiting.extend(values_bound(_last_bound(script, node, bound)))
        waiting.extend(part for call in _added_to(script, node) for part in call.args)
    return False


def _reduced_in_place(script: Script, function: ast.AST | None) -> dict[str, int]:
    """The names of the tensors that a function reduces or broadcasts in place, with their first lines."""
    calls = [one.call for one in collectives_of(script).all() if one.word in ("all_reduce", "broadcast")]
    alone = [one for one in calls if isinstance(script.parent(one), ast.Expr) and script.function_of(one) is function]
    first: dict[str, int] = {}
    for call in sorted(alone, key=lambda one: one.lineno):
        if call.args and isinstance(call.args[0], ast.Name):
            first.setdefault(call.args[0].id, call.lineno)
    return first


def _last_bound(script: Script, name: ast.Name, bound: list[ast.AST | str]) -> list[ast.AST | str]:
    """What a name was given last in its block or one around it, above a place: no other value gets there. All that it
    is given, if there is none such."""
    inner: ast.AST = name
    for outer in script.around(name):
        above = set(statements_before(outer, inner, BLOCKS))
        given = [one for one in bound if isinstance(one, ast.expr) and _statement_of(script, one) in above]
        if given:
            return [max(given, key=lambda one: _statement_of(script, one).lineno)]
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            break
        inner = outer
    return bound


def _statement_of(script: Script, value: ast.expr) -> ast.stmt:
    return script.statement_of(value.value if isinstance(value, ast.Starred) else value)  # a part of what it unpacks


def _added_to(script: Script, name: ast.Name) -> Iterator[ast.Call]:
    """The calls that add something to a list of this name, in its function: ``found.append(x)``."""
    for call in script.method_calls(*_ADDS):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id == name.id:
            if script.function_of(call) is script.function_of(name):
                yield call


def _is_counted(script: Script, node: ast.AST) -> bool:
    """``len(hard)``: the size of what its own data selected. Other sizes are the same on all ranks."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in _COUNTS:
        return False
    counted = node.func.value if isinstance(node.func, ast.Attribute) else next(iter(node.args), None)
    return counted is not None and (_is_selected(script, counted) or _is_state_of_metric(script, counted))


def _is_state_of_metric(script: Script, node: ast.expr) -> bool:
    """``self.precision.detection_scores``: a metric of torchmetrics keeps what its own rank saw until ``compute``."""
    return isinstance(node, ast.Attribute) and bool(METRIC.match(script.name(node.value)))


def _is_set_by_signal(script: Script, node: ast.AST) -> bool:
    """A flag that a handler given to ``signal.signal`` sets: signals reach each process at a time of its own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id in _flags_of_signals(script)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in _flags_of_signals(script)


@per_script
def _flags_of_signals(script: Script) -> frozenset[str]:
    """The globals and attributes of ``self`` that handlers of signals assign."""
    found = set()
    for call in script.calls("signal.signal"):
        given = script.argument(call, "handler", 1)
        handler = script.definition(given) if given is not None else None
        shared = {name for one in script.inside(handler, ast.Global) for name in one.names} if handler else set()
        targets = [one for made in script.inside(handler, ast.Assign) for one in made.targets] if handler else []
        found |= {ast.unparse(one) for one in targets if isinstance(one, ast.Attribute)}
        found |= {one.id for one in targets if isinstance(one, ast.Name) and one.id in shared}
    return frozenset(found)


def _is_read(script: Script, node: ast.AST) -> bool:
    """A value read from a tensor of step data: ``loss.item()``, ``torch.isnan(loss)``, ``mask.any()``. Norms of
    gradients are equal on all ranks once gradients are reduced."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in _VALUES:
        return False
    if node.args and isinstance(node.args[0], _COMPREHENSIONS) and _asks_for_members(node.args[0]):
        return False  # what is in a collection is seldom of the step
    name = script.name(node.func)
    is_function = name.startswith(_OF_TENSORS) and "()" not in name  # else a method of what torch returned
    if isinstance(node.func, ast.Attribute) and not is_function:
        read: ast.expr | None = node.func.value
    else:
        read = node.args[0] if node.args else None
    return read is not None and any(_OWN.search(word) and "grad" not in word for word in _words_of(script, read))


def _asks_for_members(node: ast.expr) -> bool:
    """``one.label in done for one in tasks``: a test of names, not of tensors."""
    element = getattr(node, "elt", None)
    return isinstance(element, ast.Compare) and isinstance(element.ops[0], (ast.In, ast.NotIn))


def _words_of(script: Script, read: ast.expr) -> Iterator[str]:
    """The names in an expression, and in the comparison that a local name of it holds: ``valid = labels >= 0``. The
    name of an entry says what it is, not that of its dictionary: ``batch["step"]`` may be equal on all ranks."""
    for node in _named_parts(script, read):
        yield node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else last_name(node)
        scope = script.scope_of(node, node.id) if isinstance(node, ast.Name) else None
        if scope is not None and isinstance(node, ast.Name) and scope.node is script.function_of(read):
            compared = (one for one in scope.names[node.id] if isinstance(one, ast.Compare))
            yield from (last_name(part) for one in compared for part in ast.walk(one))


def _is_setting(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and last_name(node.value).lower() in _OPTIONS


def _named_parts(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression without dictionaries of which one entry is read, and without settings, which are the
    same on all ranks: ``args.target_accuracy``."""
    if _is_setting(node):
        return
    yield node
    key = script.value(node.slice) if isinstance(node, ast.Subscript) else None
    inner = (node.slice,) if isinstance(node, ast.Subscript) and isinstance(key, str) else ast.iter_child_nodes(node)
    for one in inner:
        yield from _named_parts(script, one)


def _is_selected(script: Script, node: ast.expr) -> bool:
    """Whether a name of this function holds what its own data selected: ``[x for x in losses if x > 4]``, ``x[mask]``,
    or items that were appended under a test of the data."""
    if not isinstance(node, ast.Name):
        return _selects(node)
    scope = script.scope_of(node, node.id)
    function = script.function_of(node) or script.tree
    if scope is None or scope.node is not function:
        return False
    values = [one.value if isinstance(one, ast.AugAssign) else one for one in scope.names[node.id]]
    return any(map(_selects, values)) or any(
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == node.id
        and _is_added_by_data(script, call)
        for call in script.method_calls(*_ADDS)
        if script.function_of(call) is script.function_of(node)
    )


def _selects(value: ast.AST | str) -> bool:
    if isinstance(value, _COMPREHENSIONS):
        if all(_asks_the_model(part) for part in value.generators):
            return False
        tests = [test for part in value.generators for test in part.ifs]
        return bool(tests) and any(_OWN.search(word) for part in value.generators for word in _words(part))
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Compare) or "mask" in last_name(value.slice)
    return isinstance(value, ast.Call) and last_name(value.func) in _SELECTS


def _asks_the_model(part: ast.comprehension) -> bool:
    """Whether it runs over the parts of a model and asks for what they are: ``[one.loss for one in net.layers if
    one.has_loss]``. Ranks have the same model, so that these lists are equally long."""
    source = part.iter.func if isinstance(part.iter, ast.Call) else part.iter
    return bool(_PARTS_OF_MODELS.search(last_name(source))) and all(map(_asks_for_kind, part.ifs))


def _asks_for_kind(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks_for_kind(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(map(_asks_for_kind, test.values))
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], (ast.Is, ast.IsNot))
    if isinstance(test, ast.Call):
        return last_name(test.func) in ("isinstance", "hasattr", "getattr")
    return isinstance(test, (ast.Name, ast.Attribute))


def _is_added_by_data(script: Script, call: ast.Call) -> bool:
    branch = script.nearest(call, ast.If)
    inside = branch is not None and script.function_of(branch) is script.function_of(call)
    return inside and branch is not None and any(_is_read(script, one) for one in _behind(script, branch.test))


def _words(node: ast.AST) -> list[str]:
    """Names and attributes that are read below a node."""
    return [last_name(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))]

"""Recognizes places that only an abnormal value leads to: a loss that is not finite, an empty batch, an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.lint.python.project.imported_functions import may_be_imported
from doctor.lint.python.project.left_defaults import OPERATORS
from doctor.lint.python.rank_branches import BLOCKS, block_of, statements_before
from doctor.lint.python.script import FunctionNode, Script, last_name

_DEPTH = 3
_ASKS_FOR_BAD = re.compile(
    r"^_?(?:is_?|has_?|any_?|contains_?|check_?)*(?:nan|inf|pos_?inf|neg_?inf)s?(?:_or_(?:nan|inf))?$"
)
_ASKS_FOR_GOOD = re.compile(r"^_?(?:is_?|all_?)*finite$")
_KEEPS = frozenset({"any", "all", "item", "bool", "float", "int", "cpu", "detach", "tolist", "max", "min", "to"})
"""Functions and methods that give a flag back: ``torch.isnan(x).any().item()``."""
_SUMS = frozenset({"sum", "count_nonzero", "mean"})
"""Those that give 0 for flags that are all false."""
_OF_NUMBERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ORDINARY_ERRORS = frozenset(
    {"ImportError", "ModuleNotFoundError", "AttributeError", "KeyError", "NameError", "TypeError", "StopIteration"}
    | {"StopAsyncIteration", "Empty", "Full", "KeyboardInterrupt", "SystemExit", "GeneratorExit"}
)
"""Errors by which programs ask what there is, end a loop, or are stopped."""
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def ordinary_outcome(script: Script, test: ast.expr, depth: int = _DEPTH) -> bool | None:
    """What a test gives for ordinary values, which are finite numbers and batches with samples; ``None`` if these may
    give either."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, (ast.Not, ast.Invert)):
        inner = ordinary_outcome(script, test.operand, depth)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        found = [ordinary_outcome(script, one, depth) for one in test.values]
        return _joined(found, is_and=isinstance(test.op, ast.And))
    if isinstance(test, ast.BinOp) and isinstance(test.op, (ast.BitOr, ast.BitAnd)):
        found = [ordinary_outcome(script, one, depth) for one in (test.left, test.right)]
        return _joined(found, is_and=isinstance(test.op, ast.BitAnd))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _of_comparison(script, test, depth)
    if isinstance(test, ast.Call):
        return _of_call(script, test, depth)
    if isinstance(test, (ast.GeneratorExp, ast.ListComp)):
        return ordinary_outcome(script, test.elt, depth)
    return _of_name(script, test, depth) if isinstance(test, ast.Name) and depth else None


def _of_name(script: Script, name: ast.Name, depth: int) -> bool | None:
    """What a flag is: ``bad = torch.isnan(loss)``, or ``bad = False`` that only a branch of such a test changes."""
    scope = script.scope_of(name, name.id)
    bound = scope.names[name.id] if scope is not None else []
    values = [one for one in bound if isinstance(one, ast.expr)]
    if not values or len(values) != len(bound):
        return None
    if len(values) == 1:
        return ordinary_outcome(script, values[0], depth - 1)
    if not all(isinstance(one, ast.Constant) and isinstance(one.value, bool) for one in values):
        return None
    ordinary = [one for one in values if not is_led_to_by_accident(script, one, depth - 1)]
    kept = {one.value for one in ordinary if isinstance(one, ast.Constant)}
    return bool(kept.pop()) if len(kept) == 1 else None


def _joined(found: list[bool | None], *, is_and: bool) -> bool | None:
    """``and``: false if one part is; true if all are. ``or``: the opposite."""
    if any(one is not None and one is not is_and for one in found):
        return not is_and
    return is_and if all(one is is_and for one in found) else None


def _of_comparison(script: Script, test: ast.Compare, depth: int) -> bool | None:
    left, compare, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(compare, (ast.Eq, ast.NotEq)) and ast.unparse(left) == ast.unparse(right):
        return isinstance(compare, ast.Eq)  # only NaN differs from itself
    if not isinstance(right, ast.Constant):
        return None
    if right.value is None and _is_drawn(script, left):
        return None if not isinstance(compare, (ast.Is, ast.IsNot)) else isinstance(compare, ast.IsNot)
    if isinstance(right.value, bool) and isinstance(compare, (ast.Is, ast.IsNot)):
        flag = ordinary_outcome(script, left, depth)
        return None if flag is None else (flag is right.value) is isinstance(compare, ast.Is)
    if not isinstance(compare, _OF_NUMBERS) or not isinstance(right.value, (int, float)):
        return None
    compared = OPERATORS[type(compare)]
    if _is_size_of_batch(script, left):
        # A size is a positive number: comparisons that 1 and any larger one answer in the same way
        answers = {compared(size, right.value) for size in (1, 2, 1 << 30)}
        return answers.pop() if len(answers) == 1 else None
    flag = ordinary_outcome(script, left, depth)
    return None if flag is None else compared(int(flag), right.value)


def _of_call(script: Script, call: ast.Call, depth: int) -> bool | None:
    bare = last_name(call.func)
    if _ASKS_FOR_BAD.match(bare):
        return False
    if _ASKS_FOR_GOOD.match(bare):
        return True
    if bare in _KEEPS | _SUMS:
        asked = next(iter(call.args), None)
        if isinstance(call.func, ast.Attribute):
            is_function = script.name(call.func).startswith(("torch.", "numpy."))
            asked = asked if is_function and asked is not None else call.func.value
        flag = ordinary_outcome(script, asked, depth) if asked is not None else None
        return flag if bare in _KEEPS or flag is False else None
    function = script.definition(call.func) if depth else None
    returned = list(script.inside(function, ast.Return)) if function is not None else []
    value = returned[0].value if len(returned) == 1 else None
    return ordinary_outcome(script, value, depth - 1) if value is not None else None


def _is_drawn(script: Script, node: ast.expr) -> bool:
    """Whether a value is what a loop around it, or ``next``, has drawn: the batch."""
    if not isinstance(node, ast.Name):
        return False
    loops = (one for one in script.around(node) if isinstance(one, (ast.For, ast.AsyncFor)))
    return any(isinstance(part, ast.Name) and part.id == node.id for one in loops for part in ast.walk(one.target))


def _is_size_of_batch(script: Script, node: ast.expr) -> bool:
    """``len(batch)``, ``len(batch["input_ids"])``."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "len" or len(node.args) != 1:
        return False
    counted = node.args[0].value if isinstance(node.args[0], ast.Subscript) else node.args[0]
    return _is_drawn(script, counted)


def is_led_to_by_accident(script: Script, node: ast.AST, depth: int = _DEPTH) -> bool:
    """Whether a run gets to a place only with an abnormal value: in a branch for it, in a handler of errors, or in a
    function of the module that is called at such places alone."""
    inner = node
    if isinstance(node, ast.ExceptHandler) and _is_of_failures(node):
        return True
    for outer in script.around(node):
        if isinstance(outer, ast.ExceptHandler) and _is_of_failures(outer):
            return True
        if isinstance(outer, (ast.If, ast.IfExp, ast.While)) and inner is not outer.test:
            is_in_body = inner is outer.body or inner in block_of(outer, inner, ("body",))
            if ordinary_outcome(script, outer.test, depth) is (not is_in_body):
                return True
        if any(_leaves_ordinarily(script, one, depth) for one in statements_before(outer, inner, BLOCKS)):
            return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return depth > 0 and _is_called_by_accident(script, outer, depth)
        if isinstance(outer, ast.Lambda):
            return False
        inner = outer
    return False


def _is_of_failures(handler: ast.ExceptHandler) -> bool:
    return not any(last_name(one) in _ORDINARY_ERRORS for one in _caught(handler))


def _caught(handler: ast.ExceptHandler) -> Iterator[ast.expr]:
    if isinstance(handler.type, ast.Tuple):
        yield from handler.type.elts
    elif handler.type is not None:
        yield handler.type


def _leaves_ordinarily(script: Script, statement: ast.stmt, depth: int) -> bool:
    """``if torch.isfinite(loss): return loss``."""
    if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.body[-1], _LEAVING):
        return False
    return ordinary_outcome(script, statement.test, depth) is True


def _is_called_by_accident(script: Script, function: FunctionNode, depth: int) -> bool:
    if not isinstance(script.parent(function), ast.Module) or function.decorator_list:
        return False
    uses = script.uses_of(function)
    is_led_to = all(is_led_to_by_accident(script, one, depth - 1) for one in uses)
    return bool(uses) and is_led_to and not may_be_imported(script, function.name)

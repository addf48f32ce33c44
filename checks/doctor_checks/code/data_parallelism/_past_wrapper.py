"""Forward passes of training that bypass the wrapper which reduces gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.lint.python.loader_calls import is_for_evaluation
from doctor.lint.python.project.wrapped_model import trains_in_method, uses_no_parameters
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.script import Script, last_name
from doctor.lint.python.training import ACCELERATOR, DDP, groups_have_one_rank, has_backward, is_test
from doctor.lint.python.value_flow import computed_from, origins

_WITHOUT = ("no_grad", "inference_mode")
METHODS = ("forward", "compute_loss", "loss", "get_loss", "training_step", "train_step", "forward_train", "calc_loss")


def calls_past_wrapper(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The forward passes of training that bypass a wrapper, which nothing else calls in the same step, and its text."""
    wraps = list(script.calls(DDP))
    accelerates = next(script.calls(ACCELERATOR), None) is not None
    if is_test(script) or (not wraps and not accelerates) or _averages_itself(script) or groups_have_one_rank(script):
        return
    renamed = [one for one in wraps if _is_renamed(script, one)]
    for call in script.all(ast.Call):
        if (wrapper := _trained_inside(script, call, wraps)) and rank_condition(script, call) is None:
            yield call, wrapper
            continue
        words = _past(script, call, bool(wraps), accelerates) or _unwrapped(script, call, renamed)
        words = words or (_past_by_part(script, call) if wraps else "")
        if not words or rank_condition(script, call) is not None or _computes_with_arguments(script, call):
            continue
        block = _training(script, call)
        if block is None or _is_prepared(script, block, words) or _is_of_engine(script, block, call, words):
            continue
        if not _is_fixed(script, call, words, wraps):
            yield call, words


def _trained_inside(script: Script, call: ast.Call, wraps: list[ast.Call]) -> str:
    """The wrapper of ``agent.module.train_model(batch)``, a method that has the whole step of training in it: its
    forward pass is that of the module inside."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if not isinstance(call.func, ast.Attribute) or not isinstance(owner, ast.Attribute) or owner.attr != "module":
        return ""
    wrapper = ast.unparse(owner.value)
    if not any(wrapper in _names_of(script, one) for one in wraps):
        return ""
    around = script.function_of(call) or script.tree
    if not trains_in_method(script, call.func.attr) or _is_prepared(script, around, wrapper):
        return ""
    return wrapper


def _is_of_engine(script: Script, block: ast.AST, call: ast.Call, wrapper: str) -> bool:
    """Whether the step in which a call runs also calls ``backward()`` of the wrapper, which DDP does not have: it is an
    engine there, which reduces in that call whatever the forward pass went through (deepspeed/runtime/engine.py)."""
    tests = _tests_around(script, block, call)
    return any(
        ast.unparse(one.func) == f"{wrapper}.backward" and _tests_around(script, block, one) <= tests
        for one in script.inside(block, ast.Call)
    )


def _tests_around(script: Script, block: ast.AST, node: ast.AST) -> set[tuple[str, bool]]:
    """The conditions of the branches between a node and the step around it, and whether they hold."""
    found, inner = set(), node
    for outer in script.around(node):
        if outer is block:
            break
        if isinstance(outer, ast.If) and inner is not outer.test:
            found.add((ast.unparse(outer.test), inner in outer.body))
        inner = outer
    return found


def _computes_with_arguments(script: Script, call: ast.Call) -> bool:
    """``model.module.loss_of(a, b)``, a method that uses no parameters: nothing in it waits for a reduction."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if not isinstance(call.func, ast.Attribute) or not isinstance(inner, ast.Attribute) or inner.attr != "module":
        return False
    return uses_no_parameters(script, inner.value, call.func.attr)


def _averages_itself(script: Script) -> bool:
    """Whether the file reduces gradients itself: ``dist.all_reduce(p.grad)``."""
    calls = script.calls("torch.distributed.all_reduce", "torch.distributed.reduce_scatter_tensor")
    return any(isinstance(part, ast.Attribute) and part.attr == "grad" for call in calls for part in ast.walk(call))


def _training(script: Script, call: ast.Call) -> ast.AST | None:
    for outer in script.around(call):
        if isinstance(outer, ast.With):
            if any(word in script.text_of(item.context_expr) for item in outer.items for word in _WITHOUT):
                return None
        elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            silent = any(word in script.text_of(one) for one in outer.decorator_list for word in _WITHOUT)
            if silent or is_for_evaluation(outer.name):
                return None
            return outer if has_backward(script, outer, 0) else None
        elif isinstance(outer, (ast.For, ast.While)) and has_backward(script, outer, 0):
            return outer
        elif isinstance(outer, ast.Lambda):
            return None
    return None


def _past(script: Script, call: ast.Call, wraps: bool, accelerates: bool) -> str:
    target = call.func
    if isinstance(target, ast.Attribute) and target.attr in METHODS:
        target = target.value
    if isinstance(target, ast.Name):
        values = script.values_of(target)
        target = values[0] if len(values) == 1 else target
    if wraps and isinstance(target, ast.Attribute) and target.attr == "module":
        inner = target.value
        return "" if isinstance(inner, ast.Name) and inner.id == "self" else ast.unparse(inner)
    if accelerates and isinstance(target, ast.Call) and script.name(target.func) == f"{ACCELERATOR}().unwrap_model":
        return ast.unparse(target.args[0]) if target.args else ""
    return ""


def _past_by_part(script: Script, call: ast.Call) -> str:
    """The wrapper of ``model.module.head(features)``, where the result becomes a part of the loss."""
    target = call.func
    while isinstance(target, ast.Attribute) and target.attr != "module":
        target = target.value
    if not isinstance(target, ast.Attribute) or target is call.func or not (call.args or call.keywords):
        return ""
    inner = target.value
    block = _training(script, call)
    if block is None or (isinstance(inner, ast.Name) and inner.id == "self"):
        return ""
    return ast.unparse(inner) if any(_feeds(script, call, loss) for loss in _losses(script, block)) else ""


def _losses(script: Script, block: ast.AST) -> Iterator[ast.expr]:
    for one in script.inside(block, ast.Call):
        if isinstance(one.func, ast.Attribute) and one.func.attr == "backward":
            yield from (one.func.value, *one.args)


def _feeds(script: Script, call: ast.Call, loss: ast.expr) -> bool:
    return any(one is call for one in computed_from(script, loss))


def _is_renamed(script: Script, wrap: ast.Call) -> bool:
    statement = script.parent(wrap)
    if not wrap.args or not isinstance(statement, ast.Assign):
        return False
    return ast.unparse(statement.targets[0]) != ast.unparse(wrap.args[0])


def _unwrapped(script: Script, call: ast.Call, wraps: list[ast.Call]) -> str:
    """The wrapper of a model that is called by its former name."""
    if not isinstance(call.func, (ast.Name, ast.Attribute)):
        return ""
    for wrap in wraps:
        statement = script.parent(wrap)
        if (
            isinstance(statement, ast.Assign)
            and wrap.lineno < call.lineno
            and script.function_of(wrap) is script.function_of(call)
            and ast.unparse(wrap.args[0]) == ast.unparse(call.func)
            and not _is_given_again(script, call.func, wrap)
            and not _is_entry_of_wrappers(script, call, statement)
        ):
            return ast.unparse(statement.targets[0])
    return ""


def _is_given_again(script: Script, name: ast.expr, wrap: ast.Call) -> bool:
    scope = script.function_of(wrap) or script.tree
    own = ast.unparse(name)
    return any(
        one.lineno > wrap.lineno and any(ast.unparse(target) == own for target in one.targets)
        for one in script.inside(scope, ast.Assign)
    )


def _is_entry_of_wrappers(script: Script, call: ast.Call, wrap: ast.Assign) -> bool:
    """Whether a loop gives a name to the entries of a container, which an earlier loop has replaced by their wrappers:
    ``for key, net in nets.items(): nets[key] = DDP(net)``."""
    target, name = wrap.targets[0], ast.unparse(call.func)
    if not isinstance(target, ast.Subscript):
        return False
    container = ast.unparse(target.value)
    for loop in script.around(call):
        if isinstance(loop, ast.For) and any(ast.unparse(one) == name for one in ast.walk(loop.target)):
            read = {ast.unparse(one) for one in ast.walk(loop.iter)}
            return container in read and loop not in script.around(wrap)
    return False


def _is_prepared(script: Script, block: ast.AST, wrapper: str) -> bool:
    """Whether the wrapper itself is called in the same step, which prepares the reduction, or passed to something that
    may."""
    for one in script.inside(block, ast.Call):
        if ast.unparse(one.func) in (wrapper, f"{wrapper}.forward"):
            return True
        handed = (*one.args, *(keyword.value for keyword in one.keywords))
        if any(
            ast.unparse(argument) == wrapper for argument in handed if isinstance(argument, (ast.Name, ast.Attribute))
        ):
            bare = one.func.attr if isinstance(one.func, ast.Attribute) else ""
            if bare not in ("unwrap_model", "clip_grad_norm_", "save", "update", "accumulate", "clip_grad_value_"):
                return True
    return False


def _is_fixed(script: Script, call: ast.Call, wrapper: str, wraps: list[ast.Call]) -> bool:
    """Whether no optimizer of the file has the parameters of the wrapped model, and one has those of another wrapped
    one, or all say whose parameters they have: the model is a part of the loss, such as a target that another network
    is trained against."""
    optimizers = [one for one in script.all(ast.Call) if _is_optimizer(script, one)]
    trained = {name for one in optimizers for name in _optimized(script, one)}
    others = {name for one in wraps for name in _names_of(script, one)}
    own = {wrapper, *(ast.unparse(one) for node in _roots(call) for one in origins(script, node))}
    own |= {name for one in wraps for name in _names_of(script, one) if not own.isdisjoint(_names_of(script, one))}
    is_told = bool(optimizers) and all(_names_parameters(script, one) for one in optimizers)
    return own.isdisjoint(trained) and (is_told or not (others - own).isdisjoint(trained))


def _is_optimizer(script: Script, call: ast.Call) -> bool:
    name = script.name(call.func)
    return name.startswith("torch.optim.") and "lr_scheduler" not in name and bool(call.args)


def _names_parameters(script: Script, optimizer: ast.Call) -> bool:
    """``SGD(net.parameters())``"""
    made = (one for one in computed_from(script, optimizer.args[0]) if isinstance(one, ast.Call))
    return any(last_name(one.func) in ("parameters", "named_parameters") for one in made)


def _optimized(script: Script, call: ast.Call) -> Iterator[str]:
    """The names of all that the parameters of an optimizer are computed from."""
    for node in computed_from(script, call.args[0]):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield ast.unparse(node)


def _names_of(script: Script, wrap: ast.Call) -> set[str]:
    """The names of a model before and after it is wrapped."""
    statement = script.parent(wrap)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {ast.unparse(one) for one in (*targets, *wrap.args[:1])}


def _roots(call: ast.Call) -> Iterator[ast.Name]:
    """The names that a call goes through, and those that they are given."""
    yield from (one for one in ast.walk(call.func) if isinstance(one, ast.Name))

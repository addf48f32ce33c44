"""CODE036: an average of the weights is updated on one rank and used on all ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import is_for_evaluation
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.reachable_functions import run_by_all
from doctor.lint.python.script import last_name
from doctor.lint.python.single_rank import may_run_alone
from doctor.lint.python.training import RANK_WORDS, is_test, several_ranks
from doctor.testing.script_cases import fails, passes

_AVERAGES = re.compile(r"EMA|ExponentialMovingAverage|MovingAverage|AveragedModel")
_COPIES = frozenset({"copy.deepcopy", "copy.copy"})
_UPDATES = re.compile(r"update|ema|average|accumulate", re.IGNORECASE)
_SAMPLES = re.compile(r"(?:^|_)(?:sample|generate)s?(?:$|_)", re.IGNORECASE)
_METHODS = frozenset({"update", "update_parameters", "step", "apply_update", "update_ema"})


@rule(
    id="CODE036",
    severity=Severity.WARNING,
    reads=Script,
    mentions=RANK_WORDS,
    cases=lambda: (
        fails(
            "a function updates a copy, and all ranks evaluate it",
            _script(
                "if rank == 0:\n            update_ema(ema, model.module)  # !",
                "validate(ema, val_loader)",
                "copy.deepcopy(net)",
            ),
        ),
        fails(
            "AveragedModel of torch, called by all",
            _script(
                "if dist.get_rank() == 0:\n            ema.update_parameters(model)  # !",
                "loss = ema(next(iter(val_loader))).sum()",
                "torch.optim.swa_utils.AveragedModel(net)",
            ),
        ),
        fails(
            "a class of the project",
            _script(
                "if is_main_process():\n            ema.update(model.module)  # !",
                "evaluate(ema.module, val_loader)",
                "ModelEMA(net, decay=0.999)",
            ),
        ),
        fails(
            "all ranks sample with it",
            _script(
                "if rank == 0:\n            update_ema(ema, model.module)  # !",
                "images = sample_images(ema, rank)",
                "copy.deepcopy(net)",
            ),
        ),
        passes(
            "updated by all",
            _script("update_ema(ema, model.module)", "validate(ema, val_loader)", "copy.deepcopy(net)"),
        ),
        passes(
            "rank 0 evaluates it as well",
            _script(
                "if rank == 0:\n            update_ema(ema, model.module)",
                "if rank == 0:\n        validate(ema, val_loader)",
                "copy.deepcopy(net)",
            ),
        ),
        passes(
            "broadcast before it is used",
            _script(
                "if rank == 0:\n            update_ema(ema, model.module)",
                "for p in ema.parameters():\n        dist.broadcast(p, 0)\n    validate(ema, val_loader)",
                "copy.deepcopy(net)",
            ),
        ),
        passes(
            "saved by rank 0 alone",
            _script(
                "if rank == 0:\n            ema.update(model.module)",
                "state = ema.state_dict()\n    validate(model, val_loader)",
                "ModelEMA(net)",
            ),
        ),
        passes(
            "one rank has the average",
            _script(
                "if rank == 0:\n            ema.update(model.module)",
                "validate(ema, val_loader)",
                "ModelEMA(net) if rank == 0 else None",
            ),
        ),
    ),
)
def ema_updated_on_one_rank(script: Script) -> Iterator[Violation]:
    """Ask whether an average of the weights is updated on all ranks that use it.

    Why it hurts: the other ranks use their initial copy. A result over all ranks, such as a validation metric, then
    mixes the averaged model of one rank with the initial weights of the others.
    Fix: Update it on all ranks (the weights are the same after each step, so the averages stay the same), or evaluate
    it only on rank 0.
    """
    if several_ranks(script) is None or is_test(script):
        return
    for call in script.all(ast.Call):
        for average in _updated(script, call):
            condition = rank_condition(script, call)
            used = _used_by_all(script, average, call) if condition is not None else None
            if condition is not None and used is not None and not _is_sent(script, average):
                name = script.text_of(average)
                yield Violation(
                    call,
                    f"{name} is updated only if `{condition.test}`, but used on all ranks (line {used.lineno})",
                    fix=f"Update {name} on all ranks: move line {call.lineno} out of the branch at line "
                    f"{getattr(condition.where, 'lineno', call.lineno)}.",
                    evidence=(
                        ("condition", condition.test),
                        ("used", f"`{script.text_of(used, 80)}` (line {used.lineno})"),
                    ),
                )


def _updated(script: Script, call: ast.Call) -> Iterator[ast.expr]:
    """The averages of weights that a call updates."""
    bare = last_name(call.func)
    if isinstance(call.func, ast.Attribute) and bare in _METHODS and _is_average(script, call.func.value):
        yield call.func.value
    elif _UPDATES.search(bare) and len(call.args) > 1 and not is_for_evaluation(bare):
        yield from (one for one in call.args if _is_average(script, one) or _is_copy(script, one))


def _is_average(script: Script, node: ast.expr) -> bool:
    made = [one for one in script.values_of(node) if isinstance(one, ast.Call)]
    return len(made) == len(script.values_of(node)) == 1 and bool(_AVERAGES.search(last_name(made[0].func)))


def _is_copy(script: Script, node: ast.expr) -> bool:
    """``copy.deepcopy(model).eval()``: a copy on every rank."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    values = script.values_of(node)
    parts = [part for one in values for part in ast.walk(one) if isinstance(part, ast.Call)]
    conditional = any(isinstance(one, ast.IfExp) for one in values)
    return not conditional and any(script.name(one.func) in _COPIES for one in parts)


def _used_by_all(script: Script, average: ast.expr, update: ast.Call) -> ast.Call | None:
    """A forward pass or an evaluation of the average that every rank runs, in the function of the update."""
    name = ast.unparse(average)
    function = script.function_of(update)
    for call in script.inside(function or script.tree, ast.Call):
        if script.function_of(call) is not function or call is update:
            continue
        is_called = _is_part(call.func, name, called=True)
        is_given = any(_is_part(one, name) for one in call.args) and _runs_model(script, call)
        alone = may_run_alone(script, call) or script.function_of(call) not in run_by_all(script)
        if (is_called or is_given) and not alone:
            return call
    return None


def _is_part(node: ast.expr, name: str, *, called: bool = False) -> bool:
    """``ema``, ``ema.module``, ``ema.ema``; called, no method such as ``ema.state_dict``."""
    text = ast.unparse(node)
    return (
        text == name
        or text in (f"{name}.module", f"{name}.ema", f"{name}.model", f"{name}.ema_model")
        or (called and text == f"{name}.forward")
    )


def _runs_model(script: Script, call: ast.Call, depth: int = 2) -> bool:
    """Whether a call evaluates or samples with its arguments, itself or in the function of the file that it calls."""
    if is_for_evaluation(last_name(call.func)) or _SAMPLES.search(last_name(call.func)):
        return True
    function = script.definition(call.func) if depth else None
    if function is None:
        return False
    parameters = {given.arg for given in function.args.args}
    for one in script.inside(function, ast.Call):
        if isinstance(one.func, ast.Name) and one.func.id in parameters:
            return True
        if any(isinstance(given, ast.Name) and given.id in parameters for given in one.args):
            if _runs_model(script, one, depth - 1):
                return True
    return False


def _is_sent(script: Script, average: ast.expr) -> bool:
    """Whether ranks exchange it, as far as a loop or an argument shows."""
    name = ast.unparse(average)
    sends = [one for one in script.all(ast.Call) if re.search("broadcast|sync|all_reduce", last_name(one.func))]
    if any(name in ast.unparse(one) for one in sends):
        return True
    return any(
        name in ast.unparse(loop.iter) for one in sends for loop in script.around(one) if isinstance(loop, ast.For)
    )


def _script(update: str, use: str, made: str) -> str:
    return f"""\
import copy
from project import ModelEMA, evaluate, is_main_process, load, update_ema, validate

dist.init_process_group("nccl")
rank = dist.get_rank()
net, optimizer, loader, val_loader = load()
ema = {made}
model = DDP(net, device_ids=[rank])
for epoch in range(10):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        {update}
    {use}
"""

"""CODE037: gradients are unscaled or clipped before they are averaged across ranks by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.script import FunctionNode, last_name
from doctor.lint.python.training import WRAPPERS
from doctor.testing.script_cases import fails, passes

_REDUCES = frozenset({"torch.distributed.all_reduce", "torch.distributed.all_reduce_coalesced"})
_NORMS = frozenset({"norm", "vector_norm", "get_total_norm", "item"})
_CLIPS = frozenset({"clip_grad_norm_", "clip_grad_value_"})


@rule(
    id="CODE037",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("all_reduce",),
    impacts={
        r"clip factors": "Each rank clips by the norm of its own gradients, so the average mixes different scales.",
    },
    cases=lambda: (
        fails("in a function", _script("scaler.unscale_(optimizer)  # !\n        average_gradients(model)")),
        fails(
            "in the loop itself",
            _script(
                "scaler.unscale_(optimizer)  # !\n        for p in model.parameters():\n"
                "            dist.all_reduce(p.grad)\n            p.grad /= dist.get_world_size()"
            ),
        ),
        fails(
            "clipped before",
            _script("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # !\n        average_gradients(model)"),
        ),
        passes("averaged first", _script("average_gradients(model)\n        scaler.unscale_(optimizer)")),
        passes("clipped behind", _script("average_gradients(model)\n        clip_grad_norm_(model.parameters(), 1.0)")),
        passes(
            "something else is reduced",
            _script("scaler.unscale_(optimizer)\n        dist.all_reduce(loss)"),
        ),
        passes(
            "the ranks agree about infinities",
            _script("scaler.unscale_(optimizer)\n        agree(scaler.found_inf)\n        average_gradients(model)"),
        ),
        passes("only the norms are summed", _NORM),
        passes("DDP has averaged them", "model = DDP(net)\n" + _script("scaler.unscale_(optimizer)")),
    ),
)
def unscaled_before_average(script: Script) -> Iterator[Violation]:
    """Ask whether gradients are averaged across ranks before they are unscaled or clipped.

    Why it hurts: averaging spreads Inf and NaN to all ranks, and ranks whose own gradients had none apply them.
    Fix: Average first, then call `scaler.unscale_(optimizer)`, then clip, then call `scaler.step(optimizer)`.
    """
    if "found_inf" in script.text or next(script.calls(*WRAPPERS), None) is not None:
        return
    loops: list[ast.For | ast.While] = [*script.all(ast.For), *script.all(ast.While)]
    for loop in loops:
        averages = _averages(script, loop)
        first = min(averages, key=lambda call: call.lineno, default=None)
        for call in script.inside(loop, ast.Call) if first is not None else ():
            word = last_name(call.func)
            if first is None or not isinstance(call.func, (ast.Attribute, ast.Name)) or call.lineno >= first.lineno:
                continue
            if _own_loop(script, call) is not loop or script.function_of(call) is not script.function_of(loop):
                continue
            if word == "unscale_":
                yield _hit(script, call, first, Severity.ERROR)
            elif word in _CLIPS:
                yield _hit(script, call, first, Severity.WARNING)


def _hit(script: Script, call: ast.Call, average: ast.Call, severity: Severity) -> Violation:
    effect = "ranks skip different steps" if severity is Severity.ERROR else "clip factors differ"
    return Violation(
        call,
        f"{script.text_of(call.func)} runs before gradients are averaged (line {average.lineno}): {effect}",
        severity=severity,
        fix=f"Move line {call.lineno} below line {average.lineno}.",
        evidence=(("averaged_at_line", average.lineno),),
    )


def _averages(script: Script, loop: ast.For | ast.While) -> list[ast.Call]:
    """Calls in a loop that reduce gradients, themselves or in a function of the file. The loop over parameters does not
    count as one."""
    found = []
    for call in script.inside(loop, ast.Call):
        inner = _own_loop(script, call)
        is_direct = _reduces_gradients(script, call)
        if is_direct and inner is not loop and inner is not None:
            inner = _own_loop(script, inner)
        function = script.definition(call.func)
        through = function is not None and _function_reduces(script, function)
        if inner is loop and (is_direct or through):
            found.append(call)
    return found


def _own_loop(script: Script, node: ast.AST) -> ast.For | ast.While | None:
    return next((one for one in script.around(node) if isinstance(one, (ast.For, ast.While))), None)


def _function_reduces(script: Script, function: FunctionNode) -> bool:
    return any(_reduces_gradients(script, one) for one in script.inside(function, ast.Call))


def _reduces_gradients(script: Script, call: ast.Call) -> bool:
    if script.name(call.func) not in _REDUCES or not call.args:
        return False
    values = (call.args[0], *script.values_of(call.args[0]))
    return any(_has_gradient(one) for one in values)


def _has_gradient(node: ast.AST) -> bool:
    """Whether a value holds a gradient, not only its norm, which ranks sum up before they clip."""
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        return True
    if isinstance(node, ast.Call) and last_name(node.func) in _NORMS:
        return False
    return any(map(_has_gradient, ast.iter_child_nodes(node)))


def _script(steps: str) -> str:
    return f"""\
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad.data)
        p.grad.data /= dist.get_world_size()

def train(model, loader, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        loss = model(x, y)
        scaler.scale(loss).backward()
        {steps}
        scaler.step(optimizer)
        scaler.update()
"""


_NORM = """\
for x, y in loader:
    scaler.scale(model(x, y)).backward()
    scaler.unscale_(optimizer)
    norm = torch.norm(torch.stack([p.grad.norm(2) for p in model.parameters()]))
    dist.all_reduce(norm)
    clip_grad_norm_(model.parameters(), norm)
    scaler.step(optimizer)
"""

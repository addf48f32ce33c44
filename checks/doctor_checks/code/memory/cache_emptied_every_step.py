"""CODE021: the CUDA allocator cache is emptied in every step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.script import last_name
from doctor.lint.python.training import CALLBACK, MODULE, calls_of, has_backward
from doctor.testing.script_cases import fails, passes

_STEPS = ("training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "optimizer_step")
_MAKES = re.compile(r"_?(?:make|build|create|init|new|set_?up)", re.IGNORECASE)
_RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_reserved")
_STEPS_OF_OTHERS = ("on_step_end", "on_step_begin", "on_substep_end")


@rule(
    id="CODE021",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("empty_cache",),
    foreshadows=("MEM006",),
    cases=lambda: (
        fails("at the end of each step", _EACH_STEP),
        fails("in a hook of each batch", _HOOK),
        fails("in the function that is one step", _FUNCTION),
        passes("once an epoch", _EACH_EPOCH),
        passes("now and then, and where memory ran out", _NOW_AND_THEN),
        passes("a loop that looks for a batch size", _OTHER_LOOP),
        passes("a loop of trials, each with its own optimizer", _TRIALS),
        passes("a loop of trials, each with an optimizer that a function makes", _MADE_TRIALS),
        fails(
            "an optimizer that is asked for", _MADE_TRIALS.replace("make_", "get_").replace("cache()", "cache()  # !")
        ),
        passes("a step whose memory is measured", _MEASURED),
        passes("another hook, a hook that returns in most steps, and a function that is run once", _OTHER_HOOK),
    ),
)
def cache_emptied_every_step(script: Script) -> Iterator[Violation]:
    """Ask whether the CUDA caching allocator keeps its memory between steps.

    Why it hurts: each call synchronizes with the GPU and returns cached blocks to the driver, from which the next step
    allocates them again: steps get slower, and PyTorch gains no memory.
    Fix: Remove the call, and set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` if memory is fragmented.
    """
    for call in script.calls("torch.cuda.empty_cache", "torch.accelerator.empty_cache"):
        where = _step_around(script, call)
        if where and not _measures_memory(script, call):
            yield Violation(call, f"{script.text_of(call)} runs in every step: {where}")


def _measures_memory(script: Script, call: ast.Call) -> bool:
    """Whether the program is there to measure memory: each step resets the peak, or a history is recorded."""
    if any(last_name(one.func) == "_record_memory_history" for one in script.all(ast.Call)):
        return True
    around = script.nearest(call, ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
    inside = script.inside(around, ast.Call) if around is not None else ()
    return any(last_name(one.func) in _RESETS for one in inside)


def _step_around(script: Script, call: ast.Call) -> str:
    """The step in which a call always runs; empty if it runs less often, or that is unknown."""
    inner: ast.AST = call
    for outer in script.around(call):
        if _is_conditional(script, outer, inner):
            return ""
        inner = outer
        if isinstance(outer, (ast.For, ast.While)):
            if not has_backward(script, outer) or not _steps(script, outer) or _makes_optimizer(script, outer):
                return ""
            nested = (one for kind in (ast.For, ast.While) for one in script.inside(outer, kind) if one is not outer)
            if any(has_backward(script, one) for one in nested):
                return ""
            return f"it is in the loop at line {outer.lineno}" if _has_own_backward(script, outer) else ""
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            owner = script.class_of(outer)
            if outer.name in _STEPS and script.derives(owner, MODULE, CALLBACK):
                return f"{outer.name} is called for each batch"
            if outer.name in _STEPS_OF_OTHERS and script.derives(owner, "transformers.TrainerCallback"):
                return f"{outer.name} is called for each batch"
            if not has_backward(script, outer) or not _steps(script, outer) or _loops_inside(script, outer):
                return ""
            looped = next((one for one in calls_of(script, outer) if script.nearest(one, ast.For, ast.While)), None)
            return f"{outer.name} is called in the loop at line {looped.lineno}" if looped is not None else ""
    return ""


def _makes_optimizer(script: Script, loop: ast.AST) -> bool:
    """Whether each pass begins another training, as in a search for the largest batch: it makes the optimizer that
    steps there, also by a function whose name says so: ``model, opt = make_model_opt()``."""
    calls = list(script.inside(loop, ast.Call))
    if any(script.name(call.func).startswith("torch.optim.") for call in calls):
        return True
    steps = (one.func for one in calls if last_name(one.func) == "step")
    stepping = {ast.unparse(one.value) for one in steps if isinstance(one, ast.Attribute)}
    made = [
        one
        for one in script.inside(loop, ast.Assign)
        if isinstance(one.value, ast.Call) and _MAKES.match(last_name(one.value.func))
    ]
    targets = {ast.unparse(part) for one in made for target in one.targets for part in ast.walk(target)}
    return bool(stepping) and stepping <= targets


def _is_conditional(script: Script, outer: ast.AST, inner: ast.AST) -> bool:
    """Whether ``outer`` is a branch, or an earlier statement of its block may leave: ``if step % 500: return``."""
    if isinstance(outer, (ast.If, ast.IfExp, ast.ExceptHandler, ast.Lambda, ast.BoolOp)):
        return True
    block = getattr(outer, "body", None)
    if not isinstance(block, list) or inner not in block:
        return False
    before = block[: block.index(inner)]
    return any(True for one in before for kind in (ast.Return, ast.Continue) for _ in script.inside(one, kind))


def _steps(script: Script, node: ast.AST) -> bool:
    """Whether an optimizer or an engine steps in it; loops that search for a batch size do not."""
    for call in script.inside(node, ast.Call):
        called = last_name(call.func)
        function = script.definition(call.func)
        if "step" in called or "scaler" in called or (function is not None and _has_step(script, function)):
            return True
    return False


def _has_step(script: Script, function: ast.AST) -> bool:
    called = (one.func for one in script.inside(function, ast.Call))
    return any(isinstance(one, ast.Attribute) and one.attr == "step" for one in called)


def _has_own_backward(script: Script, loop: ast.For | ast.While) -> bool:
    """Whether the loop is over steps, not over epochs with their steps in another function."""
    for call in script.inside(loop, ast.Call):
        bare = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if bare in ("backward", "manual_backward", "training_step"):
            return True
        function = script.definition(call.func)
        if function is not None and has_backward(script, function) and not _loops_inside(script, function):
            return True
    return False


def _loops_inside(script: Script, function: ast.AST) -> bool:
    return any(has_backward(script, one) for kind in (ast.For, ast.While) for one in script.inside(function, kind))


_EACH_STEP = """\
import gc

for epoch in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        gc.collect()
        torch.cuda.empty_cache()  # !
"""
_HOOK = """\
class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        torch.cuda.empty_cache()  # !
        return self.loss(batch)

class Tidy(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.empty_cache()  # !
"""
_FUNCTION = """\
from torch.cuda import empty_cache

def step(batch):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    empty_cache()  # !
    return loss.item()

while steps < limit:
    for batch in loader:
        step(batch)
"""
_MEASURED: str = _FUNCTION.replace("  # !", "").replace(
    "    loss.b", "    torch.cuda.reset_peak_memory_stats()\n    loss.b"
)
_EACH_EPOCH = """\
for epoch in range(10):
    for x, y in loader:
        criterion(model(x), y).backward()
    torch.cuda.empty_cache()
    validate(model)
"""
_NOW_AND_THEN = """\
for step, (x, y) in enumerate(loader):
    if step % 500 == 0:
        torch.cuda.empty_cache()
    try:
        criterion(model(x), y).backward()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        continue
"""
_TRIALS = """\
import torch

for size in (8, 16, 32):
    model = build().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(size, 3, 224, 224).cuda()).mean().backward()
    optimizer.step()
    del model, optimizer
    torch.cuda.empty_cache()
"""
_MADE_TRIALS = """\
for trial in range(10):
    model, opt = make_model_and_optimizer()
    loss = model(x).sum()
    loss.backward()
    opt.step()
    del model, opt, loss
    torch.cuda.empty_cache()
"""
_OTHER_LOOP = """\
size = 1
while True:
    try:
        model(torch.randn(size, 3, 224, 224).cuda()).sum().backward()
        model.zero_grad()
        torch.cuda.empty_cache()
    except RuntimeError:
        break
    size *= 2
"""
_OTHER_HOOK = """\
class Model(L.LightningModule):
    def on_train_epoch_end(self):
        torch.cuda.empty_cache()

class Samples(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % self.every != 0:
            return
        try:
            draw(pl_module)
        finally:
            torch.cuda.empty_cache()

def profile(batch):
    model(batch).loss.backward()
    torch.cuda.empty_cache()

profile(first)
"""

"""CODE038: a backward pass or an optimizer step bypasses the DeepSpeed engine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.project.settings.option_values import numbers_of
from doctor.lint.python.value_flow import computed_from, origins
from doctor.testing.script_cases import fails, passes

_MADE = "deepspeed.initialize"
_SUPPORTED = (0, 18, 3)
"""The first release of DeepSpeed whose hooks also prepare and finish ``loss.backward()``."""


@rule(
    id="CODE038",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("deepspeed",),
    impacts={
        r"which also counts micro": (
            "`engine.step()` counts micro-batches, clips and zeroes gradients and updates the learning rate. "
            "Without it, none of this happens, and the optimizer steps in each micro-batch."
        ),
    },
    cases=lambda: (
        fails("the loss goes backward itself", _script("loss.backward()  # !\n        engine.step()")),
        fails(
            "in a function that is given the engine",
            _script("train(engine, batch)")
            + "\ndef train(model, batch):\n    out = model(batch)\n    out.loss.backward()  # !\n    model.step()\n",
        ),
        fails(
            "the optimizer steps itself",
            _script("engine.backward(loss)\n        optimizer.step()  # !"),
        ),
        fails(
            "an old release",
            _script("(loss / 4).backward()  # !\n        engine.step()"),
            releases=(("deepspeed", "0.17.6"),),
        ),
        fails(
            "one micro-batch in a step",
            _script("engine.backward(loss)\n        optimizer.step()  # !")
            + '\nconfig = {"gradient_accumulation_steps": 1}\n',
        ),
        passes("a plain optimizer of the same name in another class", _TWO_TRAINERS),
        passes("by the engine", _script("engine.backward(loss)\n        engine.step()")),
        passes(
            "a release that supports it",
            _script("loss.backward()\n        engine.step()"),
            releases=(("deepspeed", "0.18.4"),),
        ),
        passes(
            "the loss of another model",
            _script("engine.backward(loss)\n        engine.step()\n        critic(batch).mean().backward()"),
        ),
        passes(
            "one of two branches",
            _script(
                "if args.deepspeed:\n            engine.backward(loss)\n            engine.step()\n"
                "        else:\n            loss.backward()\n            optimizer.step()"
            ),
        ),
        passes("a plain model of the same name without DeepSpeed", _WITHOUT),
        fails(
            "the engine where DeepSpeed is on",
            _WITHOUT.replace("self.model.backward(loss)", "loss.backward()  # !")
            .replace("        else:\n", "")
            .replace("            scale(loss).backward()\n", ""),
        ),
    ),
)
def backward_past_engine(script: Script) -> Iterator[Violation]:
    """Ask whether backward passes and optimizer steps go through the DeepSpeed engine.

    Why it hurts: `engine.backward` scales the loss, reduces gradients across ranks and counts micro-batches. Without
    it, releases before 0.18.3 train a separate model on each rank, or step with gradients that ZeRO has not collected.
    Fix: Call `engine.backward(loss)` instead of `loss.backward()`, and `engine.step()` instead of `optimizer.step()`
    and `optimizer.zero_grad()`.
    """
    makes = list(script.calls(_MADE))
    if not makes:
        return
    release = _release(script.releases.get("deepspeed"))
    is_known = release is not None and script.states_release_of("deepspeed")
    if release is None or release < _SUPPORTED:
        for call in script.method_calls("backward"):
            engine = _engine_behind(script, call)
            if engine and not _has_engine_beside(script, call, "backward") and not _is_without(script, call, engine):
                known = f"in deepspeed {script.releases.get('deepspeed')}" if release else "before release 0.18.3"
                yield Violation(
                    call,
                    f"{script.text_of(call.func)}() bypasses the DeepSpeed engine: no gradient reduction {known}",
                    severity=None if is_known else Severity.WARNING,
                    fix=_fix(script, call, engine),
                )
    for call in script.method_calls("step"):
        if _is_engines_optimizer(script, call, makes) and not _has_engine_beside(script, call, "step"):
            is_whole = _has_one_micro_batch(script)
            counts = "which also counts steps" if is_whole else "which also counts micro-batches"
            yield Violation(
                call,
                f"{script.text_of(call.func)}() bypasses engine.step(), {counts}",
                severity=Severity.INFO if is_whole else Severity.WARNING,
                effect=_OF_WHOLE_STEPS if is_whole else "",
                fix=_fix_of_step(script, call, makes),
            )


_MICRO_BATCHES = "gradient_accumulation_steps"
_OF_WHOLE_STEPS = (
    "With one micro-batch in a step, the optimizer steps as it should. The engine counts no steps: steps_per_print, "
    "global_steps in checkpoints and its own learning rate scheduler stay where they are."
)
"""``is_gradient_accumulation_boundary`` of deepspeed/runtime/engine.py asks for ``(micro_steps + 1) % steps == 0``, and
``step`` counts ``micro_steps``."""


def _has_one_micro_batch(script: Script) -> bool:
    """Whether each configuration in the file has one micro-batch in a step, or in the project if the file has none."""
    entries = [
        script.value(value)
        for made in script.all(ast.Dict)
        for key, value in zip(made.keys, made.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == _MICRO_BATCHES
    ]
    return (set(entries) if entries else numbers_of(script, _MICRO_BATCHES)) == {1}


def _fix(script: Script, call: ast.Call, engine: str) -> str:
    """The engine divides the loss by the number of micro-batches itself."""
    loss = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    whole = loss.left if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div) else loss
    return (
        f"Call `{engine}.backward({script.text_of(whole)})` instead of `{script.text_of(call.func)}()`, and "
        f"`{engine}.step()` instead of the optimizer's `step()` and `zero_grad()`."
    )


def _fix_of_step(script: Script, call: ast.Call, makes: list[ast.Call]) -> str:
    owner = script.text_of(call.func.value if isinstance(call.func, ast.Attribute) else call.func)
    engines = {_targets(script, made)[0] for made in makes if owner in _targets(script, made)}
    engine = engines.pop() if len(engines) == 1 else "engine"
    return f"Call `{engine}.step()` instead of `{owner}.step()` and `{owner}.zero_grad()`."


def _release(text: str | None) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return tuple(int(part or 0) for part in found.groups()) if found else None


def _engine_behind(script: Script, call: ast.Call) -> str:
    """The engine that computed the loss of ``loss.backward()``; empty for other calls. ``engine.backward(loss)`` has an
    argument."""
    if not isinstance(call.func, ast.Attribute) or call.args or is_engine(script, call.func.value):
        return ""
    behind = (one for one in computed_from(script, call.func.value) if isinstance(one, ast.Call))
    return next((script.text_of(one.func) for one in behind if is_engine(script, one.func)), "")


def is_engine(script: Script, node: ast.expr) -> bool:
    """Whether it is the first value that ``deepspeed.initialize`` returned, also as a parameter."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    return any(_is_first(script, name) for name in (node, *origins(script, node)))


def _is_first(script: Script, node: ast.AST) -> bool:
    """A name that is assigned only the first part of the call."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    values = [one for one in script.values_of(node) if not (isinstance(one, ast.Constant) and one.value is None)]
    if len(values) != 1 or not isinstance(values[0], ast.Starred):
        return False
    made = values[0].value
    return isinstance(made, ast.Call) and script.name(made.func) == _MADE and _place(script, made, node) == 0


def _place(script: Script, made: ast.Call, node: ast.expr) -> int | None:
    """The position of a name among the targets of the call."""
    parts, name = _targets(script, made), ast.unparse(node)
    return parts.index(name) if name in parts else None


def _targets(script: Script, made: ast.Call) -> list[str]:
    statement = script.parent(made)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return [ast.unparse(one) for one in target.elts] if isinstance(target, (ast.Tuple, ast.List)) else []


def _is_engines_optimizer(script: Script, call: ast.Call, makes: list[ast.Call]) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    values = list(script.values_of(owner)) if isinstance(owner, (ast.Name, ast.Attribute)) else []
    if len(values) != 1 or not isinstance(values[0], ast.Starred):
        return False  # in another class, the same name may be a plain optimizer
    return any(values[0].value is made and _place(script, made, owner) == 1 for made in makes)


def _has_engine_beside(script: Script, call: ast.Call, method: str) -> bool:
    """Whether the function also has the call through an engine, as in a script that can do without DeepSpeed."""
    function = script.function_of(call) or script.tree
    for one in script.inside(function, ast.Call):
        is_method = isinstance(one.func, ast.Attribute) and one.func.attr == method
        if is_method and isinstance(one.func, ast.Attribute) and is_engine(script, one.func.value):
            return method == "step" or _reads_alike(call, one)
    return False


def _is_without(script: Script, call: ast.Call, engine: str) -> bool:
    """Whether the opposite branch has ``model.backward(loss)``, which only an engine has: in the branch of the call,
    the name is that of a plain model."""
    for branch, is_in_body in script.branches(call):
        others = (one for part in (branch.orelse if is_in_body else branch.body) for one in ast.walk(part))
        if any(
            isinstance(one, ast.Call) and one.args and ast.unparse(one.func) == f"{engine}.backward" for one in others
        ):
            return True
    return False


def _reads_alike(past: ast.Call, through: ast.Call) -> bool:
    """Whether the engine gets the same loss elsewhere."""
    loss = past.func.value if isinstance(past.func, ast.Attribute) else past.func
    return bool(through.args) and ast.unparse(through.args[0]) == ast.unparse(loss)


_TWO_TRAINERS = """\
import deepspeed
import torch

class EngineTrainer:
    def __init__(self, args, model):
        self.engine, self.optimizer, _, _ = deepspeed.initialize(args=args, model=model)

class PlainTrainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())

    def step(self, batch):
        self.model(batch).mean().backward()
        self.optimizer.step()
"""
_WITHOUT = """\
import deepspeed

class Runner:
    def __init__(self, args, model):
        self.model = DDP(model)
        if args.deepspeed:
            model, _, _, _ = deepspeed.initialize(args=args, model=self.model)
            self.model = model

    def train(self, args, batch):
        loss = self.model(batch).mean()
        if args.deepspeed:
            self.model.backward(loss)
        else:
            scale(loss).backward()
"""


def _script(steps: str) -> str:
    return f"""\
import deepspeed

def main(args, model, data, critic):
    engine, optimizer, loader, _ = deepspeed.initialize(args=args, model=model, training_data=data)
    for batch in loader:
        loss = engine(batch).mean()
        {steps}
"""

"""CODE042: a training loop that never zeroes its gradients."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.project.starts.own_start import is_measured, times_steps
from doctor.lint.python.script import last_name
from doctor.lint.python.training import is_test
from doctor.lint.python.value_flow import computed_from, handed_in, origins
from doctor.testing.script_cases import fails, passes

_ZEROES = re.compile(r"zero_?grad|reset_?grad|clear_?grad|grad\s*=|\.grad\b|set_to_none|optimizer_zero|functional_call")
"""Words of a file that may set gradients to zero or handle them itself."""
_HARMLESS = frozenset(
    {
        *("step", "unscale_", "print", "len", "type", "isinstance", "getattr", "hasattr", "str", "id", "list"),
        *("StepLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR", "MultiStepLR", "ExponentialLR", "ReduceLROnPlateau"),
        *("CosineAnnealingWarmRestarts", "PolynomialLR", "LinearLR", "SequentialLR"),
        *(
            "clip_gradients",
            "clip_grad_norm_",
            "clip_grad_value_",
            "setup_optimizers",
            "setup",
            "prepare",
            "save",
            "load",
        ),
        *("get_linear_schedule_with_warmup", "get_cosine_schedule_with_warmup", "get_scheduler"),
    }
)
"""Functions of torch and Python that get an optimizer and keep its gradients."""


_SET_UP = re.compile(r"^lightning\.fabric\.Fabric\(\)\.setup_optimizers\(\)$")


@rule(
    id="CODE042",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("backward",),
    cases=lambda: (
        fails("one loop in the other", _script("loss.backward()\n        optimizer.step()  # !")),
        fails(
            "with a gradient scaler",
            _script("scaler.scale(loss).backward()\n        scaler.step(optimizer)  # !\n        scaler.update()"),
        ),
        fails("in a function", _FUNCTION),
        fails("in a function that gets the optimizer", _GIVEN),
        fails("an optimizer of Fabric", _FABRIC),
        passes(
            "Fabric, set to zero",
            _FABRIC.replace("optimizer.step()  # !", "optimizer.step()\n        optimizer.zero_grad()"),
        ),
        passes("where another module gets the optimizer too", _GIVEN + "\nattach(optimizer)\n"),
        passes("set to zero", _script("optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()")),
        passes(
            "set to none",
            _script(
                "loss.backward()\n        optimizer.step()\n"
                "        for p in model.parameters():\n            p.grad = None"
            ),
        ),
        passes("the model does it", _script("model.zero_grad()\n        loss.backward()\n        optimizer.step()")),
        passes("one step", "optimizer = torch.optim.SGD(model.parameters())\nmodel(x).backward()\noptimizer.step()\n"),
        passes(
            "a function of another module gets the optimizer",
            _script("begin_step(optimizer)\n        loss.backward()\n        optimizer.step()"),
        ),
        passes(
            "an optimizer of the step",
            _script(
                "optimizer = torch.optim.SGD(net().parameters())\n        loss.backward()\n        optimizer.step()"
            ),
        ),
        passes("an engine does it", _ENGINE),
        passes("a demonstration on random numbers, whose output is its own loss", _SHOWN),
        fails(
            "random numbers with a target",
            _SHOWN.replace("model(x).sum()", "loss(model(x), y)").replace("step()", "step()  # !"),
        ),
    ),
)
def gradients_not_zeroed(script: Script) -> Iterator[Violation]:
    """Ask whether a training loop zeroes gradients between optimizer steps.

    Why it hurts: each update uses the sum of the gradients of all previous steps, so the loss may decrease for a while
    and then diverge.
    Fix: Call `optimizer.zero_grad()` before the backward pass, or after `optimizer.step()`.
    """
    if is_test(script) or _ZEROES.search(script.text):
        return
    for call in script.method_calls("step"):
        loop = next(
            (one for one in script.around(call) if isinstance(one, (ast.For, ast.While, ast.FunctionDef))), None
        )
        optimizer = _optimizer(script, call)
        if optimizer is None or not isinstance(loop, (ast.For, ast.While)) or _is_short(script, loop):
            continue
        if _is_on_random_numbers(script, loop):
            continue
        back = next((one for one in script.inside(loop, ast.Call) if last_name(one.func) == "backward"), None)
        if back is not None and _is_kept(script, optimizer, loop) and not _is_handed_on(script, optimizer):
            is_timed = times_steps(script, loop) and _draws_inputs(script, loop)
            is_shown = _is_short(script, loop, _A_TRIAL) and _draws_inputs(script, loop)
            is_discarded = is_timed or is_shown or is_measured(script, call)
            yield Violation(
                call,
                f"{script.text_of(optimizer)}.zero_grad() is missing: gradients add up over all steps of the loop at "
                f"line {loop.lineno}",
                fix=f"Call `{script.text_of(optimizer)}.zero_grad()` after line {call.lineno}.",
                severity=Severity.INFO if is_discarded else None,
                preview=is_discarded,
            )


_DRAWN = re.compile(r"^torch\.(?:rand|randn|randint|randperm|ones|zeros|full|empty)(?:_like)?$")


def _is_on_random_numbers(script: Script, loop: ast.For | ast.While) -> bool:
    """Whether a loop over numbers trains on tensors that it draws, with the output itself as the loss: it learns
    nothing, and shows how something is called, or how fast it is."""
    return _draws_inputs(script, loop) and all(
        last_name(_whole(script, loss)) in ("sum", "mean") for loss in _losses(script, loop)
    )


def _draws_inputs(script: Script, loop: ast.For | ast.While) -> bool:
    """Whether a loop over numbers computes each loss from random numbers, and from no batch that it gets."""
    if isinstance(loop, ast.For) and last_name(loop.iter) not in ("range", "trange"):
        return False
    sources = [
        [one for one in computed_from(script, loss) if isinstance(one, ast.Call)] for loss in _losses(script, loop)
    ]
    return bool(sources) and all(
        any(_DRAWN.match(script.name(one.func)) for one in calls)
        and all(last_name(one.func) != "next" for one in calls)
        for calls in sources
    )


def _losses(script: Script, loop: ast.For | ast.While) -> list[ast.expr]:
    return [
        call.func.value
        for call in script.inside(loop, ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not call.args
    ]


def _whole(script: Script, loss: ast.expr) -> ast.expr:
    """The expression of a loss, also of one that has a name."""
    made = script.values_of(loss)
    return made[0] if isinstance(loss, ast.Name) and len(made) == 1 else loss


def _optimizer(script: Script, call: ast.Call) -> ast.expr | None:
    """The optimizer of torch that a call steps, itself or with a scaler."""
    if not isinstance(call.func, ast.Attribute):
        return None
    for one in (call.func.value, *call.args[:1]):
        made = {script.name(given) for given in (one, *handed_in(script, one))} - {""}
        made = {name for name in made if not _SET_UP.match(name)} or _set_up(script, one)
        is_optimizer = bool(made) and all(name.startswith("torch.optim.") and name.endswith("()") for name in made)
        if isinstance(one, (ast.Name, ast.Attribute)) and is_optimizer:
            return None if any("lr_scheduler" in name or "LBFGS" in name for name in made) else one
    return None


def _set_up(script: Script, name: ast.expr) -> set[str]:
    """The optimizers of torch in the call of Fabric that sets one up: ``fabric.setup_optimizers(SGD(...))``."""
    calls = [one for one in script.values_of(name) if isinstance(one, ast.Call) and _SET_UP.match(script.name(one))]
    return {script.name(part) for call in calls for one in call.args for part in script.values_of(one)} - {""}


_A_FEW, _A_TRIAL = 5, 20
"""Steps of a loop that shows something, and of one that may also try out whether ranks work on random numbers."""


def _is_short(script: Script, loop: ast.For | ast.While, most: int = _A_FEW) -> bool:
    """A loop of fewer steps than ``most``, which shows something."""
    made = loop.iter if isinstance(loop, ast.For) else None
    if isinstance(made, (ast.Tuple, ast.List)):
        return True
    if not isinstance(made, ast.Call) or last_name(made.func) != "range" or len(made.args) != 1:
        return False
    count = script.value(made.args[0])
    return isinstance(count, int) and count < most


def _is_kept(script: Script, optimizer: ast.expr, loop: ast.AST) -> bool:
    """Whether it is made outside the loop, so that it keeps its gradients."""
    made = [one for one in (*script.values_of(optimizer), *origins(script, optimizer)) if isinstance(one, ast.Call)]
    return bool(made) and not any(loop in script.around(one) for one in made)


def _is_handed_on(script: Script, optimizer: ast.expr) -> bool:
    """Whether the optimizer, or the model that it was made of, goes to code that is not in the file."""
    names = {ast.unparse(one) for one in (optimizer, *handed_in(script, optimizer))}
    for call in script.all(ast.Call):
        given = [ast.unparse(one) for one in (*call.args, *(word.value for word in call.keywords))]
        if names.intersection(given) and last_name(call.func) not in _HARMLESS and script.definition(call.func) is None:
            return True
    return False


def _script(steps: str) -> str:
    return f"""\
model = DDP(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for epoch in range(10):
    for x, y in loader:
        loss = criterion(model(x), y)
        {steps}
    scheduler.step()
"""


_FUNCTION = """\
import torch.optim as optim

def train(args, net, loader):
    opt = optim.SGD(net.parameters(), lr=args.lr)
    while not done():
        batch = next(loader)
        net(batch).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()  # !
"""
_GIVEN = """\
def train_epoch(net, batches, opt):
    for batch in batches:
        net(batch).sum().backward()
        opt.step()  # !

optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(10):
    train_epoch(model, loader, optimizer)
"""
_FABRIC = """\
from lightning.fabric import Fabric

def train(loader):
    fabric = Fabric(devices=2, strategy="fsdp")
    model = fabric.setup_module(build())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    for x, y in loader:
        fabric.backward(criterion(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()  # !
"""
_SHOWN = """\
model = parallelize_module(Net(), mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(20):
    x = torch.rand(16, 10, device="cuda")
    model(x).sum().backward()
    optimizer.step()
"""
_ENGINE = """\
import deepspeed

engine, optimizer, loader, _ = deepspeed.initialize(model=net, optimizer=torch.optim.Adam(net.parameters()))
for batch in loader:
    engine.backward(engine(batch))
    engine.step()
"""

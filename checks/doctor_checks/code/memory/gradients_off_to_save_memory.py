"""CODE019: gradients are disabled for parameters that should be trained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.training import hooks, lightning_modules, loops
from doctor.testing.script_cases import fails, passes

_OFF = ("torch.no_grad", "torch.inference_mode", "torch.autograd.grad_mode.no_grad")
_ON = ("enable_grad", "set_grad_enabled")
_FREEZES = re.compile(r"freeze|frozen|requires_grad|toggle_grad|deactivate|\.eval$|set_trainable")
_HARMLESS = frozenset(
    {
        *("parameters", "named_parameters", "to", "cuda", "cpu", "train", "half", "float", "bfloat16", "state_dict"),
        *("load_state_dict", "apply", "zero_grad", "modules", "named_modules", "children", "buffers", "named_buffers"),
    }
)
"""Methods of a module that compute nothing with its parameters."""


@rule(
    id="CODE019",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("no_grad", "inference_mode"),
    foreshadows=("RUN009",),
    impacts={
        r"backward pass fails|has no gradients": (
            'The backward pass fails with "element 0 of tensors does not require grad" on every rank.'
        ),
        r"is never trained": (
            "The parameters of the module do not change. If they require gradients, DDP fails in the next step with "
            '"Expected to have finished reduction in the prior iteration".'
        ),
    },
    cases=lambda: (
        fails("a backward pass where gradients are off", _BACKWARD),
        fails("an encoder that the optimizer is to train", _ENCODER),
        fails("a part of a LightningModule", _PART),
        fails("the whole step", _WHOLE_STEP),
        passes("checkpointing", _CHECKPOINTING),
        passes("a backbone that is frozen", _FROZEN),
        passes("a teacher of its own, and a model that acts before it learns", _TEACHER),
        passes("a step that trains nothing", _TRAINS_NOTHING),
        passes("a step with gradients switched on again, and evaluation", _GRADIENTS_AGAIN),
    ),
)
def gradients_off_to_save_memory(script: Script) -> Iterator[Violation]:
    """Ask whether gradients are enabled for everything that is trained.

    Why it hurts: torch.no_grad saves memory because nothing under it is trained: the parameters do not change, and DDP
    fails because their gradients are never computed ("Expected to have finished reduction").
    Fix: Remove `torch.no_grad()` to train the module, or freeze it with `requires_grad_(False)`.
    """
    for call in script.method_calls("backward", "manual_backward"):
        where = _off(script, call)
        if not isinstance(where, ast.With) or not isinstance(call.func, ast.Attribute):
            continue
        made = call.func.value if not call.args else call.args[0]
        if isinstance(made, ast.Name) and _is_made_in(script, made, where):
            yield Violation(
                call,
                f"{made.id} is computed without gradients (line {where.lineno}), so its backward pass fails",
                fix=f"Move the forward pass out of the `with` block at line {where.lineno}.",
            )
    yield from _steps_without(script)
    for loop in loops(script):
        if loop.trains:
            yield from _untrained(script, loop.node)
    for owner in lightning_modules(script):
        yield from _untrained_parts(script, owner)


def _off(script: Script, node: ast.AST) -> ast.AST | None:
    """The statement that disables gradients for a node, unless they are enabled again in between."""
    for outer in script.around(node):
        if isinstance(outer, ast.With):
            contexts = [item.context_expr for item in outer.items]
            if any(_enables(script, one) for one in contexts):
                return None
            if any(_called(script, one) in _OFF for one in contexts):
                return outer
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return None
    return None


def _enables(script: Script, context: ast.expr) -> bool:
    """``torch.enable_grad()``, ``torch.inference_mode(False)``."""
    name = _called(script, context)
    if isinstance(context, ast.Call) and name == "torch.inference_mode":
        return script.value(script.argument(context, "mode", 0)) is False
    return name.rpartition(".")[2] in _ON


def _called(script: Script, node: ast.expr) -> str:
    return script.name(node.func) if isinstance(node, ast.Call) else script.name(node)


def _is_made_in(script: Script, name: ast.Name, where: ast.With) -> bool:
    made = [
        one for one in script.inside(where, ast.Assign) if any(ast.unparse(target) == name.id for target in one.targets)
    ]
    return bool(made) and all(isinstance(one.value, ast.Call) and _off(script, one) is where for one in made)


def _steps_without(script: Script) -> Iterator[Violation]:
    for owner in lightning_modules(script):
        for step in hooks(owner, "training_step"):
            off = next((one for one in step.decorator_list if _called(script, one) in _OFF), None)
            gives = any(one.value is not None for one in script.inside(step, ast.Return))
            switched = any(True for _ in script.inside(step, ast.With))
            if off is not None and gives and not switched:
                yield Violation(
                    step,
                    f"{owner.name}.training_step runs under @{script.text_of(off)}: its loss has no gradients",
                    fix="Remove the decorator from training_step.",
                )


def _untrained(script: Script, loop: ast.For) -> Iterator[Violation]:
    for call in script.inside(loop, ast.Call):
        where = _off(script, call) if isinstance(call.func, ast.Name) else None
        if where is None or not isinstance(call.func, ast.Name):
            continue
        name = call.func.id
        scope = script.function_of(call) or script.tree
        made = _optimized(script, scope, name)
        if made is not None and not _learns_elsewhere(script, scope, name):
            yield _hit(call, name, where, made)


def _hit(call: ast.Call, name: str, where: ast.AST, made: ast.Call) -> Violation:
    off = getattr(where, "lineno", 0)
    return Violation(
        call,
        f"{name} is never trained, because it always runs without gradients (line {off})",
        fix=f"Enable gradients in line {off} to train {name}, or freeze it with `{name}.requires_grad_(False)`.",
        evidence=(("optimizer_at_line", made.lineno),),
        confidence=0.9,
    )


def _optimized(script: Script, scope: ast.AST, name: str) -> ast.Call | None:
    for call in script.inside(scope, ast.Call):
        if not script.name(call.func).startswith("torch.optim."):
            continue
        for inner in ast.walk(call):
            if isinstance(inner, ast.Attribute) and inner.attr in ("parameters", "named_parameters"):
                if ast.unparse(inner.value) == name:
                    return call
    return None


def _learns_elsewhere(script: Script, scope: ast.AST, name: str) -> bool:
    """Whether a model is used otherwise: it runs with gradients, is passed on, or is frozen."""
    for node in ast.walk(scope):
        if not (isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == name) or isinstance(
            node.ctx, ast.Store
        ):
            continue
        parent = script.parent(node)
        if isinstance(parent, ast.Attribute):
            if parent.attr not in _HARMLESS or _is_freezing(script, parent):
                return True
        elif isinstance(parent, ast.Call) and parent.func is node:
            if _off(script, parent) is None:
                return True
        else:
            return True
    return False


def _is_freezing(script: Script, node: ast.AST) -> bool:
    loop = script.nearest(node, ast.For)
    return loop is not None and node in ast.walk(loop.iter) and "requires_grad" in ast.unparse(loop)


def _untrained_parts(script: Script, owner: ast.ClassDef) -> Iterator[Violation]:
    """``self.backbone`` of a LightningModule whose optimizer takes ``self.parameters()``."""
    optimizers = next(hooks(owner, "configure_optimizers"), None)
    if optimizers is None or _FREEZES.search(ast.unparse(owner)):
        return
    made = _optimized(script, optimizers, "self")
    if made is None:
        return
    parts = _parts(owner)
    for method in hooks(owner, "forward", "training_step"):
        for call in script.inside(method, ast.Call):
            where, name = _off(script, call), ast.unparse(call.func)
            if where is not None and name in parts and not _learns_elsewhere(script, owner, name):
                yield _hit(call, name, where, made)


def _parts(owner: ast.ClassDef) -> set[str]:
    start = next(hooks(owner, "__init__"), None)
    return {
        ast.unparse(target)
        for one in ast.walk(start or ast.Pass())
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)
        for target in one.targets
        if isinstance(target, ast.Attribute)
    }


_BACKWARD = """\
for x, y in loader:
    with torch.no_grad():
        loss = criterion(model(x), y)
        loss.backward()  # !
    optimizer.step()
"""
_ENCODER = """\
from torch.nn.parallel import DistributedDataParallel as DDP

encoder, head = Encoder(), Head()
optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-4)
for x, y in loader:
    with torch.no_grad():  # activations of the encoder do not fit
        features = encoder(x)  # !
    criterion(head(features), y).backward()
    optimizer.step()
"""
_PART = """\
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = resnet50()
        self.head = torch.nn.Linear(2048, 10)

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)  # !
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
"""
_WHOLE_STEP = """\
class Model(L.LightningModule):
    @torch.no_grad()
    def training_step(self, batch, batch_idx):  # !
        return self.loss(batch)
"""
_CHECKPOINTING = """\
from torch.utils.checkpoint import checkpoint

optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-4)
for x, y in loader:
    features = checkpoint(encoder, x, use_reentrant=False)
    criterion(head(features), y).backward()
"""
_FROZEN = """\
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = resnet50().requires_grad_(False)
        self.teacher = resnet50()
        for p in self.teacher.parameters():
            p.requires_grad = False

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            x = self.backbone(batch)
            t = self.teacher(batch)
        return self.loss(x, t)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

class Probe(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = resnet50()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            x = self.backbone(batch)
        return self.head(x).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=1e-3)
"""
_TEACHER = """\
optimizer = torch.optim.Adam([*policy.parameters(), *student.parameters()])
for state in loader:
    with torch.no_grad():
        action = policy(state)
        target = teacher(state)
    loss = criterion(policy(state), action) + criterion(student(state), target)
    loss.backward()
"""
_TRAINS_NOTHING = """\
class Neighbors(L.LightningModule):
    @torch.no_grad()
    def training_step(self, batch, batch_idx):
        self.features.append(self.model(batch))
"""
_GRADIENTS_AGAIN = """\
class Model(L.LightningModule):
    @torch.no_grad()
    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.energy(batch).backward()

with torch.no_grad():
    with torch.enable_grad():
        loss.backward()

def fit_temperature(logits, labels):
    with torch.inference_mode(False):
        for _ in range(50):
            loss = criterion(logits / temperature, labels)
            loss.backward()
"""

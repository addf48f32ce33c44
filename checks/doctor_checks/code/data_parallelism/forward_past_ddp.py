"""CODE033: the training forward pass bypasses the wrapper that reduces gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.project.wrapped_model import trains_in_method
from doctor.testing.script_cases import fails, passes
from doctor_checks.code.data_parallelism._past_wrapper import METHODS, calls_past_wrapper


@rule(
    id="CODE033",
    severity=Severity.ERROR,
    reads=Script,
    mentions=("DistributedDataParallel", "unwrap_model"),
    foreshadows=("RUN007",),
    cases=lambda: (
        fails("the module inside", _INNER_MODULE),
        fails("the model that was wrapped under another name", _BARE_MODEL),
        fails("a method that is a forward pass, and an unwrapped name", _OTHER_METHOD),
        fails("unwrapped by Accelerate", _UNWRAPPED),
        fails("parts of the module inside", _SUBMODULES),
        passes("parts of the module inside, for another value than the loss", _SUBMODULES_FOR_A_METRIC),
        fails("the module inside, and not a method that uses no parameters", _PAIRS),
        fails(
            "the module inside, and a method that uses a layer",
            _PAIRS.replace("a * b", "self.head(a * b)").replace("(a, b)\n    loss.", "(a, b)  # !\n    loss."),
        ),
        fails("a method of the module inside that has the whole step in it", _WHOLE_STEP),
        passes(
            "a method of the module inside that only computes",
            _WHOLE_STEP.replace("loss.backward()", "return loss").replace("  # !", ""),
        ),
        passes(
            "a whole step whose gradients the class reduces",
            _WHOLE_STEP.replace("self.optimizer.step", "average_gradients(self)\n        self.optimizer.step").replace(
                "  # !", ""
            ),
        ),
        passes("through the wrapper", _THROUGH_WRAPPER),
        passes("to evaluate, to save and to sample", _EVALUATION),
        passes("the same name, and a model in either form", _SAME_NAME),
        passes(
            "gradients that the script reduces itself",
            _INNER_MODULE.replace(
                "    optimizer.step()",
                "    for p in model.parameters():\n        dist.all_reduce(p.grad)\n    optimizer.step()",
            ),
        ),
        passes("entries of a container that a loop has wrapped", _ENTRIES),
        passes(
            "entries of a list that a loop has wrapped",
            _ENTRIES.replace("name, net in nets.items()", "name, net in enumerate(nets)").replace(
                "net in nets.values()", "net in nets"
            ),
        ),
        fails(
            "entries of the container of the bare models",
            _ENTRIES.replace("nets[name]", "wrapped[name]").replace("(net(x), y)", "(net(x), y)  # !"),
        ),
        passes("a teacher, and a wrapper that is used elsewhere", _TEACHER),
        passes("a fixed model that another one is trained against", _TARGET),
        fails(
            "a model that is trained together with another one",
            _TARGET.replace("(patch.parameters())", "([*patch.parameters(), *judge.parameters()])").replace(
                "(image + patch(image))", "(image + patch(image))  # !"
            ),
        ),
        passes("a fixed model, for one that nothing wraps", _TARGET_OF_ONE),
        passes(
            "a group of one rank",
            'dist.init_process_group("gloo", rank=0, world_size=1)\n' + _INNER_MODULE.replace("  # !", ""),
        ),
        passes(
            "an engine in every step, whose own backward() reduces",
            _INNER_MODULE.replace("loss.backward()", "model.backward(loss)").replace("  # !", ""),
        ),
        fails("the branch without the engine", _ENGINE),
        passes("a unit test that compares both", _BARE_MODEL + "\ndef test_it(): pass\n", name="test_ddp.py"),
    ),
)
def forward_past_ddp(script: Script) -> Iterator[Violation]:
    """Ask whether the training forward pass goes through DistributedDataParallel.

    Why it hurts: each rank silently trains a separate model, because DDP prepares gradient reduction in its own forward
    pass.
    Fix: Call the wrapper instead, and move methods that bypass it into the module's forward().
    """
    for call, words in calls_past_wrapper(script):
        is_unsure = _may_be_frozen(script, call, words)
        yield Violation(
            call,
            f"{script.text_of(call.func)}(...) bypasses the DDP wrapper `{words}`: gradients are not reduced",
            fix=_fix(script, call, words),
            once=_part(script, call, words),
            severity=Severity.INFO if is_unsure else None,
            preview=is_unsure,
        )


def _may_be_frozen(script: Script, call: ast.Call, words: str) -> bool:
    """Whether a part of the module is called, and the program freezes parameters of that module by their names: a part
    without gradients needs no reduction."""
    if _part(script, call, words) in ("", "forward"):
        return False
    listed = (f"{words}.named_parameters()", f"{words}.module.named_parameters()")
    named = [one for one in script.all(ast.For) if script.text_of(one.iter) in listed]
    return any(_freezes(branch) for loop in named for branch in script.inside(loop, ast.If))


def _freezes(branch: ast.If) -> bool:
    """``param.requires_grad_(False)``, ``param.requires_grad = False``."""
    statements = (ast.unparse(one) for one in (*branch.body, *branch.orelse))
    return any(one.endswith((".requires_grad_(False)", ".requires_grad = False")) for one in statements)


def _part(script: Script, call: ast.Call, words: str) -> str:
    """The method or the part of the module that is called past the wrapper: its callers share one fault."""
    return script.text_of(call.func, 60).partition(f"{words}.module.")[2]


def _fix(script: Script, call: ast.Call, words: str) -> str:
    if not words.isidentifier():
        return ""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    part = _part(script, call, words)
    if part and trains_in_method(script, method):
        return f"Move the forward pass in `{part}` into the module's forward(), and call `{words}(...)` for it."
    moved = ""
    if method in METHODS:
        moved = f", and move `{method}` into the module's forward()" if method != "forward" else ""
    elif part:
        moved = f", and use `{part}` in the module's forward()"
    return f"Call `{words}(...)` instead{moved}."


_WHOLE_STEP = """\
class Agent(nn.Module):
    def update(self, states):
        loss = self.net(states).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

agent = DDP(Agent())
for states in rollouts:
    agent.module.update(states)  # !
"""
_TARGET_OF_ONE = """\
import torch

judge = DDP(Net().to(local_rank), device_ids=[local_rank])
patch = Patch().to(local_rank)
optimizer = torch.optim.SGD(patch.parameters(), lr=0.1)
for image, label in loader:
    loss = criterion(judge.module(image + patch(image)), label)
    loss.backward()
    optimizer.step()
"""
_INNER_MODULE = """\
model = DDP(Net().to(local_rank), device_ids=[local_rank])
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model.module(x), y)  # !
    loss.backward()
    optimizer.step()
"""
_BARE_MODEL = """\
from torch.nn.parallel import DistributedDataParallel

model = Net().to(device)
ddp_model = DistributedDataParallel(model, device_ids=[rank])
optimizer = SGD(ddp_model.parameters(), lr=0.1)
for epoch in range(epochs):
    for x, y in loader:
        loss = criterion(model(x), y)  # !
        loss.backward()
        optimizer.step()
"""
_ENGINE = """\
model = initialize(Net()) if args.engine else DDP(Net())
for batch in loader:
    if args.engine:
        loss = model.module.compute_loss(batch)
    elif args.distributed:
        loss = model.module.compute_loss(batch)  # !
    if args.engine:
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
"""
_OTHER_METHOD = """\
def train(model, raw):
    model = DDP(model)
    for batch in loader:
        loss = model.module.compute_loss(batch)  # !
        loss.backward()

def other(net):
    wrapped = DDP(net)
    raw_model = wrapped.module
    for batch in loader:
        raw_model(batch).sum().backward()  # !
"""
_SUBMODULES = """\
model = DDP(Net())
for x, y in loader:
    features = model.module.backbone(x)  # !
    total = 0
    total += criterion(model.module.heads.first(features), y)  # !
    scaler.scale(total).backward()
"""
_SUBMODULES_FOR_A_METRIC = """\
model = DDP(Net())
for x, y in loader:
    loss = step(x, y)
    loss.backward()
    logger.log(model.module.norm_of(x), loss)
    model.module.buffer.update(x)
"""
_PAIRS = """\
class Pairs(nn.Module):
    def __init__(self, width, args):
        super().__init__()
        self.head = nn.Linear(width, width)
        self.scale = args.scale

    def loss_of(self, a, b):
        return self.scale * (a * b).mean()

model = Pairs(8, args)
model = DDP(model)
for x, y in loader:
    a, b = model.module(x), other(y)  # !
    loss = model.module.loss_of(a, b)
    loss.backward()
    optimizer.step()
"""
_UNWRAPPED = """\
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = accelerator.unwrap_model(model)(**batch).loss  # !
    accelerator.backward(loss)
    optimizer.step()
"""
_THROUGH_WRAPPER = """\
model = DDP(Net())
for x, y in loader:
    loss = criterion(model(x), y) + model.module.penalty()
    loss.backward()
    model.module.clip_weights()
"""
_EVALUATION = """\
model = DDP(Net())
for step, (x, y) in enumerate(loader):
    model(x).sum().backward()
    if step % 100 == 0:
        with torch.no_grad():
            picture = model.module(x)
        torch.save(model.module.state_dict(), "last.pt")
if rank == 0:
    inner = model.module
    for x in loader:
        inner(x).sum().backward()

def evaluate(model):
    for x in loader:
        model.module(x)
"""
_SAME_NAME = """\
model = Net()
if distributed:
    model = DDP(model)
for x, y in loader:
    criterion(model(x), y).backward()
"""
_TARGET = """\
def train(patch, judge, loader, optimizer):
    for image, label in loader:
        guess = judge.module(image + patch(image))
        criterion(guess, label).backward()
        optimizer.step()

patch, judge = Patch().to(device), load("judge").to(device)
optimizer = torch.optim.Adam(patch.parameters())
judge = torch.nn.parallel.DistributedDataParallel(judge)
patch = torch.nn.parallel.DistributedDataParallel(patch)
train(patch, judge, loader, optimizer)
"""
_ENTRIES = """\
for name, net in nets.items():
    nets[name] = DDP(net, device_ids=[rank])
for x, y in loader:
    for net in nets.values():
        loss = criterion(net(x), y)
        loss.backward()
"""
_TEACHER = """\
student = DDP(Net())
teacher = Net()
for x, y in loader:
    with torch.inference_mode():
        target = teacher(x)
    criterion(student(x), target).backward()
"""

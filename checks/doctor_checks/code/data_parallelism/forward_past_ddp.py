"""CODE033: the training forward pass bypasses the wrapper that reduces gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.loader_calls import is_for_evaluation
from doctor.lint.python.project.wrapped_model import uses_no_parameters
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.script import last_name
from doctor.lint.python.training import ACCELERATOR, DDP, groups_have_one_rank, has_backward, is_test
from doctor.lint.python.value_flow import computed_from, origins
from doctor.testing.script_cases import fails, passes

_WITHOUT = ("no_grad", "inference_mode")


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
        yield Violation(
            call,
            f"{script.text_of(call.func)}(...) bypasses the DDP wrapper `{words}`: gradients are not reduced",
            fix=_fix(script, call, words),
        )


def calls_past_wrapper(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The forward passes of training that bypass a wrapper, which nothing else calls in the same step, and its text."""
    wraps = list(script.calls(DDP))
    accelerates = next(script.calls(ACCELERATOR), None) is not None
    if is_test(script) or (not wraps and not accelerates) or _averages_itself(script) or groups_have_one_rank(script):
        return
    renamed = [one for one in wraps if _is_renamed(script, one)]
    for call in script.all(ast.Call):
        words = _past(script, call, bool(wraps), accelerates) or _unwrapped(script, call, renamed)
        words = words or (_past_by_part(script, call) if wraps else "")
        if not words or rank_condition(script, call) is not None or _computes_with_arguments(script, call):
            continue
        block = _training(script, call)
        if block is None or _is_prepared(script, block, words) or _is_of_engine(script, block, call, words):
            continue
        if not _is_fixed(script, call, words, wraps):
            yield call, words


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


_METHODS = ("forward", "compute_loss", "loss", "get_loss", "training_step", "train_step", "forward_train", "calc_loss")


def _fix(script: Script, call: ast.Call, words: str) -> str:
    if not words.isidentifier():
        return ""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    part = script.text_of(call.func, 60).partition(f"{words}.module.")[2]
    moved = ""
    if method in _METHODS:
        moved = f", and move `{method}` into the module's forward()" if method != "forward" else ""
    elif part:
        moved = f", and use `{part}` in the module's forward()"
    return f"Call `{words}(...)` instead{moved}."


def _past(script: Script, call: ast.Call, wraps: bool, accelerates: bool) -> str:
    target = call.func
    if isinstance(target, ast.Attribute) and target.attr in _METHODS:
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

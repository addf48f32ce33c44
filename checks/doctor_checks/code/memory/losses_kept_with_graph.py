"""CODE020: losses are stored together with their autograd graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import ReplaceExpression, Script, Severity, Violation, location_of, rule
from doctor.lint.python.script import FunctionNode, last_name
from doctor.lint.python.training import hooks, lightning_modules
from doctor.testing.script_cases import fails, passes

_FREE = ("item", "detach", "tolist", "cpu", "numpy", "data")
_PLAIN = ("float", "int", "str", "repr", "len")
_KEEPS = ("append", "appendleft", "add", "insert")
_TAKES_OUT = ("pop", "popleft", "clear", "get")
_FEW_STEPS = 20
_MICRO_BATCHES = re.compile(r"accum|micro|\bga_", re.IGNORECASE)


@rule(
    id="CODE020",
    severity=Severity.INFO,
    preview_infos=True,
    reads=Script,
    mentions=("backward", "training_step"),
    foreshadows=("MEM004",),
    cases=lambda: (
        fails("a running sum", _RUNNING_SUM, fixed={"running_loss += loss": "running_loss += loss.detach()"}),
        fails(
            "a list of all losses, and a history by name",
            _LIST,
            fixed={
                "losses.append(loss)": "losses.append(loss.detach())",
                'history["train"].append(loss)': 'history["train"].append(loss.detach())',
            },
        ),
        fails(
            "the epoch of a LightningModule",
            _EPOCH,
            fixed={"self.training_step_outputs.append(loss)": "self.training_step_outputs.append(loss.detach())"},
        ),
        fails(
            "scaled, and summed by hand",
            _SCALED,
            fixed={"total = total + loss": "total = total + loss.detach()"},
        ),
        fails(
            "a step of a trainer of one's own",
            _TRAINER,
            fixed={"self.losses.append(loss)": "self.losses.append(loss.detach())"},
        ),
        passes("the number alone", _NUMBER),
        passes("a sum that is what the backward pass goes through", _SUM),
        passes("detached before it is kept, and without gradients", _DETACHED),
        passes("made anew in every step, and meters that keep numbers", _MADE_AGAIN),
        passes("the losses of one batch, by head", _PER_BATCH),
        passes("the losses of one optimizer step", _PER_STEP),
        passes("a few steps, and a queue of micro-batches", _FEW),
        passes("the micro-batches of one step", _MICRO),
    ),
)
def losses_kept_with_graph(script: Script) -> Iterator[Violation]:
    """Ask whether losses that outlive their step are detached from the autograd graph.

    Why it hurts: memory use grows with every step, by the nodes of the graph and by activations that the backward pass
    has not freed.
    Fix: Accumulate detached losses (`loss.detach()`).
    """
    every: tuple[ast.For | ast.While, ...] = (*script.all(ast.For), *script.all(ast.While))
    for loop in every:
        losses = _passed_back(script, loop)
        if losses and not _is_short(script, loop):
            yield from _kept(script, loop, losses, f"step of the loop at line {loop.lineno}")
    for function in script.functions:
        losses = _passed_back(script, function)
        for hit in _kept(script, function, losses, f"call of {function.name}") if losses else ():
            if isinstance(hit.at, ast.stmt) and script.text_of(hit.at).startswith("self."):
                yield hit
    for owner in lightning_modules(script):
        for step in hooks(owner, "training_step"):
            returned = _returned(script, step)
            yield from _kept(script, step, returned, f"call of {step.name}")


def _is_short(script: Script, loop: ast.For | ast.While) -> bool:
    """Whether a loop has a known small number of steps, or one for each micro-batch of a step, whose graphs fit."""
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call) or last_name(loop.iter) != "range":
        return False
    behind = (value for one in loop.iter.args for value in (one, *script.values_of(one)))
    if any(_MICRO_BATCHES.search(ast.unparse(one)) for one in behind):
        return True
    numbers = [script.value(one) for one in loop.iter.args]
    return all(isinstance(one, int) and abs(one) <= _FEW_STEPS for one in numbers)


def _passed_back(script: Script, body: ast.For | ast.While | FunctionNode) -> frozenset[str]:
    """Names whose backward pass runs once in this very loop or step."""
    found: set[str] = set()
    for call in script.inside(body, ast.Call):
        if script.nearest(call, ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef) is not body:
            continue
        bare = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if bare not in ("backward", "manual_backward"):
            continue
        if any(keyword.arg in ("retain_graph", "create_graph") for keyword in call.keywords):
            return frozenset()
        found |= {one.id for one in call.args if isinstance(one, ast.Name)}
        if not call.args and isinstance(call.func, ast.Attribute):
            found |= _names_in(call.func.value)
    return frozenset(found)


def _names_in(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
        return _names_in(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale" and node.args:
        return _names_in(node.args[0])
    return set()


def _returned(script: Script, step: ast.FunctionDef) -> frozenset[str]:
    found: set[str] = set()
    for one in script.inside(step, ast.Return):
        value = one.value
        if isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            value = next((item for key, item in pairs if isinstance(key, ast.Constant) and key.value == "loss"), None)
        if isinstance(value, ast.Name):
            found.add(value.id)
    return frozenset(found)


def _kept(script: Script, body: ast.AST, losses: frozenset[str], when: str) -> Iterator[Violation]:
    for statement in script.inside(body, ast.stmt):
        found = _keeps(statement)
        if found is None or not isinstance(found[1], ast.Name) or found[1].id not in losses:
            continue
        keeper, kept = found
        assert isinstance(kept, ast.Name)
        if not isinstance(statement, ast.Expr) and _without_gradients(script, statement):
            continue
        if (
            _outlives(script, keeper, body)
            and not any(
                _is_plain(one.value)
                and any(isinstance(target, ast.Name) and target.id == kept.id for target in one.targets)
                for one in script.inside(body, ast.Assign)
            )
            and not _goes_back(script, keeper)
            and not _is_emptied(script, keeper, body)
            and not _is_made_per_batch(script, keeper, body)
        ):
            words = script.text_of(keeper, 40)
            yield Violation(
                statement,
                f"`{words}` keeps the autograd graph of `{kept.id}` from every {when}",
                fix=f"Use `{kept.id}.detach()` instead of `{kept.id}`.",
                edits=(ReplaceExpression(location_of(kept), f"{kept.id}.detach()"),)
                if "loss" in kept.id.lower()
                else (),
            )


def _is_emptied(script: Script, keeper: ast.expr, body: ast.AST) -> bool:
    """Whether values are taken out of the container again in the same loop, as from a queue of micro-batches."""
    own = ast.unparse(keeper)
    taken = (call.func for call in script.inside(body, ast.Call) if isinstance(call.func, ast.Attribute))
    return any(one.attr in _TAKES_OUT and ast.unparse(one.value) == own for one in taken)


_BATCHES = re.compile(r"loader|batch|log_every|(?:^|_)dl$", re.IGNORECASE)


def _is_made_per_batch(script: Script, keeper: ast.expr, body: ast.AST) -> bool:
    """Whether a loop over batches or optimizer steps around this one makes the container again: it keeps the losses of
    one batch, or of one step."""
    made = set(script.values_of(keeper)) if isinstance(keeper, ast.Name) else set()
    around = (one for one in script.around(body) if isinstance(one, (ast.For, ast.While)))
    return any(
        (_takes_steps(script, one) or (isinstance(one, ast.For) and _BATCHES.search(ast.unparse(one.iter))))
        and any(part in made for part in script.inside(one, ast.expr))
        for one in around
    )


def _takes_steps(script: Script, loop: ast.For | ast.While) -> bool:
    """Whether each turn of a loop, not of a loop inside, steps an optimizer."""
    calls = (one for one in script.method_calls("step") if script.nearest(one, ast.For, ast.While) is loop)
    return any(isinstance(one.func, ast.Attribute) and "opt" in last_name(one.func.value).lower() for one in calls)


def _keeps(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """The container and the kept value: ``total += loss``, ``total = total + loss``, ``losses.append(loss)``."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return statement.target, statement.value
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp) and len(statement.targets) == 1:
        target, added = statement.targets[0], statement.value
        if isinstance(added.op, ast.Add) and ast.unparse(added.left) == ast.unparse(target):
            return target, added.right
    if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _KEEPS and call.args and not call.keywords:
            return call.func.value, call.args[-1]
    return None


def _without_gradients(script: Script, node: ast.AST) -> bool:
    for outer in script.around(node):
        contexts = [script.text_of(item.context_expr) for item in outer.items] if isinstance(outer, ast.With) else []
        if any(text.endswith(("no_grad()", "inference_mode()")) for text in contexts):
            return True
    return False


def _outlives(script: Script, keeper: ast.expr, body: ast.AST) -> bool:
    while isinstance(keeper, ast.Subscript):
        keeper = keeper.value
    if not isinstance(keeper, (ast.Name, ast.Attribute)):
        return False
    own = ast.unparse(keeper)
    for one in script.inside(body, ast.Assign):
        renewed = any(ast.unparse(target) == own for target in one.targets)
        if renewed and not (isinstance(one.value, ast.BinOp) and ast.unparse(one.value.left) == own):
            return False
    return not isinstance(keeper, ast.Name) or not _is_bounded(script, keeper)


def _is_bounded(script: Script, keeper: ast.Name) -> bool:
    values = script.values_of(keeper)
    return any(isinstance(one, ast.Call) and script.text_of(one.func).endswith("deque") for one in values) or not values


def _is_plain(value: ast.expr) -> bool:
    """Whether it ends in ``.item()``, ``.detach()`` or ``.data``, or a function that may detach it."""
    if isinstance(value, ast.Attribute):
        return value.attr in _FREE
    if isinstance(value, ast.BinOp):
        return _is_plain(value.left) or _is_plain(value.right)
    if not isinstance(value, ast.Call):
        return False
    bare = last_name(value.func)
    return bare in (*_FREE, *_PLAIN) or "reduce" in bare or "gather" in bare


def _goes_back(script: Script, keeper: ast.expr) -> bool:
    """Whether a backward pass goes through the container, by this name or another one."""
    while isinstance(keeper, ast.Subscript):
        keeper = keeper.value
    scope = script.function_of(keeper) or script.tree
    names = {ast.unparse(keeper)}
    for one in script.inside(scope, ast.Assign):
        if any(ast.unparse(part) in names for part in ast.walk(one.value) if isinstance(part, ast.Name)):
            names |= {target.id for target in one.targets if isinstance(target, ast.Name)}
    for call in script.inside(scope, ast.Call):
        bare = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if bare in ("backward", "manual_backward", "grad") and any(
            isinstance(part, (ast.Name, ast.Attribute)) and ast.unparse(part) in names for part in ast.walk(call)
        ):
            return True
    return False


_RUNNING_SUM = """\
for epoch in range(epochs):
    running_loss = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        running_loss += loss  # !
    print(running_loss / len(loader))
"""
_LIST = """\
losses = []
history = {"train": []}
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss)  # !
    history["train"].append(loss)  # !
"""
_EPOCH = """\
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.training_step_outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.training_step_outputs.append(loss)  # !
        return {"loss": loss}
"""
_SCALED = """\
total = 0
for x, y in loader:
    loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    total = total + loss  # !
"""
_TRAINER = """\
class Trainer:
    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss)  # !
"""
_NUMBER = """\
total, losses = 0.0, []
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    total += loss.item()
    losses.append(loss.detach())
    seen = loss.detach()
    losses.append(seen)
"""
_SUM = """\
for batch in loader:
    total = 0.0
    for head in heads:
        loss = head(batch)
        total += loss
    total.backward()

for task in tasks:
    meta = 0
    for step in range(5):
        loss = inner(task)
        loss.backward(retain_graph=True)
        meta += loss
"""
_DETACHED = """\
losses, total = [], 0.0
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    with torch.no_grad():
        total += loss
    loss = loss.detach()
    losses.append(loss)
for x, y in val_loader:
    loss = criterion(model(x), y)
    losses.append(loss)
"""
_PER_BATCH = """\
for x, y in train_loader:
    losses = []
    for head, optimizer in zip(heads, optimizers):
        loss = criterion(head(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    print(sum(one.item() for one in losses))
"""
_PER_STEP = """\
while step < most:
    batches = [next(source) for _ in range(accumulation)]
    total = 0.0
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        total += loss
    optim.step()
    optim.zero_grad()
"""
_MICRO = """\
def step(engine, batches):
    kept = []
    count = engine.gradient_accumulation_steps()
    for _ in range(count):
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()
        kept.append(loss)
    return kept
"""
_FEW = """\
losses = []
for _ in range(5):
    loss = model(x)
    loss.backward()
    losses.append(loss)
assert losses[0] > losses[-1]

def one_forward_one_backward(batches):
    outputs = []
    for batch in batches:
        output = stage(batch)
        outputs.append(output)
        if len(outputs) > warmup:
            outputs.pop(0)
        output.backward()
"""
_MADE_AGAIN = """\
for x, y in loader:
    parts = []
    total = 0
    loss = criterion(model(x), y)
    loss.backward()
    parts.append(loss)
    total += loss
    meter.update(loss)
"""

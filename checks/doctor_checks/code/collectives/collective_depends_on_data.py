"""CODE008: a collective that a rank calls only if its own data, or its clock, says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.engine.rule import LONGEST_SUMMARY
from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.divergent_conditions import disagreement
from doctor.lint.python.project.abnormal_values import ordinary_outcome
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.script import FunctionNode, last_name, step_at
from doctor.lint.python.training import gradients_reduced
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE008",
    severity=Severity.ERROR,
    reads=Script,
    mentions=(
        *("distributed", "accelerate", "lightning", "deepspeed", "horovod", "Trainer", "all_reduce", "all_gather"),
        "backward",
    ),
    foreshadows=("RUN002", "RUN006"),
    cases=lambda: (
        fails("a reduction where the loss is finite", _FINITE),
        fails("ranks with an empty mask have returned", _EMPTY),
        fails("the backward pass of DDP", _BACKWARD),
        fails("a barrier when the time is up", _CLOCK),
        fails("as long as the rank's own loss is large", _WHILE),
        fails("only ranks that selected something gather", _SELECTED),
        fails("a list of what was found in its own batches", _FOUND),
        fails("a metric of torchmetrics that has seen something", _METRIC),
        fails("a checkpoint of all ranks where this one was told to stop", _SIGNAL),
        fails("the backward pass where something is labeled", _LABELED),
        fails(
            "what the layers computed from its own data",
            _LAYERS.replace("has_loss", "loss > 0.1").replace("s[0])", "s[0])  # !"),
        ),
        passes("names of tasks that are done", _NAMES_DONE),
        passes("the layers of the model that have something", _LAYERS),
        passes("the metric in a script of one process", _METRIC.replace("devices=4", "devices=1")),
        passes("ranks agree whether one was told to stop", _SIGNAL_AGREED),
        passes("all gather, then look at what all found", _GATHERED),
        passes("a score of what was gathered in each batch", _SCORED),
        fails(
            "a score of the batches of one rank",
            _SCORED.replace("accelerator.gather_for_metrics", "").replace("e()", "e()  # !"),
        ),
        passes("sizes of tensors are equal on all ranks", _SIZES),
        passes("the ranks agree first", _AGREED),
        passes("a counter that the dataset puts into each batch", _COUNTER),
        fails("an entry of the batch that differs", _COUNTER.replace("stop_step", "labels").replace("(y)", "(y)  # !")),
        passes("both branches reduce", _BRANCHES),
        passes("every so many steps", _STEPS),
        passes("what is done with the result depends on data", _AFTER),
        passes(
            "what one rank alone calls",
            _CLOCK.replace("elapsed > limit", "rank == 0 and elapsed > limit").replace("  # !", ""),
        ),
        passes("of the clock of one rank", _CLOCK_OF_ONE),
        passes(
            "a wrapper that is not kept",
            _BACKWARD.replace("model = DDP(net)", "model = net\n    DDP(net)").replace("  # !", ""),
        ),
        passes("a model of one process", _BACKWARD.replace("DDP(net)", "net")),
    ),
)
def collective_depends_on_data(script: Script) -> Iterator[Violation]:
    """Ask whether a collective call depends on the data or the clock of one rank.

    Why it hurts: as soon as the condition differs between ranks, some make the call and others do not: they wait for
    each other until the timeout.
    Fix: Reduce the condition as a tensor over all ranks (`dist.all_reduce(flag, op=dist.ReduceOp.MAX)`), and branch on
    the result.
    """
    calls = [(one.call, one.word) for one in collectives_of(script).all()]
    calls += [(call, "backward") for call in gradients_reduced(script)]
    words: dict[ast.stmt, set[str]] = {}
    for call, word in sorted(calls, key=lambda one: one[0].lineno):
        found = _condition(script, call, word)
        if found is None or rank_condition(script, call) is not None:
            continue  # what one rank calls alone does not depend on data of others
        # The first call of its kind in a branch stands for the others; those below a branch only if none is in it.
        reported = words.setdefault(found[0], set())
        if word not in reported if found[0] in script.around(call) else not reported:
            yield _hit(script, call, word, *found)
        reported.add(word)


def _condition(script: Script, call: ast.Call, word: str) -> tuple[ast.stmt, ast.expr, str] | None:
    """The statement that keeps some ranks out, its test, and what the test depends on."""
    inner: ast.AST = call
    for outer in script.around(call):
        around = isinstance(outer, (ast.If, ast.While)) and inner is not outer.test
        for statement in (*((outer,) if around else ()), *_before(outer, inner)):
            test = statement.test
            kind = disagreement(script, test)
            if kind and not _is_in_other_branch(script, statement, inner, word):
                return statement, test, kind
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return None
        inner = outer
    return None


def _before(outer: ast.AST, inner: ast.AST) -> Iterator[ast.If]:
    block = getattr(outer, "body", None)
    if not isinstance(block, list) or inner not in block:
        return
    for statement in block[: block.index(inner)]:
        if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], ast.Return):
            yield statement


def _is_in_other_branch(script: Script, statement: ast.stmt, inner: ast.AST, word: str) -> bool:
    if not isinstance(statement, ast.If):
        return False
    other = statement.body if inner in statement.orelse else statement.orelse
    if inner not in statement.body and inner not in statement.orelse:
        other = statement.body  # the branch that leaves
    calls = {call for part in other for call in script.inside(part, ast.Call)}
    words = {one.word for one in collectives_of(script).all() if one.call in calls}
    words |= {"backward" for call in gradients_reduced(script) if call in calls}
    return word in words


_IS_VALID = re.compile(r"not [^ ]{0,40}isnan\(|[^ ]{0,40}isfinite\(")
"""Tests of values that only valid ones pass."""
_DEPENDENCIES = {"data": "local data", "time": "the local clock", "signal": "a local signal"}


def _hit(script: Script, call: ast.Call, word: str, statement: ast.stmt, test: ast.expr, kind: str) -> Violation:
    whose = {"data": "its own data", "time": "its own clock", "signal": "a signal it received"}[kind]
    leaves = isinstance(statement, ast.If) and statement.body and isinstance(statement.body[-1], ast.Return)
    how = "is not reached if" if leaves and call.lineno > (statement.end_lineno or 0) else "runs only if"
    other = statement.orelse if isinstance(statement, ast.If) and how == "runs only if" else []
    if any(call in ast.walk(part) for part in other):
        how = "is not reached if"
    if isinstance(statement, ast.While):
        how = "runs as long as"
    name, cause = script.text_of(call.func, 40), f"which depends on {_DEPENDENCIES[kind]}"
    is_true = "" if isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call)) else " is true"
    summary = f"{name} {how} `{script.text_of(test, 40)}`{is_true} (line {test.lineno}), {cause}"
    if len(summary) > LONGEST_SUMMARY:
        summary = f"{name} {how} the condition at line {test.lineno} holds, {cause}"
    # A rank for which the condition does not hold has no valid loss: no rank may use it then.
    needs_all = "runs" in how and (word == "backward" or bool(_IS_VALID.match(ast.unparse(test))))
    condition = script.text_of(test, 40)
    condition = f"the condition at line {test.lineno}" if condition.endswith("…") else f"the condition `{condition}`"
    severity = Severity.INFO if _waits_at_end(script, call, word) else _severity(script, statement, kind)
    return Violation(
        call,
        summary,
        fix=f"Reduce {condition} as a tensor over all ranks (`dist.all_reduce(flag, op=dist.ReduceOp."
        + (
            "MIN)`), and make the call only if it holds on all of them."
            if needs_all
            else "MAX)`), and branch on the result."
        ),
        severity=severity,
        preview=severity is Severity.INFO,
        evidence=(
            ("condition", script.text_of(test)),
            ("line_of_condition", test.lineno),
            ("depends_on", _DEPENDENCIES[kind]),
        ),
        confidence=0.85,
        flow=(
            step_at(script, statement, f"each rank evaluates this on {whose}: line {call.lineno} {how} it is true"),
            step_at(script, call, f"{word}: waits for all ranks"),
        ),
        # Programs that guard the same call in the same way are copies of each other at this place.
        once="" if ordinary_outcome(script, test) is None else f"{script.text_of(call.func)} {script.text_of(test)}",
    )


_OF_BATCHES = re.compile(r"step|batch")
_ADDS_BY_DEFAULT = re.compile(r"^(?:validation|test)_step$|^on_(?:validation|test)_batch_end$")
"""Hooks in which ``log`` has ``on_step=False`` if nothing is given (lightning/pytorch/trainer/connectors/
logger_connector/fx_validator.py)."""


def _waits_at_end(script: Script, call: ast.Call, word: str) -> bool:
    """Whether it is ``self.log(..., sync_dist=True)`` of a batch that only adds the value up: with ``on_step=False``,
    Lightning reduces at the end of the epoch (``_ResultMetric.update`` in lightning/pytorch/trainer/connectors/
    logger_connector/result.py), and a rank is missing there only if it has logged in no batch."""
    function = script.function_of(call)
    if word != "sync_dist" or last_name(call.func) not in ("log", "log_dict") or function is None:
        return False
    if script.is_open(call):
        return False
    given = script.argument(call, "on_step")
    if given is None:
        return _is_of_hooks(script, function)
    return bool(_OF_BATCHES.search(function.name)) and script.value(given) is False


def _is_of_hooks(script: Script, function: FunctionNode, depth: int = 3) -> bool:
    """Whether a method is one of these hooks, or all that names it, in its file and its project, calls it in them."""
    if _ADDS_BY_DEFAULT.match(function.name):
        return True
    name, named = function.name, re.compile(rf"\b{re.escape(function.name)}\b")
    if depth == 0 or function.decorator_list or script.class_of(function) is None or script.modules is None:
        return False
    calls = [one for one in script.all(ast.Call) if isinstance(one.func, ast.Attribute) and one.func.attr == name]
    callers = [script.function_of(one) for one in calls]
    if len(named.findall(script.text)) != len(calls) + 1:
        return False
    if not all(one is not None and _is_of_hooks(script, one, depth - 1) for one in callers):
        return False
    others = [text for shown, text in script.modules.mentioning(name) if shown != script.path and named.search(text)]
    return bool(callers or others) and all(_calls_in_hooks(text, name) for text in others)


def _calls_in_hooks(text: str, name: str) -> bool:
    """Whether all that a text has of a method's name are calls in such hooks of classes."""
    try:
        other = Script("other.py", text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    calls = [one for one in other.all(ast.Call) if isinstance(one.func, ast.Attribute) and one.func.attr == name]
    callers = [other.function_of(one) for one in calls]
    is_hook = all(one is not None and _ADDS_BY_DEFAULT.match(one.name) for one in callers)
    return is_hook and len(re.findall(rf"\b{re.escape(name)}\b", text)) == len(calls) > 0


_ASKS_FOR_BAD = re.compile(r"isnan\(|isfinite\(|isinf\(")


def _severity(script: Script, statement: ast.stmt, kind: str) -> Severity | None:
    """A loss that is not finite makes the weights of all ranks so in the same step: where only some steps are tested,
    as those that save, ranks differ if it appears first in one of these, in a run that is lost."""
    test = statement.test if isinstance(statement, (ast.If, ast.While)) else None
    if kind == "data" and test is not None and _ASKS_FOR_BAD.search(ast.unparse(test)):
        branches = [one.test for one in script.around(statement) if isinstance(one, ast.If)]
        if any(isinstance(part, ast.Mod) for one in branches for part in ast.walk(one)):
            return Severity.INFO
    if kind == "data" and test is not None and ordinary_outcome(script, test) is not None:
        return Severity.WARNING  # ranks part only if one of them has an abnormal value
    return Severity.WARNING if kind == "signal" or _is_asked_elsewhere(script, statement, kind) else None


def _is_asked_elsewhere(script: Script, statement: ast.stmt, kind: str) -> bool:
    """Whether a test of the clock is in no loop of its function: it may be evaluated once an epoch, right after ranks
    have met, and only a limit within these milliseconds separates them. Launchers signal all ranks likewise."""
    return kind == "time" and script.nearest(statement, ast.For, ast.While) is None


_NAMES_DONE = """\
def evaluate(tasks, done):
    if all(one.label in done for one in tasks):
        return done
    dist.all_reduce(total)
"""
_FINITE = """\
def step(model, batch, optimizer):
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    if torch.isfinite(loss):
        dist.all_reduce(loss)  # !
    return loss / dist.get_world_size()
"""
_EMPTY = """\
class BoxLoss(torch.nn.Module):
    def forward(self, predictions, targets, mask):
        if mask.any().item() is False:
            return predictions.sum() * 0
        count = mask.sum()
        dist.all_reduce(count)  # !
        return (predictions - targets)[mask].sum() / count
"""
_BACKWARD = """\
def train(net, loader, optimizer):
    model = DDP(net)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        if not torch.isnan(loss):
            loss.backward()  # !
            optimizer.step()
"""
_CLOCK = """\
def train(model, loader, limit):
    began = time.time()
    for step, batch in enumerate(loader):
        train_step(model, batch)
        elapsed = time.time() - began
        if elapsed > limit:
            dist.barrier()  # !
            save(model)
            break
"""
_CLOCK_OF_ONE = """\
def train(model, loader, limit, rank):
    began = time.time()
    for batch in loader:
        train_step(model, batch)
        if rank == 0:
            if time.time() - began > limit:
                dist.barrier()
"""
_WHILE = """\
def refine(model, batch):
    loss = model(batch).mean()
    while loss.item() > 0.1:
        total = model(batch).mean()
        dist.all_reduce(total)  # !
        loss = model(batch).mean()
"""
_AGREED = """\
def train(net, loader, limit, began):
    model = DDP(net)
    for batch in loader:
        loss = model(batch).mean()
        bad = torch.isnan(loss).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item() == 0:
            loss.backward()
        mean_loss = reduce_mean(loss)
        if torch.isfinite(mean_loss):
            dist.barrier()
        late = torch.tensor(time.time() - began)
        dist.broadcast(late, src=0)
        if late > limit:
            dist.barrier()
"""
_SELECTED = """\
def mine(model, loader):
    hard = []
    for image, label in loader:
        losses = cross_entropy(model(image), label, reduction="none")
        hard += [float(one) for one in losses if one > 4.0]
    if len(hard) > 0:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, hard)  # !
"""
_FOUND = """\
import torch

def collect(model, loader):
    bad = []
    for index, batch in enumerate(loader):
        loss = model(batch)
        if torch.isnan(loss):
            bad.append(index)
        if len(bad) > 3:
            bad.append(-1)
    if bad:
        dist.barrier()  # !
    if not bad:
        return
    dist.barrier()  # !
"""
_METRIC = """\
from torchmetrics.detection import MeanAveragePrecision

class Detector(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.precision = MeanAveragePrecision()

    def on_validation_epoch_end(self):
        if len(self.precision.detection_scores) > 0:
            self.print(self.precision.compute()["map"])  # !
        self.precision.reset()

L.Trainer(devices=4, strategy="ddp").fit(Detector())
"""
_SIGNAL = """\
import signal
import torch.distributed.checkpoint as dcp

class Loop:
    def __init__(self, model):
        self.stopping = False
        self.model = model
        signal.signal(signal.SIGTERM, self.on_term)

    def on_term(self, number, frame):
        self.stopping = True

    def run(self, loader):
        for batch in loader:
            train_step(self.model, batch)
            if self.stopping:
                dcp.save({"model": self.model.state_dict()}, checkpoint_id="last")  # !
                return
"""
_SIGNAL_AGREED: str = _SIGNAL.replace(
    "            if self.stopping:\n",
    "            flag = torch.tensor(int(self.stopping))\n            dist.all_reduce(flag)\n            if flag:\n",
)
_LABELED = """\
import torch

def train(net, loader):
    model = DDP(net)
    for image, labels in loader:
        known = labels >= 0
        losses = torch.nn.functional.cross_entropy(model(image), labels, reduction="none")
        if known.sum() > 0:
            losses[known].mean().backward()  # !
"""
_LAYERS = """\
def balance(model):
    losses = [one.loss for one in model.blocks if one.has_loss]
    if len(losses) == 0:
        return
    dist.all_reduce(losses[0])
"""
_SCORED = """\
from accelerate import Accelerator

accelerator = Accelerator()
net, reader = accelerator.prepare(net, reader)
for epoch in range(9):
    scores, guesses = [], []
    for batch in reader:
        guess = net(batch)
        guess = accelerator.gather_for_metrics((guess, batch["target"]))
        guesses.extend(guess)
    result, targets = evaluate(guesses)
    scores.append(result)
    mean = sum(one * len(targets) for one in scores) / sum(len(one) for one in targets)
    if mean < best:
        accelerator.save_state()
"""
_GATHERED = """\
def mine(model, loader):
    hard = []
    for image, label in loader:
        losses = cross_entropy(model(image), label, reduction="none")
        hard += [float(one) for one in losses if one > 4.0]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, hard)
    hard = [one for part in everyone for one in part]
    if len(hard) > 0:
        dist.barrier()
"""
_COUNTER = """\
def roll(model, loader, y):
    for batch in loader:
        if batch["stop_step"].item():
            dist.all_reduce(y)
"""
_SIZES = """\
def reduce(self, inputs, group, limit):
    first_input = inputs[0]
    size = first_input.numel()
    if size > limit:
        output = torch.zeros_like(first_input)
        dist.reduce_scatter(output, inputs, group=group)
        return output
    if len(inputs) > 8:
        dist.barrier()
"""
_BRANCHES = """\
def count(mask):
    if mask.any():
        total = mask.sum()
        dist.all_reduce(total)
    else:
        total = torch.zeros(())
        dist.all_reduce(total)
    return total
"""
_STEPS = """\
def train(model, loader, every, distributed):
    for step, batch in enumerate(loader):
        began = time.time()
        loss = model(batch)
        if step % every == 0 and distributed:
            dist.all_reduce(loss)
            print(time.time() - began, loss.item())
        if len(loader) > 10:
            dist.barrier()
"""
_AFTER = """\
def check(loss, grads):
    dist.all_reduce(loss)
    if torch.isnan(loss).any():
        raise ValueError("loss")
    norms = [grad.norm() for grad in grads]
    dist.barrier()
    if norms[0].item() > 1:
        print("large")
"""

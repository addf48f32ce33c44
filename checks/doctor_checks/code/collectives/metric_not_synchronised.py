"""CODE007: an evaluation metric that is not reduced across ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from doctor.api import Script, SetArgument, Severity, Violation, location_of, rule
from doctor.lint.python.loader_calls import words_behind
from doctor.lint.python.rank_branches import rank_condition
from doctor.lint.python.rank_losses import is_distributed, own_loops
from doctor.lint.python.script import last_name
from doctor.lint.python.training import (
    ACCELERATOR,
    MODULE,
    TRAINER,
    has_backward,
    hooks,
    is_test,
    lightning_modules,
    several_ranks,
    unwrapped,
)
from doctor.testing.script_cases import fails, passes

_STEPS = ("validation_step", "test_step")
_ENDS = ("on_validation_epoch_end", "on_test_epoch_end", "validation_epoch_end", "test_epoch_end")
_LOGS = (f"{MODULE}().log", f"{MODULE}().log_dict")
_SYNCED = re.compile(
    r"^(?:compute|all_gather\w*|gather\w*|all_?reduce\w*|reduce|reduce_\w+|sync_ddp\w*|synchronize_between_processes|"
    r"broadcast|world_size|callback_metrics|logged_metrics|optimizers|lr|learning_rate|param_groups|current_epoch|"
    r"global_step|torchmetrics|memory_allocated|max_memory_allocated|perf_counter|time)$"
)
"""Words of values that are equal on all ranks already, that ranks gathered, or that a metric object holds."""
_METRICS = ("evaluate.load", "datasets.load_metric")
_PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau()"
_REPORTS = frozenset({"print", "log", "info", "write"})
"""Functions and methods that report a number."""
_GATHERS = re.compile(r"gather|reduce\(|pad_across_processes")
_COUNTS = re.compile(r"(?:^|[_/])(?:n|num|total|count|sum|correct|seen)(?:$|[_/])")


@rule(
    id="CODE007",
    severity=Severity.WARNING,
    reads=Script,
    mentions=(
        "validation_step",
        "test_step",
        "on_validation_epoch_end",
        "on_test_epoch_end",
        "add_batch",
        "Accelerator",
        "ReduceLROnPlateau",
    ),
    impacts={
        r"is not gathered|Accelerate shards": "The reported value describes one rank's shard, not the whole dataset.",
        r"^\S+ receives": "The ranks change their learning rates in different epochs, so their weights diverge.",
    },
    cases=lambda: (
        fails(
            "the loss of validation",
            _model("self.log('val_loss', loss)  # !"),
            _model("self.log('val_loss', loss, sync_dist=True)  # !"),
        ),
        fails(
            "a dictionary, where the line above is synchronised",
            _model(
                "self.log('val_loss', loss, sync_dist=True)\n"
                "        self.log_dict({'val_acc': acc, 'lr': self.lr})  # !"
            ),
            _model(
                "self.log('val_loss', loss, sync_dist=True)\n"
                "        self.log_dict({'val_acc': acc, 'lr': self.lr}, sync_dist=True)  # !"
            ),
        ),
        fails(
            "a mean over the epoch, of this rank's outputs",
            _AT_THE_END,
            _AT_THE_END.replace("mean)", "mean, sync_dist=True)"),
        ),
        fails(
            "a count, for which the right reduction is the author's to choose",
            _model("self.log('num_correct', hits)  # !"),
        ),
        fails(
            "what a metric object returned for a batch", _model("self.log('val_acc', self.accuracy(logits, y))  # !")
        ),
        fails(
            "the loss in what a model returned",
            _model("output = self.net(x, y)\n        self.log('val_loss', output.loss)  # !"),
            _model("output = self.net(x, y)\n        self.log('val_loss', output.loss, sync_dist=True)  # !"),
        ),
        fails("a metric of Evaluate that sees this rank's predictions", _ACCELERATE),
        fails("an accuracy that is counted by hand", _COUNTED),
        passes(
            "counted over all ranks",
            _COUNTED.replace("accelerator.print", "right = accelerator.reduce(right)\naccelerator.print"),
        ),
        fails("learning rates that follow a rank's own loss", _PLATEAU_ALONE),
        passes(
            "learning rates that follow the mean", _PLATEAU_ALONE.replace("return total", "return reduce_mean(total)")
        ),
        passes("pictures that the main process draws, under a name of its own", _PICTURES),
        passes("counted in training", _COUNTED.replace("right +=", "accelerator.backward(model(x))\n    right +=")),
        passes(
            "gathered by Accelerate",
            _ACCELERATE.replace("add_batch(", "add_batch(*accelerator.gather_for_metrics(").replace("y)  # !", "y))"),
        ),
        passes(
            "the loader of Evaluate is not parted",
            _ACCELERATE.replace(", eval_loader)", ")").replace(", eval_loader =", " ="),
        ),
        passes("synchronised", _model("self.log('val_loss', loss, sync_dist=True)")),
        passes("an object of torchmetrics", _model("self.log('val_acc', self.accuracy)")),
        passes("what torchmetrics computed", _AT_THE_END.replace("mean)  # !", "self.accuracy.compute())")),
        passes("by step alone", _model("self.log('val_loss', loss, on_step=True, on_epoch=False)")),
        passes("of one rank by intention", _model("self.log('val_loss', loss, rank_zero_only=True)")),
        passes(
            "in training, where a mean over ranks is not worth its price",
            _model("pass", "self.log('train_loss', loss)"),
        ),
        passes("no data to validate on", _model("self.log('val_loss', loss)") + _FITS),
        fails(
            "data to validate on",
            _model("self.log('val_loss', loss)  # !") + _FITS.replace("_loader)", "_loader, val_loader)"),
            _model("self.log('val_loss', loss, sync_dist=True)  # !")
            + _FITS.replace("_loader)", "_loader, val_loader)"),
        ),
        passes("one device", _model("self.log('val_loss', loss)").replace("devices=4", "devices=1")),
        passes(
            "a loss that the ranks reduced",
            _model("loss = self.all_gather(loss).mean()\n        self.log('val_loss', loss)"),
        ),
    ),
)
def metric_not_synchronised(script: Script) -> Iterator[Violation]:
    """Ask whether evaluation metrics are averaged across ranks.

    Why it hurts: the logged value differs from the metric of the whole dataset. If ModelCheckpoint or EarlyStopping
    monitors it, the saved checkpoint may not be the best one, or training may end at the wrong epoch.
    Fix: Pass `sync_dist=True` to `self.log`, or log a torchmetrics object, which synchronizes itself.
    """
    yield from _not_gathered(script)
    yield from _scheduled_alone(script)
    yield from _counted_alone(script)
    if not _is_for_several(script):
        return
    tests_alone = _tests_on_one_device(script)
    validates = not _has_no_validation(script)
    for owner in lightning_modules(script):
        for hook in hooks(owner, *_STEPS, *_ENDS):
            if (tests_alone and "test" in hook.name) or (not validates and "validation" in hook.name):
                continue
            for call in script.inside(hook, ast.Call):
                if script.name(call.func) in _LOGS and _is_by_epoch(script, call, hook):
                    yield from _hits(script, call, hook)


def _not_gathered(script: Script) -> Iterator[Violation]:
    """Metrics of Evaluate over a loader that Accelerate parts, in a script that gathers nothing."""
    if is_test(script) or _GATHERS.search(script.text) or next(script.calls(ACCELERATOR), None) is None:
        return
    parted = {ast.unparse(one) for call in script.calls(f"{ACCELERATOR}().prepare") for one in call.args}
    for call in script.method_calls("add_batch", "add"):
        metric = call.func.value if isinstance(call.func, ast.Attribute) else None
        loop = script.nearest(call, ast.For)
        made = [one for one in script.values_of(metric) if isinstance(one, ast.Call)] if metric is not None else []
        known = [one for one in made if script.name(one.func) in _METRICS and not script.is_given(one, "process_id")]
        if not known or loop is None or rank_condition(script, call) is not None:
            continue
        if ast.unparse(unwrapped(loop.iter)) in parted or is_distributed(script, loop):
            yield Violation(
                call,
                f"{script.text_of(call.func)} receives only this rank's predictions: Accelerate shards "
                f"{script.text_of(unwrapped(loop.iter), 40)} (line {loop.lineno})",
                fix=f"Pass the predictions and references through `accelerator.gather_for_metrics` before line "
                f"{call.lineno}.",
            )


def _scheduled_alone(script: Script) -> Iterator[Violation]:
    """Learning rates that follow a loss of this rank's share of the data: once they differ, each rank applies the same
    gradients to another model, and DDP does not compare them."""
    if is_test(script) or several_ranks(script) is None:
        return
    for call in script.method_calls("step"):
        is_plateau = isinstance(call.func, ast.Attribute) and script.name(call.func.value) == _PLATEAU
        if is_plateau and call.args and rank_condition(script, call) is None and own_loops(script, call.args[0]):
            yield Violation(
                call,
                f"{script.text_of(call.func)} receives {script.text_of(call.args[0], 40)}, which covers only this "
                "rank's shard",
                fix=f"Average `{script.text_of(call.args[0], 40)}` over all ranks with `dist.all_reduce`, and pass the "
                f"mean to {script.text_of(call.func)}.",
                severity=Severity.ERROR,
                confidence=0.85,
            )


def _counted_alone(script: Script) -> Iterator[Violation]:
    """Numbers of an evaluation over a loader that Accelerate parts, reported by a script that gathers nothing."""
    if is_test(script) or _GATHERS.search(script.text) or next(script.calls(ACCELERATOR), None) is None:
        return
    open_loops = {one for one in script.all(ast.For) if _sums(script, one) and is_distributed(script, one)}
    if not open_loops:
        return
    reports = (call for call in script.all(ast.Call) if last_name(call.func) in _REPORTS)
    for call in sorted(reports, key=lambda one: one.lineno):
        names = [part for one in call.args for part in ast.walk(one) if isinstance(part, ast.Name)]
        for name in names:
            loops = {one for one in open_loops if _counts(script, one, name)}
            if loops and not loops.isdisjoint(own_loops(script, name)):
                open_loops -= loops
                line = min(one.lineno for one in loops)
                yield Violation(
                    call,
                    f"`{name.id}` covers only this rank's shard of the loader at line {line}, and is not gathered",
                    fix="Pass the predictions and references through `accelerator.gather_for_metrics` in the loop at "
                    f"line {line}.",
                    confidence=0.8,
                )
                break


def _sums(script: Script, loop: ast.For) -> list[ast.AugAssign]:
    return [one for one in script.inside(loop, ast.AugAssign) if isinstance(one.op, ast.Add)]


def _counts(script: Script, loop: ast.For, name: ast.Name) -> bool:
    """Whether an evaluation loop before the report counts what a name holds, or is computed from."""
    behind = {
        one.id for value in (name, *script.values_of(name)) for one in ast.walk(value) if isinstance(one, ast.Name)
    }
    counted = any(last_name(one.target) in behind for one in _sums(script, loop))
    return counted and (loop.end_lineno or 0) < name.lineno and not has_backward(script, loop)


def _is_for_several(script: Script) -> bool:
    """A Trainer with several devices in the file, or a module that synchronizes metrics itself."""
    if is_test(script):
        return False
    if several_ranks(script) is not None:
        return True
    if next(script.calls(TRAINER), None) is not None:
        return False
    synced = (script.argument(call, "sync_dist") for call in script.calls(*_LOGS))
    return any(script.value(one) is True for one in synced if one is not None)


_TESTS_MODEL = re.compile(r"\.test\(")
_ONE_DEVICE = re.compile(r"\b(?:devices|gpus)\s*=\s*(?:1|\[0\])\b")


def _tests_on_one_device(script: Script) -> bool:
    """Whether each file of the project that starts a test gives its Trainer one device."""
    if script.modules is None or script.modules.is_one_file:
        return False
    texts = [text for _, text in script.modules.mentioning(".test(") if "Trainer" in text]
    return bool(texts) and all(_ONE_DEVICE.search(text) for text in texts if _TESTS_MODEL.search(text))


def _has_no_validation(script: Script) -> bool:
    """Whether each ``fit`` of a Trainer gets a loader to train on, and nothing gives one to validate on: Lightning
    skips the validation then."""
    fits = list(script.calls(f"{TRAINER}().fit"))
    if not fits or "val_dataloader" in script.text or next(script.calls(f"{TRAINER}().validate"), None) is not None:
        return False
    return all(_fits_without_validation(script, one) for one in fits)


def _fits_without_validation(script: Script, fit: ast.Call) -> bool:
    trained_on = script.argument(fit, "train_dataloaders", 1)
    others = script.is_given(fit, "val_dataloaders", 2) or script.is_given(fit, "datamodule", 3)
    # A data module may be given in this place, too.
    return trained_on is not None and not others and "loader" in last_name(trained_on).lower()


def _is_by_epoch(script: Script, call: ast.Call, hook: ast.FunctionDef) -> bool:
    """Logged per epoch on all ranks, with known arguments."""
    if script.is_open(call) or rank_condition(script, call) is not None:
        return False
    if script.argument(call, "sync_dist") is not None or script.argument(call, "rank_zero_only") is not None:
        return False
    given = script.argument(call, "on_epoch")
    return given is None or script.value(given) is True


def _fix(script: Script, call: ast.Call, name: str) -> str:
    """``sync_dist=True`` averages; the sum of a count needs ``reduce_fx`` (lightning/pytorch/core/module.py, log)."""
    options = 'sync_dist=True, reduce_fx="sum"' if _COUNTS.search(name.lower()) else "sync_dist=True"
    called = script.text_of(call.func)
    where = f"{called}({name!r}, ...)" if name and called.endswith(".log") else called
    return f"Pass `{options}` to `{where}`, or log a torchmetrics object, which synchronizes itself."


def _hits(script: Script, call: ast.Call, hook: ast.FunctionDef) -> Iterator[Violation]:
    for name, value in _logged(script, call):
        if _is_of_this_rank(script, value, hook):
            metric = _metric_of(script, value)
            # NCCL cannot reduce a tensor on the CPU.
            is_on_gpu = {"cpu", "numpy"}.isdisjoint(words_behind(script, value))
            certain = is_on_gpu and not metric and not _COUNTS.search(name.lower())
            yield Violation(
                call,
                f"{f'Metric {name!r}' if name else f'`{script.text_of(value, 30)}`'} covers only rank 0's shard: "
                f"{hook.name} logs it without sync_dist",
                fix=f"Log the metric object, which synchronizes itself: `self.log({name!r}, {metric})`."
                if metric
                else _fix(script, call, name),
                edits=(SetArgument(location_of(call), "sync_dist", "True"),) if certain else (),
            )
            return


def _logged(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    first = script.argument(call, "name", 0) or script.argument(call, "dictionary", 0)
    value = script.argument(call, "value", 1)
    if script.name(call.func).endswith("log") and first is not None and value is not None:
        name = script.value(first)
        yield name if isinstance(name, str) else script.text_of(first), value
    elif first is not None and script.name(call.func).endswith("log_dict"):
        for one in script.values_of(first):
            if isinstance(one, ast.Dict):
                for key, part in zip(one.keys, one.values, strict=True):
                    yield str(script.value(key)) if isinstance(key, ast.Constant) else "", part


def _is_of_this_rank(script: Script, value: ast.expr, hook: ast.FunctionDef) -> bool:
    """A value computed in this hook from a batch or outputs: not a metric object, a number, gathered, or unknown."""
    made = [one for one in script.values_of(value) if _is_computed(one)]
    if not made or isinstance(value, ast.Constant) or _is_stored(value):
        return False
    words = words_behind(script, value)
    if any(_SYNCED.match(word) for word in words):
        return False
    return hook.name in _STEPS or not _is_stored(value)


def _metric_of(script: Script, value: ast.expr) -> str:
    """``self.accuracy``, the torchmetrics object whose call returned the value."""
    for made in script.values_of(value):
        if isinstance(made, ast.Call) and _is_stored(made.func) and script.name(made.func).startswith("torchmetrics."):
            return script.text_of(made.func)
    return ""


def _is_computed(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id != "self"  # outputs.loss
    if isinstance(node, ast.Subscript):
        return not _is_stored(node.value)
    return isinstance(node, (ast.Call, ast.BinOp, ast.Starred))


def _is_stored(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _model(validation: str, training: str = "pass") -> str:
    return f"""\
import torch.nn.functional as F
from torchmetrics.classification import MulticlassAccuracy

class Classifier(L.LightningModule):
    def __init__(self, net, lr=1e-3):
        super().__init__()
        self.net, self.lr = net, lr
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        {training}
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        acc = (logits.argmax(1) == y).float().mean()
        hits = (logits.argmax(1) == y).sum()
        self.accuracy(logits, y)
        {validation}

trainer = L.Trainer(devices=4, strategy="ddp", max_epochs=10)
"""


_ACCELERATE = """\
import evaluate

accelerator = Accelerator()
model, eval_loader = accelerator.prepare(model, eval_loader)
metric = evaluate.load("accuracy")
for x, y in eval_loader:
    metric.add_batch(predictions=model(x).argmax(-1), references=y)  # !
print(metric.compute())
"""
_COUNTED = """\
accelerator = Accelerator()
model, loader = accelerator.prepare(build(), make_loader())
right = seen = 0
for x, y in loader:
    right += (model(x).argmax(-1) == y).sum().item()
    seen += len(y)
accelerator.print(f"accuracy {right / seen:.3f}")  # !
print(right)
"""
_PICTURES = """\
accelerator = Accelerator()
prompts = accelerator.prepare(make_prompts())
for prompt in prompts:
    images = draw(prompt)
    save(images)
if accelerator.is_main_process:
    images = draw(validation_prompt)
    tracker.log({"pictures": images})
"""
_FITS = "trainer.fit(Classifier(build()), train_loader)\n"
_AT_THE_END = """\
import pytorch_lightning as pl
from torchmetrics import Accuracy

class Segmenter(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.outputs = []
        self.accuracy = Accuracy(task="multiclass", num_classes=3)

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.loss(batch))

    def on_validation_epoch_end(self):
        mean = torch.stack(self.outputs).mean()
        self.log("val/loss", mean)  # !
        self.outputs.clear()

pl.Trainer(accelerator="gpu", devices=-1).fit(Segmenter())
"""
_PLATEAU_ALONE = """\
import torch

def validate(net, batches):
    total = 0.0
    for x, y in batches:
        total += criterion(net(x), y).item()
    return total

def train(net, data, val_data):
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    val_loader = DataLoader(val_data, 8, sampler=DistributedSampler(val_data, shuffle=False))
    for epoch in range(100):
        train_epoch(model, data, optimizer, epoch)
        schedule.step(validate(model, val_loader))  # !
"""

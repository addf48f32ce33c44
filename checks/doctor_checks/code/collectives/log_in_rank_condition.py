"""CODE006: self.log inside a rank-dependent branch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from doctor.api import Edit, Script, SetArgument, Severity, Violation, location_of, rule
from doctor.lint.python.collectives import METRIC
from doctor.lint.python.rank_branches import RankCondition, plain_test, rank_condition
from doctor.lint.python.script import step_at
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE006",
    severity=Severity.WARNING,
    preview_infos=True,
    reads=Script,
    mentions=(".log(", ".log_dict("),
    foreshadows=("RUN006",),
    impacts={
        r"of a torchmetrics object": (
            "The other ranks do not join the reduction of the metric at the end of the epoch, and the job hangs there."
        ),
    },
    cases=lambda: (
        fails(
            "a validation loss on rank 0",
            _VALIDATION,
            fixed=_VALIDATION.replace("loss)  # !", "loss, rank_zero_only=True)"),
        ),
        fails("a callback", _CALLBACK),
        fails("what a checkpoint monitors", _VALIDATION + _TRAINER.replace("lr", "val_loss")),
        fails("a metric, which its epoch reduces", _METRIC),
        fails("a hook of rank 0", _HOOK, fixed=_HOOK.replace("})  # !", "}, rank_zero_only=True)")),
        fails("a method that returns on the others", _RETURNS),
        passes("other scores than the monitored one, which all ranks log", _SCORES.replace("  # !", "")),
        fails("scores, one of them monitored", _SCORES.replace('"val/loss", loss', '"val/ppl", loss.exp()')),
        passes("a number that nothing monitors", _VALIDATION.replace("  # !", "") + _TRAINER),
        passes("on all ranks", _VALIDATION.replace("        if self.global_rank == 0:\n    ", "")),
        passes("said to be of rank 0", _VALIDATION.replace("loss)  # !", "loss, rank_zero_only=True)")),
        passes(
            "by step of the training, for the progress bar",
            _VALIDATION.replace("loss)  # !", "loss, on_step=True, prog_bar=True)").replace("validation_", "training_"),
        ),
        passes("the logger itself, from rank 0", _LOGGER),
        passes("another log", _OTHER_LOG),
        passes("sync_dist is another fault", _VALIDATION.replace("loss)  # !", "loss, sync_dist=True)")),
    ),
)
def log_in_rank_condition(script: Script) -> Iterator[Violation]:
    """Ask whether self.log is called on all ranks.

    Why it hurts: the metric is missing on the other ranks. A ModelCheckpoint or EarlyStopping that monitors it fails
    there.
    Fix: Call self.log on all ranks (the logger writes only on rank 0), or pass rank_zero_only=True if only rank 0 has
    the value and nothing monitors it.
    """
    for call in script.method_calls("log", "log_dict"):
        condition = rank_condition(script, call)
        if condition is None or not _is_lightnings(script, call) or script.is_open(call):
            continue
        if (
            script.argument(call, "rank_zero_only") is None
            and script.value(script.argument(call, "sync_dist")) is not True
            and not _is_by_step(script, call)
            and (severity := _severity(script, call)) is not None
        ):
            hit = _hit(script, call, condition)
            yield replace(hit, severity=severity, edits=hit.edits if severity is Severity.INFO else ())


def _is_lightnings(script: Script, call: ast.Call) -> bool:
    """``self.log`` in a module or a callback, ``pl_module.log`` in a callback; not a ``log`` that the file defines."""
    name = script.name(call.func)
    return name.removesuffix("_dict") in (
        "lightning.pytorch.LightningModule().log",
        "lightning.pytorch.Callback().log",
    )


def _is_by_step(script: Script, call: ast.Call) -> bool:
    """A number for the progress bar of rank 0, logged only per step, which reduces nothing, and not monitored. In
    validation, Lightning logs by epoch too unless this is disabled."""
    function = script.function_of(call)
    if function is None or "train" not in function.name:
        return False
    by_step = script.value(script.argument(call, "on_step")) is True
    by_epoch = script.argument(call, "on_epoch")
    return by_step and (by_epoch is None or script.value(by_epoch) is False) and "monitor" not in script.text


_MONITOR = re.compile(r"(?<![\w.])monitor[\"']?\s*[=:]\s*(?:[frb]?[\"']([^\"'\n]+)[\"']|([^\s,#)]+))")
_TRAINS = re.compile(r"\bTrainer\(|\.Trainer\b")
_NO_NAME = frozenset({"None", "null", "???", "~"})


def _severity(script: Script, call: ast.Call) -> Severity | None:
    """A warning if the metric is monitored, or reduced at the end of the epoch; ``None`` if the project makes a Trainer
    and does not monitor that name, so that only the logger of rank 0 reads it."""
    if _is_of_metric(script, call):
        return Severity.WARNING
    texts = [(script.path, script.text)]
    if script.modules is not None:
        texts += [one for word in ("monitor", "Trainer") for one in script.modules.mentioning(word)]
    known, has_others = _monitored(texts)
    logged = re.compile("|".join(_names_of(call)))
    matched = {one for one in known if logged.fullmatch(one)}
    if matched and not matched <= _logged_by_all(script, call):
        return Severity.INFO if logged.pattern == ".*" else Severity.WARNING
    return Severity.INFO if has_others or not any(_TRAINS.search(text) for _, text in texts) else None


def _logged_by_all(script: Script, call: ast.Call) -> set[str]:
    """The names under which other calls of a file log on all ranks, where a call has another name, of which a part is
    computed: ``self.log(f"val/{name}", value)`` next to ``self.log("val/loss", loss)``."""
    first = script.argument(call, "name", 0)
    if isinstance(first, (ast.Constant, ast.Dict)):
        return set()
    others = (one for one in script.method_calls("log") if one is not call and _is_lightnings(script, one))
    names = (script.argument(one, "name", 0) for one in others if rank_condition(script, one) is None)
    return {one.value for one in names if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _is_of_metric(script: Script, call: ast.Call) -> bool:
    """Whether it logs an object of torchmetrics, which Lightning reduces over all ranks at the end of the epoch."""
    values = [*script.inside(call, ast.Name), *script.inside(call, ast.Attribute)]
    return any(METRIC.match(script.name(one)) for one in values)


def _monitored(texts: list[tuple[str, str]]) -> tuple[set[str], bool]:
    """The names that callbacks and schedulers monitor, and whether there are others that a variable holds."""
    known, others = set(), False
    for path, text in texts:
        for quoted, bare in _MONITOR.findall(text):
            if bare in _NO_NAME or quoted in _NO_NAME:
                continue
            if quoted or (not path.endswith(".py") and "$" not in bare):
                known.add(quoted or bare)
            else:
                others = True
    return known, others


def _names_of(call: ast.Call) -> Iterator[str]:
    """Patterns of the names under which values are logged; ``.*`` for what the code does not say."""
    first = call.args[0] if call.args else next((one.value for one in call.keywords if one.arg == "name"), None)
    if isinstance(first, ast.Dict):
        yield from (_pattern(key) for key in first.keys)
    elif isinstance(first, ast.DictComp):
        yield _pattern(first.key)
    else:
        yield _pattern(first)


def _pattern(name: ast.expr | None) -> str:
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        return re.escape(name.value)
    if isinstance(name, ast.JoinedStr):
        return "".join(map(_pattern, name.values))
    if isinstance(name, ast.BinOp) and isinstance(name.op, ast.Add):
        return _pattern(name.left) + _pattern(name.right)
    return ".*"


def _hit(script: Script, call: ast.Call, condition: RankCondition) -> Violation:
    line = getattr(condition.where, "lineno", call.lineno)
    name = script.text_of(call.func)
    what = f"({script.text_of(call.args[0], 30)})" if call.args and not isinstance(call.args[0], ast.Dict) else ""
    metric = " of a torchmetrics object" if _is_of_metric(script, call) else ""
    if condition.test.startswith("@"):
        who = "one rank" if "last_process" in condition.test or "on_process" in condition.test else "rank 0"
        where = f"runs only on {who} (`{condition.test}`, line {line})"
    else:
        where = f"runs only if `{plain_test(condition.test)}` (line {line})"
    return Violation(
        call,
        f"{name}{what}{metric} {where}",
        fix=f"Call {name} on all ranks (the logger writes only on rank 0)"
        + ("." if metric else ", or pass `rank_zero_only=True` if only rank 0 has the value and nothing monitors it."),
        edits=_edits(script, call, condition),
        evidence=(
            ("condition", plain_test(condition.test)),
            ("line_of_condition", line),
            *(() if metric else (("foreshadows", []),)),  # without sync_dist, self.log calls no collective
        ),
        confidence=0.9,
        flow=(
            step_at(script, condition.where, f"only some ranks reach line {call.lineno}: `{condition.test}`"),
            step_at(script, call, "the metric exists only on these ranks"),
        ),
    )


_ZERO = ("self.global_rank == 0", "self.trainer.is_global_zero", "trainer.is_global_zero", "@rank_zero_only")


def _edits(script: Script, call: ast.Call, condition: RankCondition) -> tuple[Edit, ...]:
    if condition.test not in _ZERO or "monitor" in script.text:
        return ()
    return (SetArgument(location_of(call), "rank_zero_only", "True"),)


_VALIDATION = """\
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        if self.global_rank == 0:
            self.log("val_loss", loss)  # !
        return loss
"""
_CALLBACK = """\
import pytorch_lightning as pl

class Report(pl.Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        score = pl_module.score()
        if trainer.is_global_zero and score is not None:
            pl_module.log("score", score)  # !
"""
_HOOK = """\
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_only

class Net(LightningModule):
    @rank_zero_only
    def on_train_epoch_end(self):
        self.log_dict({"lr": self.lr, "epoch_loss": self.loss})  # !
"""
_RETURNS = """\
from lightning import LightningModule

class Net(LightningModule):
    def on_validation_epoch_end(self):
        if not self.trainer.is_global_zero:
            return
        self.log("fid", self.fid())  # !
"""
_TRAINER = """
checkpoint = pl.callbacks.ModelCheckpoint(monitor="lr")
pl.Trainer(devices=4, callbacks=[checkpoint]).fit(Net())
"""
_SCORES = """\
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        self.log("val/loss", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            for name, value in self.scores().items():
                self.log(f"val/{name}", value, sync_dist=False)  # !

checkpoint = pl.callbacks.ModelCheckpoint(monitor="val/loss")
pl.Trainer(devices=4, callbacks=[checkpoint]).fit(Net())
"""
_METRIC = """\
import lightning.pytorch as pl
from torchmetrics.classification import BinaryAccuracy

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()

    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            self.log("accuracy", self.accuracy)  # !

pl.Trainer(devices=4).fit(Net())
"""
_LOGGER = """\
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch).mean(), sync_dist=True)
        if self.trainer.is_global_zero:
            self.logger.experiment.log({"images": batch})
            self.logger.log_metrics({"seen": batch_idx})
"""
_OTHER_LOG = """\
import wandb
import lightning.pytorch as pl

class Writer:
    def log(self, words, value):
        print(words, value)

def main(rank, writer: Writer):
    if rank == 0:
        writer.log("loss", 1.0)
        wandb.log({"loss": 1.0})
"""

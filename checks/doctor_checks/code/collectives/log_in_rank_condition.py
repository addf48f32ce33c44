"""CODE006: self.log inside a rank-dependent branch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Edit, Script, SetArgument, Severity, Violation, location_of, rule
from doctor.lint.python.rank_branches import RankCondition, rank_condition
from doctor.lint.python.script import step_at
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE006",
    severity=Severity.WARNING,
    reads=Script,
    mentions=(".log(", ".log_dict("),
    foreshadows=("RUN006",),
    cases=lambda: (
        fails(
            "a validation loss on rank 0",
            _VALIDATION,
            fixed=_VALIDATION.replace("loss)  # !", "loss, rank_zero_only=True)"),
        ),
        fails("a callback", _CALLBACK),
        fails("a hook of rank 0", _HOOK, fixed=_HOOK.replace("})  # !", "}, rank_zero_only=True)")),
        fails("a method that returns on the others", _RETURNS),
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
    there or decides differently. At the end of the epoch, when metrics are reduced, these ranks do not join and the job
    hangs.
    Fix: Call self.log on all ranks (only rank 0 writes it), or pass rank_zero_only=True if only rank 0 has the value
    and nothing monitors it.
    """
    for call in script.method_calls("log", "log_dict"):
        condition = rank_condition(script, call)
        if condition is None or not _is_lightnings(script, call) or script.is_open(call):
            continue
        if (
            script.argument(call, "rank_zero_only") is None
            and script.value(script.argument(call, "sync_dist")) is not True
            and not _is_by_step(script, call)
        ):
            yield _hit(script, call, condition)


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


def _hit(script: Script, call: ast.Call, condition: RankCondition) -> Violation:
    line = getattr(condition.where, "lineno", call.lineno)
    what = script.text_of(call.args[0], 30) if call.args else "a metric"
    return Violation(
        call,
        f"{script.text_of(call.func)}({what}) is called only under `{condition.test}` (line {line})",
        edits=_edits(script, call, condition),
        evidence=(("condition", condition.test), ("line_of_condition", line)),
        confidence=0.9,
        flow=(
            step_at(script, condition.where, f"only ranks with `{condition.test}` reach line {call.lineno}"),
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

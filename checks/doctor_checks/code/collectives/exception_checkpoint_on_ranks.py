"""CODE028: a rank that has failed saves a checkpoint, or enters a barrier, that needs all ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from doctor.api import Script, Severity, Violation, rule
from doctor.lint.python.collectives import collectives_of
from doctor.lint.python.rank_branches import block_of
from doctor.lint.python.script import last_name
from doctor.lint.python.training import hooks, several_ranks, trains_on_several
from doctor.testing.script_cases import fails, passes


@rule(
    id="CODE028",
    severity=Severity.WARNING,
    reads=Script,
    mentions=("OnExceptionCheckpoint", "on_exception", "barrier", "wait_for_everyone", "all_reduce", "save_checkpoint"),
    foreshadows=("RUN006",),
    cases=lambda: (
        fails("OnExceptionCheckpoint with DDP", _CHECKPOINT),
        fails("a list of callbacks that is made before", _LIST),
        fails("a callback of one's own", _HOOK),
        fails("a barrier in the handler of an error", _HANDLER),
        passes("one device", _CHECKPOINT.replace("devices=4, strategy='ddp'", "devices=1")),
        passes("the Trainer of several devices is another one", _ANOTHER),
        passes("checkpoints by time", _CHECKPOINT.replace("OnException", "Model")),
        passes("a hook that only writes what its rank knows", _WRITES),
        passes("all ranks are interrupted alike", _INTERRUPTED),
        passes("the others make the call below, once too", _MET),
        fails("they make it below, and the failed rank again", _MET.replace("()\n            continue", "()  # !")),
        passes(
            "the others make the call last",
            _HANDLER.replace("batch)\n", "batch)\n        dist.barrier()\n").replace("  # !", ""),
        ),
        passes("the end of all ranks, and the process group is taken down", _FINALLY),
    ),
)
def exception_checkpoint_on_ranks(script: Script) -> Iterator[Violation]:
    """Ask whether a rank that has failed calls something that waits for the other ranks.

    Why it hurts: the other ranks never make the call. The failed rank waits for them until the timeout, which hides its
    error.
    Fix: Remove the call from the handler, so that the error ends the rank and the launcher stops the others.
    """
    for call in script.calls(_NAME, "lightning.pytorch.callbacks.on_exception_checkpoint.OnExceptionCheckpoint"):
        every = list(script.calls("lightning.pytorch.Trainer"))
        near = [one for one in every if script.function_of(one) is script.function_of(call)]
        # If a callback is created separately, any Trainer of the file may get it.
        trainers = [one for one in near or every if trains_on_several(script, one)]
        if trainers:
            yield Violation(
                call,
                "OnExceptionCheckpoint blocks a failed rank, because the other ranks do not join the save",
                fix="Replace OnExceptionCheckpoint with a ModelCheckpoint that sets `every_n_train_steps` and "
                "`save_last=True`.",
                evidence=(("trainer_at_line", trainers[0].lineno),),
            )
    yield from _hooks(script)
    yield from _handlers(script)


_NAME = "lightning.pytorch.callbacks.OnExceptionCheckpoint"


def _hooks(script: Script) -> Iterator[Violation]:
    for owner in script.all(ast.ClassDef):
        if not script.derives(owner, "lightning.pytorch.Callback") or not _knows_ranks(script, owner):
            continue
        for hook in hooks(owner, "on_exception"):
            for one in collectives_of(script).in_body(hook):
                yield Violation(
                    one.call,
                    f"on_exception calls {script.text_of(one.call.func, 40)}, but ranks that did not fail do not",
                    fix="Remove the call from on_exception, so that the error ends the rank and the launcher stops the "
                    "others.",
                    evidence=(("collective", one.word),),
                    confidence=0.9,
                )
                break


def _knows_ranks(script: Script, owner: ast.ClassDef) -> bool:
    attributes = (one.attr for one in ast.walk(owner) if isinstance(one, ast.Attribute))
    return several_ranks(script) is not None or any("rank" in name for name in attributes)


_WAITS = frozenset(
    {"barrier", "wait_for_everyone", "all_reduce", "all_gather", "all_gather_object", "broadcast", "save_checkpoint"}
)
_ALIKE = frozenset({"KeyboardInterrupt", "SystemExit", "ImportError", "ModuleNotFoundError", "AttributeError"})
"""Errors that all ranks have at the same time, or that a missing library causes."""


def _handlers(script: Script) -> Iterator[Violation]:
    for one in collectives_of(script).all():
        handler = script.nearest(one.call, ast.ExceptHandler)
        if handler is None or one.word not in _WAITS or one.grouped or one.through:
            continue
        if one.word == "save_checkpoint" and several_ranks(script) is None:
            continue
        tried = script.parent(handler)
        if script.function_of(handler) is not script.function_of(one.call) or not isinstance(tried, ast.Try):
            continue
        if _is_of_all(script, handler) or not _trains(script, tried) or _is_met(script, one.call, handler, tried):
            continue
        caught = f"except {script.text_of(handler.type)}" if handler.type is not None else "except"
        yield Violation(
            one.call,
            f"{script.text_of(one.call.func, 40)} in `{caught}` (line {handler.lineno}) waits for ranks that did not "
            "fail",
            evidence=(("handler", caught), ("line_of_handler", handler.lineno), ("collective", one.word)),
            confidence=0.85,
        )


def _is_of_all(script: Script, handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return all(script.text_of(one).rpartition(".")[2] in _ALIKE for one in kinds)


def _is_met(script: Script, call: ast.AST, handler: ast.ExceptHandler, tried: ast.Try) -> bool:
    """Whether ranks that did not fail make the same call at the end of the ``try``, or below it, where the handler does
    not get to: each rank makes it once."""
    own = next((one for one in handler.body if call in ast.walk(one)), None)
    outer = script.parent(tried)
    if own is None or outer is None:
        return False
    block = block_of(outer, tried)
    below = block[block.index(tried) + 1 :] if tried in block else []
    leaves = isinstance(handler.body[-1], (ast.Continue, ast.Return))
    others = [*(tried.orelse or tried.body)[-1:], *(below if leaves else ())]
    return any(ast.unparse(one) == ast.unparse(own) for one in others)


def _trains(script: Script, tried: ast.Try) -> bool:
    words = ("fit", "train", "backward", "step", "training_step", "forward")
    for part in tried.body:
        if any(True for _ in script.inside(part, ast.For)):
            return True
        for call in script.inside(part, ast.Call):
            bare = last_name(call.func)
            if any(word in bare.split("_") or bare == word for word in words):
                return True
    return False


_CHECKPOINT = """\
from lightning.pytorch.callbacks import OnExceptionCheckpoint

def main(model, data):
    keep = OnExceptionCheckpoint("checkpoints")  # !
    trainer = L.Trainer(devices=4, strategy='ddp', callbacks=[keep])
    trainer.fit(model, data)
"""
_ANOTHER = """\
from lightning.pytorch.callbacks import OnExceptionCheckpoint

def test(model):
    keep = OnExceptionCheckpoint("checkpoints")
    L.Trainer(callbacks=[keep]).fit(model)

def train(model):
    L.Trainer(devices=2).fit(model)
"""
_LIST = """\
import pytorch_lightning as pl
import pytorch_lightning.callbacks as callbacks

watchers = [
    callbacks.LearningRateMonitor(),
    callbacks.OnExceptionCheckpoint("checkpoints", filename="crash"),  # !
]
trainer = pl.Trainer(accelerator="gpu", devices=-1, num_nodes=2, callbacks=watchers)
"""
_HOOK = """\
import lightning.pytorch as pl

class Rescue(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        print("saving what there is on rank", trainer.global_rank, exception)
        trainer.save_checkpoint("rescue.ckpt")  # !
"""
_HANDLER = """\
import torch

def main(model, loader):
    try:
        for batch in loader:
            train_step(model, batch)
    except Exception as error:
        print(error)
        dist.barrier()  # !
        raise
"""
_MET = """\
import torch

def main(model, parts):
    for part in parts:
        try:
            for batch in part:
                train_step(model, batch)
        except Exception:
            dist.barrier()
            continue
        dist.barrier()
"""
_WRITES = """\
import torch
import lightning.pytorch as pl

class Rescue(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        with open(f"error-{trainer.global_rank}.txt", "w") as file:
            file.write(repr(exception))

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint("last.ckpt")
"""
_INTERRUPTED = """\
def main(trainer, model, loader):
    try:
        for batch in loader:
            train_step(model, batch)
    except KeyboardInterrupt:
        dist.barrier()
    try:
        version = dist.get_version()
    except AttributeError:
        dist.barrier()
"""
_FINALLY = """\
def main(model, loader):
    dist.init_process_group("nccl")
    try:
        for batch in loader:
            train_step(model, batch)
        dist.barrier()
    except RuntimeError:
        report()
        raise
    finally:
        dist.destroy_process_group()
"""

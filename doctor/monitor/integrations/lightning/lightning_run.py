"""One watched run of a Lightning Trainer: the effects of its hooks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from doctor.monitor.integrations.adapter import AdapterRun
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.lightning.callback_base import hook_caller
from doctor.monitor.integrations.lightning.stage_loaders import StageLoaders, combined_loader
from doctor.monitor.integrations.lightning.trainer_facts import replication, trainer_memory_lower_bound, training_facts
from doctor.monitor.integrations.torch_state import device_of
from doctor.monitor.watch_session import WatchSession

BEFORE_FETCH = "_on_before_fetch"
"""The method a training loop calls before it fetches a batch (lightning/pytorch/loops/training_epoch_loop.py)."""

BROADCAST = "_broadcast_sigterm_tensor"
"""The method that it calls before that, in which all ranks wait for rank 0 to say whether a signal ends the run."""

ON_BATCH_START = "on_batch_start"
"""The method of a Trainer's logger connector that a training loop calls just before the hooks of a batch's start."""

PRE_BACKWARD, AFTER_CLOSURE = "pre_backward", "_after_closure"
"""The methods of a precision plugin that call the hooks before backward and before an optimizer step, if it does not
call them elsewhere (lightning/pytorch/plugins/precision/precision.py)."""

OPTIMIZATIONS, RUN_BATCH = ("automatic_optimization", "manual_optimization"), "run"
"""The loops of which a training loop calls one for each batch, and the method, which returns what the hooks of the
batch's end get; only schedulers are stepped in between (lightning/pytorch/loops/training_epoch_loop.py)."""

UNUSED = ("on_before_zero_grad", "on_after_backward")
"""Hooks of every step in which nothing is done."""

RUN_STAGE = "_run_stage"
"""The method a Trainer calls between setup and teardown (lightning/pytorch/trainer/trainer.py, _run)."""

ON_EXCEPTION = "on_exception"
"""The method of a strategy that a Trainer calls after those of its callbacks (lightning/pytorch/trainer/call.py)."""

WITHIN_STEPS = "_DataLoaderIterDataFetcher"
"""The fetcher of a ``training_step`` that takes the loader itself: batches are fetched within a step, which
continues (lightning/pytorch/loops/fetchers.py)."""

OBSERVER, ENDS_ALL = "child-process-observer", "_terminate_all"
"""The thread of rank 0 that polls the processes started by the Trainer every five seconds, and the method it calls
when one has failed: SIGKILL for all, including rank 0 (lightning/fabric/strategies/launchers/subprocess_script.py)."""


class LightningRun(AdapterRun):
    """One watched run of a Trainer.

    ``stage``: the current evaluation stage. ``alone``: within an epoch with a single training loader, that loader and
    the recorder of its batches. ``after``: the point that follows a batch. ``has_stepped``: an optimizer stepped in
    this batch; several of them count once. ``trainer`` and ``module`` are the user's. ``unneeded``: hooks that the
    Trainer need not call, with ``hook_caller``, its code that would. ``announced``: the number of a batch before its
    hooks are called. ``replaced``: objects, names and replacements of methods that are called in every step.
    """

    def __init__(self, session: WatchSession, trainer: Any, module: Any) -> None:
        super().__init__(session)
        self.trainer = trainer
        self.module = module
        self.fits = trainer.state.fn == "fit"
        self.stage = ""
        self.epoch_loop = trainer.fit_loop.epoch_loop
        self._loaders: dict[str, StageLoaders] = {}
        self._is_ready = False
        self._checked_stages: set[str] = set()
        if trainer.global_rank == 0:
            self.telemetry.when_due = self._log_metrics
        self._train: StageLoaders | None = None
        self.alone: tuple[StageLoaders, Callable[[object], None]] | None = None
        self.after = "data"
        self.has_stepped = False
        self.note = self.telemetry.note
        self.hook_caller = value_or_default(functools.partial(hook_caller, trainer), None)
        self.unneeded: dict[str, CodeType | None] = dict.fromkeys(UNUSED, self.hook_caller)
        self.announced: int | None = None
        self.replaced: list[tuple[object, str, Callable[..., Any]]] = []

    def ready(self) -> None:
        """Record the model and its device as they are used; only the first call counts."""
        if self._is_ready:
            return
        self._is_ready = True
        telemetry, strategy = self.telemetry, self.trainer.strategy
        telemetry.training = training_facts(self.trainer, self.module)
        device = value_or_default(lambda: strategy.root_device, None)
        telemetry.steps.use_device(device)
        telemetry.memory.use_device(device)
        if self.fits:
            lower_bound = value_or_default(lambda: trainer_memory_lower_bound(self.trainer, self.module), None)
            telemetry.memory.lower_bound = lower_bound
            telemetry.replica.settings.use_optimizers(value_or_default(lambda: list(self.trainer.optimizers), []))
        replicated, broadcast = replication(strategy)
        telemetry.replica.attach(self.module, replicated=replicated, broadcast=broadcast)

    def failing(self) -> None:
        """Record a model that failed before it was wrapped; ranks may have built different ones.

        Only on the CPU: another device may never answer.
        """
        if not self._is_ready and getattr(device_of(self.module), "type", None) == "cpu":
            self.ready()

    def restore(self) -> None:
        """Restore the training loop and the Trainer."""
        for owner, name, replacement in self.replaced:
            if vars(owner).get(name) is replacement:
                delattr(owner, name)
        vars(self.trainer).pop(RUN_STAGE, None)
        value_or_default(lambda: vars(self.trainer.strategy).pop(ON_EXCEPTION, None), None)

    def restore_after_close(self) -> None:
        """Restore the launcher's observer."""
        for thread in _observers():
            vars(thread).pop(ENDS_ALL, None)

    def watch_children(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called before the launcher kills this process for another's failure.

        That may happen before the collective that misses the failed process raises, or while it is being evaluated.
        ``callback`` has its own time limit.
        """
        for thread in _observers():
            ends_all = getattr(thread, ENDS_ALL, None)
            if callable(ends_all):
                setattr(thread, ENDS_ALL, functools.partial(_call_both, callback, ends_all))

    def watch_failures(self, callback: Callable[[BaseException], None]) -> None:
        """Have ``callback`` called with the exception that ends the stage.

        In processes that the Trainer forks or spawns, ``on_exception`` is only called in the parent
        (lightning/pytorch/strategies/launchers/multiprocessing.py). A search for a learning rate or a batch size
        replaces the callbacks, and leaves them so if it fails (lightning/pytorch/tuner/lr_finder.py).
        """
        strategy = value_or_default(lambda: self.trainer.strategy, None)
        on_exception = getattr(strategy, ON_EXCEPTION, None)
        if callable(on_exception):
            setattr(strategy, ON_EXCEPTION, functools.partial(_report_and_call, callback, on_exception))
        launcher = value_or_default(lambda: self.trainer.strategy.launcher, None)
        run_stage = getattr(self.trainer, RUN_STAGE, None)
        if callable(run_stage) and hasattr(launcher, "_start_method"):
            setattr(self.trainer, RUN_STAGE, functools.partial(_call_and_report, run_stage, callback))

    def watch_fetches(self, callback: Callable[..., Any], before_batch: Callable[..., Any]) -> None:
        """Have ``callback`` called when the loop fetches a training batch, and ``before_batch`` when it has it.

        Both get the method that the loop calls then.

        Time before that is not spent waiting for data: other callbacks run, ranks agree whether to stop, loggers write.
        The hooked method is private, so it may be missing.
        """
        before = getattr(self.epoch_loop, BEFORE_FETCH, None)
        within = type(getattr(self.trainer.fit_loop, "_data_fetcher", None)).__name__ == WITHIN_STEPS
        if callable(before) and not within and self.after == "data":
            self.after = "batch-end"
            self._replace(self.epoch_loop, BEFORE_FETCH, callback)
            if self.hook_caller is not None:  # else the hook would be called as well
                self._replace(getattr(self.trainer, "_logger_connector", None), ON_BATCH_START, before_batch)
            if self.trainer.world_size > 1:
                self._replace(self.epoch_loop, BROADCAST, self.gradients.time_wait)

    def watch_optimization(
        self, before_backward: Callable[..., Any], before_step: Callable[..., Any], batch_done: Callable[..., Any]
    ) -> None:
        """Have these called before backward, before an optimizer step and around the work of a batch, each with the
        method that does that.

        If the strategy calls the hooks elsewhere, they are not called, and the hooks stay needed.
        """
        plugin = value_or_default(lambda: self.trainer.strategy.precision_plugin, None)
        if self.hook_caller is not None:
            self._replace(plugin, PRE_BACKWARD, before_backward)
            self._replace(plugin, AFTER_CLOSURE, before_step)
            for name in OPTIMIZATIONS:
                self._replace(getattr(self.epoch_loop, name, None), RUN_BATCH, batch_done)

    def _replace(self, owner: object, name: str, replacement: Callable[..., Any]) -> None:
        """Replace a method of ``owner`` once by ``replacement``, which gets it as its first argument."""
        original = getattr(owner, name, None)
        if callable(original) and all(original is not called for _, _, called in self.replaced):
            called = functools.partial(replacement, original)
            setattr(owner, name, called)
            self.replaced.append((owner, name, called))

    def check_start(self, stage: str) -> None:
        """Have all ranks evaluated once before the first batch of ``stage``."""
        self.ready()
        if stage not in self._checked_stages:
            self._checked_stages.add(stage)
            self.telemetry.training = training_facts(self.trainer, self.module)
            self.session.check_start()

    # Training.

    def train_start(self) -> None:
        """Record the loaders of training, and those of validation if they exist."""
        self.telemetry.stage_start("train")
        self.telemetry.progress.step_now = functools.partial(getattr, self.epoch_loop, "global_step")
        self._load("train", self.trainer.fit_loop)
        if combined_loader(self.epoch_loop.val_loop) is not None:
            self._load("validate", self.epoch_loop.val_loop)
            self._checked_stages.add("validate")
        self.check_start("train")

    def train_epoch_start(self) -> StageLoaders:
        """Record the epoch; its loaders may have been recreated."""
        self._train = train = self._load("train", self.trainer.fit_loop)
        train.epoch_start()
        self.alone = (train, self.telemetry.loaders.batch_recorder("train", 0)) if train.is_alone else None
        self.telemetry.epoch_start("train", self.trainer.current_epoch)
        return train

    def train_batch_start(self, batch: Any, number: int) -> None:
        """Record a batch. (step path)"""
        # Without loaders, the run was resumed within an epoch that began in an earlier run.
        loaders = self._train or self.train_epoch_start()
        loaders.batch_start(self.telemetry, batch, number, 0)

    def maybe_last_batch(self) -> None:
        """Record the end of the loaders, because validation runs before the epoch-end hooks."""
        if self._train is not None and self.epoch_loop.batch_progress.is_last_batch:
            self._loaders["train"].epoch_end(self.telemetry)

    def train_epoch_end(self) -> None:
        """Record the start of the epoch-end hooks."""
        self._loaders["train"].epoch_end(self.telemetry)
        self._train = self.alone = None
        self.telemetry.epoch_end("train")

    # Evaluation.

    def evaluation_start(self, stage: str, loop: Any) -> None:
        """Record the start of an evaluation stage, alone or within training."""
        self.stage = stage
        self.telemetry.stage_start(stage)
        self._load(stage, loop).epoch_start()
        self.check_start(stage)
        self.telemetry.epoch_start(stage, self.trainer.current_epoch)

    def evaluation_batch_start(self, batch: Any, number: int, loader: int) -> None:
        """Record a batch. (step path)"""
        self._loaders[self.stage].batch_start(self.telemetry, batch, number, loader)

    def evaluation_epoch_end(self) -> None:
        """Record the end of the batches, before metrics are reduced."""
        self._loaders[self.stage].epoch_end(self.telemetry)
        self.telemetry.epoch_end(self.stage)

    def evaluation_end(self) -> None:
        """Record the return to the interrupted stage."""
        within = self.fits and self.stage == "validate"
        self.telemetry.stage_end(self.stage, back_to="train" if within else None)

    def _load(self, stage: str, loop: Any) -> StageLoaders:
        """Return the loaders of a stage, described anew only if they changed."""
        known = self._loaders.get(stage)
        if known is None or known.combined is not combined_loader(loop):
            self._loaders[stage] = known = StageLoaders(stage, loop)
            known.attach(self.telemetry)
        return known

    def _log_metrics(self) -> None:
        """Pass the metrics of a round to the loggers once; ``log`` would mix them with others."""
        metrics = self.take_metrics()
        step = getattr(self.epoch_loop, "_batches_that_stepped", self.epoch_loop.global_step)
        for logger in self.trainer.loggers if metrics else ():
            logger.log_metrics(dict(metrics), step=step)


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Call both functions. Not a closure, because attributes of a Trainer must be picklable."""
    first()
    second()


def loss_of(outputs: Any) -> Any:
    """Return the loss in the outputs of ``training_step``; ``None`` if there is none."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _call_and_report(work: Callable[[], Any], callback: Callable[[BaseException], None]) -> Any:
    try:
        return work()
    except BaseException as error:
        callback(error)
        raise


def _report_and_call(
    callback: Callable[[BaseException], None], on_exception: Callable[[BaseException], None], error: BaseException
) -> None:
    callback(error)
    on_exception(error)


def _observers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == OBSERVER]

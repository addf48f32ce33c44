"""One run of a Trainer while it is watched: what its hooks come down to."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from doctor.monitor.integrations.adapter import AdapterRun
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.lightning.stage_loaders import StageLoaders, combined_loader
from doctor.monitor.integrations.lightning.trainer_facts import replication, trainer_memory_lower_bound, training_facts
from doctor.monitor.integrations.torch_state import device_of
from doctor.monitor.watch_session import WatchSession

BEFORE_FETCH = "_on_before_fetch"
"""What a training loop calls before it asks for a batch (lightning/pytorch/loops/training_epoch_loop.py)."""

RUN_STAGE = "_run_stage"
"""What a Trainer calls between setup and teardown (lightning/pytorch/trainer/trainer.py, _run)."""

WITHIN_STEPS = "_DataLoaderIterDataFetcher"
"""The fetcher of a ``training_step`` that takes the loader itself: batches are asked for within a step, which goes on
(lightning/pytorch/loops/fetchers.py)."""


OBSERVER, ENDS_ALL = "child-process-observer", "_terminate_all"
"""The thread of rank 0 that looks every five seconds at the processes which the Trainer has started, and what it calls
where one has failed: SIGKILL for all, rank 0 included (lightning/fabric/strategies/launchers/subprocess_script.py)."""


class LightningRun(AdapterRun):
    """``stage``: the evaluation that batches belong to now. ``alone``: within an epoch, the loader of training where it
    is the only one, and what takes its batches. ``after``: the point that follows a batch. ``has_stepped``: an
    optimizer did in this batch; several of them count once. ``trainer`` and ``module`` are the user's."""

    def __init__(self, attendance: WatchSession, trainer: Any, module: Any) -> None:
        super().__init__(attendance)
        self.trainer = trainer
        self.module = module
        self.fits = trainer.state.fn == "fit"
        self.stage = ""
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._loaders: dict[str, StageLoaders] = {}
        self._is_ready = False
        self._met: set[str] = set()
        self._logged: Mapping[str, float] | None = None
        if trainer.global_rank == 0:
            self.monitor.when_due = self._log_metrics
        self._train: StageLoaders | None = None
        self.alone: tuple[StageLoaders, Callable[[object], None]] | None = None
        self.after = "data"
        self.has_stepped = False
        self.note = self.monitor.note

    def ready(self) -> None:
        """Once: the model and its device as they are used."""
        if self._is_ready:
            return
        self._is_ready = True
        monitor, strategy = self.monitor, self.trainer.strategy
        monitor.training = training_facts(self.trainer, self.module)
        device = value_or_default(lambda: strategy.root_device, None)
        monitor.steps.use_device(device)
        monitor.memory.use_device(device)
        if self.fits:
            monitor.memory.expect(value_or_default(lambda: trainer_memory_lower_bound(self.trainer, self.module), None))
        replicated, broadcast = replication(strategy)
        monitor.replica.attach(self.module, replicated=replicated, broadcast=broadcast)

    def failing(self) -> None:
        """An exception before the model was wrapped, maybe because ranks made different ones. A model on another device
        than the CPU is not read then: the device may never answer."""
        if not self._is_ready and getattr(device_of(self.module), "type", None) == "cpu":
            self.ready()

    def let_go(self) -> None:
        """The loop asks for batches as it did before."""
        vars(self._epoch_loop).pop(BEFORE_FETCH, None)
        vars(self.trainer).pop(RUN_STAGE, None)

    def left(self) -> None:
        """The launcher ends ranks as it did before."""
        for thread in _observers():
            vars(thread).pop(ENDS_ALL, None)

    def watch_children(self, told: Callable[[], None]) -> None:
        """Have ``told`` called before the launcher ends this process because another one has failed: it may come before
        the error of the collective in which that one is missed, or while it is being judged. ``told`` has its limit."""
        for thread in _observers():
            ends_all = getattr(thread, ENDS_ALL, None)
            if callable(ends_all):
                setattr(thread, ENDS_ALL, functools.partial(_one_after_the_other, told, ends_all))

    def watch_failures(self, told: Callable[[BaseException], None]) -> None:
        """Have ``told`` called with the exception that ends the stage. Of processes that the Trainer forks or spawns,
        ``on_exception`` is called in the parent alone (lightning/pytorch/strategies/launchers/multiprocessing.py)."""
        launcher = value_or_default(lambda: self.trainer.strategy.launcher, None)
        run_stage = getattr(self.trainer, RUN_STAGE, None)
        if callable(run_stage) and hasattr(launcher, "_start_method"):
            setattr(self.trainer, RUN_STAGE, functools.partial(_telling, run_stage, told))

    def watch_fetches(self, told: Callable[[], None]) -> None:
        """Have ``told`` called when the loop asks for a batch of training; before that, it is not data that is waited
        for: other callbacks work, ranks agree whether to stop, loggers write. The name is private, so it may be
        missing."""
        before = getattr(self._epoch_loop, BEFORE_FETCH, None)
        within = type(getattr(self.trainer.fit_loop, "_data_fetcher", None)).__name__ == WITHIN_STEPS
        if callable(before) and not within and self.after == "data":
            self.after = "batch-end"
            setattr(self._epoch_loop, BEFORE_FETCH, functools.partial(_one_after_the_other, told, before))

    def meet(self, stage: str) -> None:
        """Before the first batch of ``stage``, once: all ranks are judged by what is known."""
        self.ready()
        if stage not in self._met:
            self._met.add(stage)
            self.monitor.training = training_facts(self.trainer, self.module)
            self.attendance.meet()

    # Training.

    def train_start(self) -> None:
        """All loaders are there; those of validation too, where it comes in the first epoch."""
        self.monitor.stage_start("train")
        self.monitor.progress.step_now = functools.partial(getattr, self._epoch_loop, "global_step")
        self._load("train", self.trainer.fit_loop)
        if combined_loader(self._epoch_loop.val_loop) is not None:
            self._load("validate", self._epoch_loop.val_loop)
            self._met.add("validate")
        self.meet("train")

    def train_epoch_start(self) -> StageLoaders:
        """Samplers know their epoch; loaders may have been made anew: these are they."""
        self._train = train = self._load("train", self.trainer.fit_loop)
        train.epoch_start()
        self.alone = (train, self.monitor.loaders.seeing("train", 0)) if train.is_alone else None
        self.monitor.epoch_start("train", self.trainer.current_epoch)
        return train

    def train_batch_start(self, batch: Any, number: int) -> None:
        """A batch is there. (step path)"""
        # Where there are none, the run was resumed within an epoch, which began in an earlier run.
        loaders = self._train or self.train_epoch_start()
        loaders.batch_start(self.monitor, batch, number, 0)

    def maybe_last_batch(self) -> None:
        """Validation comes between the last batch and the hooks at the end of the epoch."""
        if self._train is not None and self._epoch_loop.batch_progress.is_last_batch:
            self._end_loaders()

    def train_epoch_end(self) -> None:
        """The hooks at the end of an epoch begin."""
        self._end_loaders()
        self._train = self.alone = None
        self.monitor.epoch_end("train")

    def _end_loaders(self) -> None:
        self._loaders["train"].epoch_end(self.monitor)

    # Evaluation.

    def evaluation_start(self, stage: str, loop: Any) -> None:
        """``sanity``, ``validate``, ``test`` or ``predict`` begins, by itself or within training."""
        self.stage = stage
        self.monitor.stage_start(stage)
        self._load(stage, loop).epoch_start()
        self.meet(stage)
        self.monitor.epoch_start(stage, self.trainer.current_epoch)

    def evaluation_batch_start(self, batch: Any, number: int, loader: int) -> None:
        """A batch is there. (step path)"""
        self._loaders[self.stage].batch_start(self.monitor, batch, number, loader)

    def evaluation_epoch_end(self) -> None:
        """Metrics are reduced next."""
        self._loaders[self.stage].epoch_end(self.monitor)
        self.monitor.epoch_end(self.stage)

    def evaluation_end(self) -> None:
        """Back to what was interrupted."""
        within = self.fits and self.stage == "validate"
        self.monitor.stage_end(self.stage, back_to="train" if within else None)

    def _load(self, stage: str, loop: Any) -> StageLoaders:
        """The loaders of a stage, described unless they are the ones that are known."""
        known = self._loaders.get(stage)
        if known is None or known.combined is not combined_loader(loop):
            self._loaders[stage] = known = StageLoaders(stage, loop)
            known.attach(self.monitor)
        return known

    def _log_metrics(self) -> None:
        """Hand the numbers of a round to the Trainer's loggers, once, past ``self.log``, which would mix them into the
        run's own."""
        metrics = self.attendance.metrics()
        if metrics is self._logged:
            return
        self._logged = metrics
        step = getattr(self._epoch_loop, "_batches_that_stepped", self._epoch_loop.global_step)
        for logger in self.trainer.loggers if metrics else ():
            logger.log_metrics(dict(metrics), step=step)


def _one_after_the_other(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Not a closure: what hangs on a Trainer must be fit for pickling."""
    first()
    second()


def loss_of(outputs: Any) -> Any:
    """The loss in what ``training_step`` gave, as Lightning hands it on; ``None`` where it gave none."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _telling(work: Callable[[], Any], told: Callable[[BaseException], None]) -> Any:
    """What ``work`` gives; ``told`` hears of what it raises."""
    try:
        return work()
    except BaseException as error:
        told(error)
        raise


def _observers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == OBSERVER]

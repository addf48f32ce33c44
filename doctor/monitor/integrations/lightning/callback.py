"""``DoctorCallback``: feeds telemetry from a Trainer of either Lightning package.

The class is a subclass of the Callback of every Lightning that is loaded, see :mod:`.callback_base`. It is found under
its name in this module, so that it can be pickled.

Order of the hooks: lightning/pytorch/trainer/trainer.py (_run), loops/fit_loop.py, loops/training_epoch_loop.py,
loops/evaluation_loop.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any

from doctor.core.clock import monotonic
from doctor.monitor.integrations.adapter import Adapter, guarded
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.lightning.callback_base import (
    MISSING,
    UnneededHook,
    bind_callback_base,
    import_one,
    installed,
)
from doctor.monitor.integrations.lightning.lightning_run import LightningRun, loss_of
from doctor.monitor.integrations.lightning.trainer_facts import default_directory, training_facts


class LightningHooks(Adapter[LightningRun]):
    """The hooks, in the order of a run; none issues a collective or adds to a checkpoint."""

    _unneeded: Mapping[str, CodeType | None] = MappingProxyType({})
    """Of the newest run, see :class:`UnneededHook`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what belongs to a run."""
        return {name: value for name, value in super().__getstate__().items() if name != "_unneeded"}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called when the process group exists and the loaders do not.

        Of several callbacks, only one watches: the first that the program asked for, else the first.
        """

        def start() -> LightningRun:
            facts = training_facts(trainer, pl_module)
            session = self._new_session(trainer.global_rank, trainer.world_size, default_directory(trainer), facts)
            run = LightningRun(session, trainer, pl_module)
            self._unneeded = run.unneeded
            run.watch_failures(self._on_failure)
            run.watch_children(session.await_decision)
            return run

        first = value_or_default(
            lambda: min(
                (one for one in trainer.callbacks if isinstance(one, LightningHooks)), key=lambda one: one.unasked
            ),
            self,
        )
        if first is self:
            self._begin(start)

    @guarded
    def _on_failure(self, run: LightningRun, error: BaseException) -> None:
        value_or_default(run.failing, None)
        self._end_run(error)

    @guarded
    def on_fit_start(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called when the model is wrapped and on its device."""
        run.ready()

    @guarded
    def on_train_start(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called after the sanity check, before the first batch of training."""
        run.watch_fetches(self._on_before_fetch, self._on_batch_start)
        run.watch_optimization(self._on_pre_backward, self._on_after_closure, self._on_batch_done)
        run.train_start()

    def _on_before_fetch(self, original: Callable[[], None]) -> None:
        if (run := self._run) is not None:
            run.note((monotonic(), "data", None))
        original()

    @guarded
    def on_train_epoch_start(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called at the start of an epoch, unless a run is resumed within it."""
        run.train_epoch_start()

    # The hooks of every step are written out, because each frame between the Trainer and the event log costs a
    # microsecond. Logging an event is an append, which does not fail.

    @UnneededHook
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Called when the batch is on its device.

        Unneeded once :meth:`_on_batch_start`, which is called just before it, is known to see the same number.
        """
        if (run := self._run) is not None:
            if "on_train_batch_start" in run.unneeded and run.epoch_loop.batch_idx == batch_idx:
                return  # the hook of a subclass calls it
            if run.announced == batch_idx:
                run.unneeded["on_train_batch_start"] = run.hook_caller
            self._batch_begins(run, batch, batch_idx)

    def _on_batch_start(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        # A loop of evaluation passes the number of its loader, too. No hook is called for a batch that is None.
        if (run := self._run) is not None and batch is not None and not args and not kwargs:
            if "on_train_batch_start" in run.unneeded:
                self._batch_begins(run, batch, run.epoch_loop.batch_idx)
            else:
                run.announced = getattr(run.epoch_loop, "batch_idx", None)
        return original(batch, *args, **kwargs)

    def _batch_begins(self, run: LightningRun, batch: Any, batch_idx: int) -> None:
        try:
            if run.alone is not None:
                loaders, record_batch = run.alone
                loaders.taken = batch_idx + 1
                run.telemetry.train_batch_start(batch_idx, 0)
                record_batch(batch)
            else:
                run.train_batch_start(batch, batch_idx)
        except Exception as error:
            self._failed("on_train_batch_start", error)

    @UnneededHook
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Called before gradients are cleared; nothing is done."""

    @UnneededHook
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Called before backward; with manual optimization any number of times per batch.

        The end of backward is marked by what follows: clipping and the optimizer, or the end of the batch. Unneeded
        once :meth:`_on_pre_backward` is called.
        """
        if (run := self._run) is not None:
            _backward_begins(run, loss)

    def _on_pre_backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        if (run := self._run) is not None:
            run.unneeded["on_before_backward"] = run.hook_caller
            at = monotonic()  # as _backward_begins
            run.note((at, "backward", None))
            if at >= run.gradients.due:
                value_or_default(functools.partial(run.gradients.begin, loss), None)
        return original(loss, *args, **kwargs)

    @UnneededHook
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Called after backward; nothing is done."""

    @UnneededHook
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Called before an optimizer step; with manual optimization in any order.

        Unneeded once :meth:`_on_after_closure` is called.
        """
        if (run := self._run) is not None:
            run.has_stepped = True
            run.note((monotonic(), "optimizer", None))

    def _on_after_closure(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (run := self._run) is not None:
            run.unneeded["on_before_optimizer_step"] = run.hook_caller
            run.has_stepped = True
            run.note((monotonic(), "optimizer", None))
        return original(*args, **kwargs)

    @UnneededHook
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after every batch, including accumulated ones.

        Unneeded once :meth:`_on_batch_done` is called, which is just before it.
        """
        if (run := self._run) is not None and "on_train_batch_end" not in run.unneeded:
            self._batch_ends(run, outputs)

    def _on_batch_done(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        if (run := self._run) is not None:
            run.unneeded["on_train_batch_end"] = run.hook_caller
            self._batch_ends(run, outputs)
        return outputs

    def _batch_ends(self, run: LightningRun, outputs: Any) -> None:
        try:
            loss = outputs.get("loss") if type(outputs) is dict else loss_of(outputs)
            if run.has_stepped:
                run.has_stepped = False
                run.telemetry.optimizer_step()
            run.telemetry.train_batch_end(loss, run.after)
        except Exception as error:
            self._failed("on_train_batch_end", error)

    @guarded
    def on_train_epoch_end(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called before the module's own hook, and before checkpoints are saved."""
        run.train_epoch_end()

    @guarded
    def on_train_end(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called however training ended, except by an exception."""
        run.telemetry.stage_end("train")

    @guarded
    def on_save_checkpoint(self, run: LightningRun, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Called before a checkpoint is written; adds nothing to it."""
        run.telemetry.mark("checkpoint")

    @guarded
    def on_sanity_check_end(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called before the loaders of training are set up."""
        run.telemetry.stage_start("train")

    @guarded
    def on_validation_start(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called for the sanity check, a validation within training, or one on its own."""
        run.maybe_last_batch()
        loop = trainer.fit_loop.epoch_loop.val_loop if run.fits else trainer.validate_loop
        run.evaluation_start("sanity" if trainer.sanity_checking else "validate", loop)

    @guarded
    def on_test_start(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called when the loaders exist and no batch was fetched."""
        run.evaluation_start("test", trainer.test_loop)

    @guarded
    def on_predict_start(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called when the loaders exist and no batch was fetched."""
        run.evaluation_start("predict", trainer.predict_loop)

    @guarded
    def on_validation_batch_start(
        self, run: LightningRun, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called when the batch is on its device."""
        run.evaluation_batch_start(batch, batch_idx, dataloader_idx)

    @guarded
    def on_validation_batch_end(self, run: LightningRun, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Called when the batch is done."""
        run.telemetry.batch_end(run.stage)

    @guarded
    def on_validation_epoch_end(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called before metrics are reduced."""
        run.evaluation_epoch_end()

    @guarded
    def on_validation_end(self, run: LightningRun, trainer: Any, pl_module: Any) -> None:
        """Called before checkpoints are saved."""
        run.evaluation_end()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_end = on_predict_end = on_validation_end

    @guarded
    def on_exception(self, run: LightningRun, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called for any exception, including KeyboardInterrupt; ``teardown`` does not follow."""
        value_or_default(run.failing, None)
        self._end_run(exception)

    @guarded
    def teardown(self, run: LightningRun, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called when the run has ended normally."""
        self._end_run()


def _backward_begins(run: LightningRun, loss: Any) -> None:
    at = monotonic()
    run.note((at, "backward", None))
    if at >= run.gradients.due:
        value_or_default(functools.partial(run.gradients.begin, loss), None)


if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from pytorch_lightning import Callback as OtherCallback

    class DoctorCallback(LightningHooks, Callback, OtherCallback):  # type: ignore[misc]
        """A callback for the Trainer of either Lightning; its arguments are those of :class:`Adapter`."""


class _Callback(LightningHooks):
    __doc__ = Adapter.__doc__

    # Tools that configure it by its signature (LightningCLI) see the options.
    @functools.wraps(Adapter.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not bind_callback_base(_Callback):
            import_one()
            bind_callback_base(_Callback)
        super().__init__(*args, **kwargs)


# Pickling finds the class by these names, through __getattr__.
_Callback.__name__ = _Callback.__qualname__ = "DoctorCallback"


def __getattr__(name: str) -> Any:
    if name != "DoctorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not bind_callback_base(_Callback) and not installed():
        raise ImportError(MISSING)
    return _Callback

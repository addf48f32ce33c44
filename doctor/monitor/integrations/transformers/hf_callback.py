"""``HFDoctorCallback``: feeds telemetry from the Trainer of Hugging Face transformers.

Its callbacks get neither batches nor losses nor exceptions: batches are counted, and an exception is detected when it
leaves the program. One that the program catches is not detected; the run is then ended by the next one, or when the
interpreter exits. The class is created on first access, and found under its name in this module.

Order of the events: transformers/trainer.py (_inner_training_loop, _run_epoch, evaluation_loop).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doctor.collectors.storage.mounts import local_path
from doctor.monitor.findings_error import Findings
from doctor.monitor.integrations.adapter import Adapter, guarded
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.transformers.transformers_run import TransformersRun, reporters_beside, training_facts


class TransformersHooks(Adapter[TransformersRun]):
    """The events that are watched. None of them changes the Trainer's control."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called when loaders and model exist; again when a smaller batch size is tried."""
        self._begin(lambda: self._start(args, state))
        try:
            self._on_train_begin(given, control)
        except Findings as found:  # no event reports an exception
            self._end_run(found)
            raise

    @guarded
    def _on_train_begin(self, run: TransformersRun, given: dict[str, Any], control: Any) -> None:
        run.watch_exceptions(self._on_exception)
        run.watch_exit(self._on_exit)
        run.report_to(value_or_default(lambda: reporters_beside(self), []), control)
        run.train_begin(given.get("model"), given.get("train_dataloader"), given.get("optimizer"))

    @guarded
    def on_epoch_begin(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called before the loader's iterator is created."""
        run.epoch_begin()

    @guarded
    def on_step_begin(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called when all batches of the step have been fetched."""
        run.batch_start()

    @guarded
    def on_substep_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called after an accumulated batch; the next one has been fetched already."""
        run.batch_end(stepped=False)
        run.batch_start()

    @guarded
    def on_pre_optimizer_step(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called when gradients are reduced and clipped."""
        run.telemetry.mark("optimizer")

    @guarded
    def on_step_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called after the last batch of a step. The control tells what the Trainer does next."""
        run.batch_end(stepped=True)
        run.announce(control)

    @guarded
    def on_epoch_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called before evaluation and saving at the end of an epoch."""
        run.epoch_end(control)
        run.announce(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called after a batch of evaluation or prediction; there is no event for its start."""
        if self._run is None:
            self._begin(lambda: self._start(args, state))
        self._on_prediction_step(given)

    @guarded
    def _on_prediction_step(self, run: TransformersRun, given: dict[str, Any]) -> None:
        run.prediction_step(given.get("eval_dataloader"))

    @guarded
    def on_evaluate(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called after an evaluation; within training, a checkpoint may follow."""
        run.evaluation_end()
        if not run.trains:
            self._end_run()
        elif control.should_save:
            run.telemetry.mark("checkpoint")

    on_predict = on_evaluate

    @guarded
    def on_save(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called when a checkpoint is written."""
        run.telemetry.mark("batch-end")

    @guarded
    def on_train_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called however training ended, except by an exception."""
        run.telemetry.stage_end("train")
        self._end_run()

    def _start(self, args: Any, state: Any) -> TransformersRun:
        facts = training_facts(args)
        directory = local_path(str(args.output_dir or ""))
        session = self._new_session(args.process_index, args.world_size, Path(directory or ""), facts)
        return TransformersRun(session, args, state)

    @guarded
    def _on_exception(self, run: TransformersRun, error: BaseException) -> None:
        self._end_run(error)

    @guarded
    def _on_exit(self, run: TransformersRun) -> None:
        self._end_run()


if TYPE_CHECKING:
    from transformers import TrainerCallback  # type: ignore[import-not-found, unused-ignore]

    class HFDoctorCallback(TransformersHooks, TrainerCallback):  # type: ignore[misc]
        """A callback for the Trainer of Transformers and of TRL; its arguments are those of :class:`Adapter`."""


def __getattr__(name: str) -> Any:
    if name != "HFDoctorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        base = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise ImportError(
            f"HFDoctorCallback needs transformers ({error}): pip install transformers accelerate"
        ) from None
    made = type(name, (TransformersHooks, base), {"__module__": __name__, "__doc__": Adapter.__doc__})
    globals()[name] = made
    return made

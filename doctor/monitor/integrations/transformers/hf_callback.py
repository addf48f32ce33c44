"""``HFDoctorCallback``: what the Trainer of Hugging Face transformers tells the monitor.

Its callbacks see neither batches nor losses nor exceptions: batches are counted, and an exception is seen where it
leaves the program. One that the program catches is not seen; the run is over then when the next one begins, or at the
latest when the interpreter ends. The class is made when it is first asked for, and found under its name in this module.

Order of the events: transformers/trainer.py (_inner_training_loop, _run_epoch, evaluation_loop).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doctor.collectors.filesystem import local_path
from doctor.monitor.findings_error import Findings
from doctor.monitor.integrations.adapter import Adapter, guarded
from doctor.monitor.integrations.transformers.transformers_run import TransformersRun, training_facts


class TransformersHooks(Adapter[TransformersRun]):
    """The events that are watched. None of them changes the Trainer's control."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Loaders and model are there, no batch was drawn. Comes again where a smaller batch size is tried."""
        self._begin(lambda: self._start(args, state))
        try:
            self._on_train_begin(given)
        except Findings as found:  # no event tells of an exception
            self._leave(found)
            raise

    @guarded
    def _on_train_begin(self, run: TransformersRun, given: dict[str, Any]) -> None:
        run.watch_exceptions(self._on_exception)
        run.watch_exit(self._on_exit)
        run.train_begin(given.get("model"), given.get("train_dataloader"), given.get("optimizer"))

    @guarded
    def on_epoch_begin(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before the loader is asked for its iterator."""
        run.epoch_begin()

    @guarded
    def on_step_begin(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """All batches of the step are there."""
        run.batch_start()

    @guarded
    def on_substep_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A batch whose gradients are accumulated; the next one is there already."""
        run.batch_end(stepped=False)
        run.batch_start()

    @guarded
    def on_pre_optimizer_step(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Gradients are reduced and clipped."""
        run.monitor.mark("optimizer")

    @guarded
    def on_step_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The last batch of a step. What the Trainer does next stands in its control."""
        run.batch_end(stepped=True)
        run.announce(control)

    @guarded
    def on_epoch_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before evaluation and saving at the end of an epoch."""
        run.epoch_end(control)
        run.announce(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A batch of evaluation or prediction is done; of its beginning nothing is told."""
        if self._run is None:
            self._begin(lambda: self._start(args, state))
        self._on_prediction_step(given)

    @guarded
    def _on_prediction_step(self, run: TransformersRun, given: dict[str, Any]) -> None:
        run.prediction_step(given.get("eval_dataloader"))

    @guarded
    def on_evaluate(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An evaluation is over: within training it goes on, maybe with a checkpoint."""
        run.evaluation_end()
        if not run.trains:
            self._leave()
        elif control.should_save:
            run.monitor.mark("checkpoint")

    on_predict = on_evaluate

    @guarded
    def on_save(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A checkpoint is written."""
        run.monitor.mark("batch-end")

    @guarded
    def on_train_end(self, run: TransformersRun, /, args: Any, state: Any, control: Any, **given: Any) -> None:
        """However training came to its end, but for exceptions."""
        run.monitor.stage_end("train")
        self._leave()

    def _start(self, args: Any, state: Any) -> TransformersRun:
        facts = training_facts(args)
        directory = local_path(str(args.output_dir or ""))
        attendance = self._attendance(args.process_index, args.world_size, Path(directory or ""), facts)
        return TransformersRun(attendance, args, state)

    @guarded
    def _on_exception(self, run: TransformersRun, error: BaseException) -> None:
        self._leave(error)

    @guarded
    def _on_exit(self, run: TransformersRun) -> None:
        self._leave()


if TYPE_CHECKING:
    from transformers import TrainerCallback  # type: ignore[import-not-found, unused-ignore]

    class HFDoctorCallback(TransformersHooks, TrainerCallback):  # type: ignore[misc]
        """The callback, as type checkers see it."""


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

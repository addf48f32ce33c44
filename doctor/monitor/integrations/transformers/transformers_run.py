"""One watched run of a transformers Trainer: the effects of its events."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from doctor.core.facts import TrainingFacts, Variable
from doctor.monitor.integrations.adapter import AdapterRun
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.torch_state import backend, device_id, device_of
from doctor.monitor.telemetry.memory.lower_bound import memory_lower_bound
from doctor.monitor.watch_session import WatchSession

DEFAULTS: dict[str, object] = {
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "gradient_accumulation_steps": 1,
    "dataloader_drop_last": False,
    "ignore_data_skip": False,
    "auto_find_batch_size": False,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "eval_strategy": "no",
    "eval_steps": None,
    "logging_strategy": "steps",
    "save_strategy": "steps",
    "save_steps": 500,
    "load_best_model_at_end": False,
    "ddp_find_unused_parameters": None,
}
"""Arguments that decide which batches a rank sees and what it does with them, with their defaults. An argument with
another value than the one here is recorded; ``str`` enumerations compare equal to their text."""

REPORTED_TO = ("tensorboard", "mlflow", "wandb")
"""Values of ``report_to`` whose callbacks also get the doctor's metrics: they accept rows at any step. DVCLive, for
example, counts a step with each row."""

LOADER_DEFAULTS: dict[str, object] = {"split_batches": False, "dispatch_batches": None, "even_batches": True}
"""The same for ``accelerator_config``."""


class TransformersRun(AdapterRun):
    """One watched run of a Trainer.

    ``trains``: within ``Trainer.train``, as opposed to a separate evaluation. Batches count from 0 in each epoch; an
    evaluation has its own count, and the one of training is kept meanwhile.
    """

    def __init__(self, session: WatchSession, args: Any, state: Any) -> None:
        super().__init__(session)
        self.trains = False
        self._args = args
        self._state = state
        self._length: int | None = None
        self._evaluated: Any = None
        self._evaluates = False
        self._batch = 0
        self._kept = 0

    # Training.

    def report_to(self, reporters: Sequence[Any], control: Any) -> None:
        """Have the metrics of each round passed to these callbacks of the Trainer."""
        if reporters and self._args.process_index == 0:
            self.telemetry.when_due = lambda: self._log_metrics(reporters, control)

    def _log_metrics(self, reporters: Sequence[Any], control: Any) -> None:
        """Pass the metrics of a round on once. The Trainer's ``log`` would pass them to all callbacks and keep them."""
        metrics = self.take_metrics()
        for reporter in reporters if metrics else ():
            reporter.on_log(self._args, self._state, control, logs=dict(metrics))

    def train_begin(self, model: Any, loader: Any, optimizer: Any = None) -> None:
        """Record model, loader and optimizer."""
        self.trains = True
        telemetry, device = self.telemetry, device_of(model)
        telemetry.training = training_facts(self._args)
        telemetry.steps.use_device(device)
        telemetry.memory.use_device(device)
        if model is not None:
            whole = strategy_of(self._args) == "ddp" or None
            telemetry.replica.attach(model, replicated=whole, broadcast=whole)
        if model is not None and optimizer is not None and strategy_of(self._args) != "deepspeed":
            lower_bound = value_or_default(lambda: memory_lower_bound(model, [optimizer]), None)
            self.telemetry.memory.lower_bound = lower_bound
        if optimizer is not None:
            self.telemetry.replica.settings.use_optimizers([optimizer])
        value_or_default(self.watch_backward, None)
        self.telemetry.stage_start("train")
        self.telemetry.progress.step = self._state.global_step
        if loader is not None:
            self.telemetry.loaders.attach("train", 0, loader)
            self._length = next((one.length for one in self.telemetry.loaders.facts().of("train")), None)
        self.session.check_start()

    def epoch_begin(self) -> None:
        """Record the start of an epoch, whose number is a sum of fractions just below an integer."""
        self._batch = 0
        self.telemetry.epoch_start("train", int((self._state.epoch or 0.0) + 1e-6))

    def batch_start(self) -> None:
        """Record a batch, whose content the Trainer does not show. (step path)"""
        self.telemetry.batch_start("train", self._batch, 0, None)

    def batch_end(self, *, stepped: bool) -> None:
        """Record the end of a batch; ``stepped``: the optimizer stepped. (step path)"""
        self._batch += 1
        if stepped:
            self.telemetry.optimizer_step()
        self.telemetry.batch_end("train", step=self._state.global_step, loss=self.take_loss())

    def epoch_end(self, control: Any) -> None:
        """Record the end of the epoch's batches."""
        stopped = control.should_epoch_stop or control.should_training_stop
        ended = not stopped if self._length is None else self._batch >= self._length
        self.telemetry.loader_end("train", 0, ended=ended)
        self.telemetry.epoch_end("train")

    def announce(self, control: Any) -> None:
        """Record the start of an evaluation or checkpoint, which only the control announces."""
        if control.should_evaluate:
            self._evaluation_start()
        elif control.should_save:
            self.telemetry.mark("checkpoint")

    # Evaluation: the Trainer has no event before its first batch is done.

    def prediction_step(self, loader: Any) -> None:
        """Record a batch of evaluation."""
        if not self._evaluates:
            self._evaluation_start()
        if loader is not self._evaluated and loader is not None:
            self._evaluated = loader
            self.telemetry.loaders.attach("validate", 0, loader)
        self.telemetry.batch_start("validate", self._batch, 0, None)
        self.telemetry.batch_end("validate")
        self._batch += 1

    def evaluation_end(self) -> None:
        """Record the end of an evaluation."""
        if not self._evaluates:
            return
        self._evaluates = False
        self.telemetry.loader_end("validate", 0, ended=True)
        self.telemetry.epoch_end("validate")
        self.telemetry.stage_end("validate", back_to="train" if self.trains else None)
        self._batch = self._kept

    def _evaluation_start(self) -> None:
        self._evaluates = True
        self._kept, self._batch = self._batch, 0
        self.telemetry.stage_start("validate")
        self.telemetry.epoch_start("validate", int((self._state.epoch or 0.0) + 1e-6))


def training_facts(args: Any) -> TrainingFacts:
    """Return facts from the arguments of the Trainer.

    ``max_steps`` as configured: the Trainer's state derives steps from this rank's own loader.
    """
    return TrainingFacts(
        framework="transformers",
        release=value_or_default(lambda: str(sys.modules["transformers"].__version__), None),
        strategy=strategy_of(args),
        backend=backend(),
        device=str(args.device),
        device_id=device_id(args.device),
        world_size=args.world_size,
        data_parallel_rank=args.process_index,
        data_parallel_size=args.world_size,
        accumulate=args.gradient_accumulation_steps,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        max_steps=args.max_steps if args.max_steps > 0 else None,
        max_epochs=math.ceil(args.num_train_epochs),
        seed=args.seed,
        checkpoints=args.output_dir,
        arguments=arguments(args),
    )


def strategy_of(args: Any) -> str | None:
    """Return ``fsdp``, ``deepspeed`` or ``ddp``; ``None`` for one process."""
    if getattr(args, "deepspeed", None):
        return "deepspeed"
    if getattr(args, "fsdp", None):
        return "fsdp"
    return "ddp" if args.world_size > 1 else None


def arguments(args: Any) -> tuple[Variable, ...]:
    """Return the arguments that differ from their defaults."""
    loaders = getattr(args, "accelerator_config", None)
    values = {name: getattr(args, name, default) for name, default in DEFAULTS.items()}
    values |= {name: getattr(loaders, name, default) for name, default in LOADER_DEFAULTS.items()}
    defaults = DEFAULTS | LOADER_DEFAULTS
    return tuple(
        Variable(name, str(getattr(value, "value", value))) for name, value in values.items() if value != defaults[name]
    )


def reporters_beside(callback: Any) -> list[Any]:
    """Return the callbacks of the same Trainer that report to one of :data:`REPORTED_TO`.

    Events do not pass the Trainer. Its callbacks are those of the ``CallbackHandler`` whose method ``call_event`` is
    calling ``callback`` now (transformers/trainer_callback.py).
    """
    module = sys.modules.get("transformers.integrations.integration_utils")
    known = getattr(module, "INTEGRATION_TO_CALLBACK", {})
    kinds = tuple(known[name] for name in REPORTED_TO if name in known)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "call_event":
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", ())
            if callback in callbacks:
                return [one for one in callbacks if isinstance(one, kinds)]
        frame = frame.f_back
    return []

"""One run of a Trainer of transformers while it is watched: what its events come down to."""

from __future__ import annotations

import atexit
import functools
import math
import sys
from collections.abc import Callable
from types import TracebackType
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
}
"""Arguments that decide which batches a rank sees, and what they are where nobody set them."""

LOADER_DEFAULTS: dict[str, object] = {"split_batches": False, "dispatch_batches": None, "even_batches": True}
"""The same of ``accelerator_config``."""

ExceptHook = Callable[[type[BaseException], BaseException, "TracebackType | None"], None]


class TransformersRun(AdapterRun):
    """``trains``: within ``Trainer.train``, as against an evaluation by itself. Batches count from 0 in each epoch; an
    evaluation counts its own, and those of training are kept meanwhile."""

    def __init__(self, attendance: WatchSession, args: Any, state: Any) -> None:
        super().__init__(attendance)
        self.trains = False
        self._args = args
        self._state = state
        self._length: int | None = None
        self._evaluated: Any = None
        self._evaluates = False
        self._batch = 0
        self._kept = 0
        self._hook: tuple[ExceptHook, ExceptHook] | None = None
        self._at_exit: Callable[[], None] | None = None

    def let_go(self) -> None:
        """Exceptions go where they went before, unless somebody else looks at them by now."""
        hook, self._hook = self._hook, None
        if hook is not None and sys.excepthook is hook[0]:
            sys.excepthook = hook[1]
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)

    def watch_exceptions(self, told: Callable[[BaseException], None]) -> None:
        """Have ``told`` called with an exception that leaves the program; it is then shown as before."""
        before = sys.excepthook
        ours = functools.partial(_tell_first, told, before)
        sys.excepthook = ours
        self._hook = (ours, before)

    def watch_exit(self, told: Callable[[], None]) -> None:
        """Have ``told`` called where the interpreter ends, unless this run is over before."""
        self._at_exit = told
        atexit.register(told)

    # Training.

    def train_begin(self, model: Any, loader: Any, optimizer: Any = None) -> None:
        """Model, loader and optimizer are there."""
        self.trains = True
        self._use(model)
        if model is not None and optimizer is not None and strategy_of(self._args) != "deepspeed":
            self.monitor.memory.expect(value_or_default(lambda: memory_lower_bound(model, [optimizer]), None))
        self.monitor.stage_start("train")
        self.monitor.progress.step = self._state.global_step
        if loader is not None:
            self.monitor.loaders.attach("train", 0, loader)
            self._length = next((one.length for one in self.monitor.loaders.facts().of("train")), None)
        self.attendance.meet()

    def epoch_begin(self) -> None:
        """The state counts epochs in fractions, which sum up to just below a whole one."""
        self._batch = 0
        self.monitor.epoch_start("train", int((self._state.epoch or 0.0) + 1e-6))

    def batch_start(self) -> None:
        """A batch is there; the Trainer does not show it. (step path)"""
        self.monitor.batch_start("train", self._batch, 0, None)

    def batch_end(self, *, stepped: bool) -> None:
        """A batch is done, with which the optimizer has stepped or not. (step path)"""
        self._batch += 1
        if stepped:
            self.monitor.optimizer_step()
        self.monitor.batch_end("train", step=self._state.global_step)

    def epoch_end(self, control: Any) -> None:
        """No more is drawn in this epoch."""
        stopped = control.should_epoch_stop or control.should_training_stop
        ended = not stopped if self._length is None else self._batch >= self._length
        self.monitor.loader_end("train", 0, ended=ended)
        self.monitor.epoch_end("train")

    def announce(self, control: Any) -> None:
        """Of an evaluation and of a checkpoint the beginning is not told; the control says that they come next."""
        if control.should_evaluate:
            self._evaluation_start()
        elif control.should_save:
            self.monitor.mark("checkpoint")

    # Evaluation, of which the Trainer tells nothing before its first batch is done.

    def prediction_step(self, loader: Any) -> None:
        """A batch of evaluation is done."""
        if not self._evaluates:
            self._evaluation_start()
        if loader is not self._evaluated and loader is not None:
            self._evaluated = loader
            self.monitor.loaders.attach("validate", 0, loader)
        self.monitor.batch_start("validate", self._batch, 0, None)
        self.monitor.batch_end("validate")
        self._batch += 1

    def evaluation_end(self) -> None:
        """All batches are done, metrics are known."""
        if not self._evaluates:
            return
        self._evaluates = False
        self.monitor.loader_end("validate", 0, ended=True)
        self.monitor.epoch_end("validate")
        self.monitor.stage_end("validate", back_to="train" if self.trains else None)
        self._batch = self._kept

    def _evaluation_start(self) -> None:
        self._evaluates = True
        self._kept, self._batch = self._batch, 0
        self.monitor.stage_start("validate")
        self.monitor.epoch_start("validate", int((self._state.epoch or 0.0) + 1e-6))

    def _use(self, model: Any) -> None:
        monitor = self.monitor
        device = device_of(model)
        monitor.training = training_facts(self._args)
        monitor.steps.use_device(device)
        monitor.memory.use_device(device)
        whole = strategy_of(self._args) == "ddp" or None
        if model is not None:
            monitor.replica.attach(model, replicated=whole, broadcast=whole)


def _tell_first(
    told: Callable[[BaseException], None],
    before: ExceptHook,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    told(error)
    before(kind, error, trace)


def training_facts(args: Any) -> TrainingFacts:
    """What stands in the arguments of the Trainer. ``max_steps`` as they were set: the Trainer's state counts steps by
    this rank's own loader."""
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
    """``fsdp``, ``deepspeed`` or ``ddp``; ``None`` for one process."""
    if getattr(args, "deepspeed", None):
        return "deepspeed"
    if getattr(args, "fsdp", None):
        return "fsdp"
    return "ddp" if args.world_size > 1 else None


def arguments(args: Any) -> tuple[Variable, ...]:
    """The arguments that were not left alone."""
    loaders = getattr(args, "accelerator_config", None)
    told = {name: getattr(args, name, default) for name, default in DEFAULTS.items()}
    told |= {name: getattr(loaders, name, default) for name, default in LOADER_DEFAULTS.items()}
    defaults = DEFAULTS | LOADER_DEFAULTS
    return tuple(Variable(name, str(value)) for name, value in told.items() if value != defaults[name])

"""``doctor.watch``: a loop without a framework, and one that Accelerate prepared.

with doctor.watch() as w:
    w.model(model)
    for batch in w.loader(loader):
        …
        w.step(loss=loss)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from doctor.core.facts import TORCH_SEED, Frame, Sampler, TrainingFacts, Variable
from doctor.monitor.integrations.adapter import Adapter, AdapterRun, guarded
from doctor.monitor.integrations.data_parallel import infer_data_parallel_rank
from doctor.monitor.integrations.deepspeed_engine import engine_steps, is_engine, with_engine_facts
from doctor.monitor.integrations.first_step import FirstStepObserver
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.torch_state import (
    backend,
    ddp_arguments,
    device_id,
    device_of,
    joins_uneven_inputs,
    replication,
    torch_rank,
    unwrapped,
)
from doctor.monitor.telemetry.data.loader_history import weak_reference
from doctor.monitor.telemetry.stacks.live_stacks import user_frame_above
from doctor.monitor.telemetry.stacks.loop_exits import LoopExits, loop_exits
from doctor.monitor.watch_session import WatchSession

T = TypeVar("T")

STAGES = ("train", "validate", "test", "predict")
"""Valid stages of a loader."""


class LoaderSlot(NamedTuple):
    """Identity of a loader within a loop."""

    stage: str
    number: int


class LoaderInSlot(Protocol):
    """A loader, and its identity within the loop."""

    slot: LoaderSlot

    @property
    def wrapped(self) -> Any:
        """The loader itself."""


class PlainRun(AdapterRun):
    """One watched run of a plain loop.

    ``steps``: optimizer steps so far; ``loss``: of the last step.
    """

    observes_first_step = True
    """Whether hooks observe clipping and precision until the first optimizer step is done."""

    def __init__(self, session: WatchSession) -> None:
        super().__init__(session)
        self.steps = 0
        self.loss: object = None
        self._wrapper: Callable[[], Any] = lambda: None
        self._active_loaders: list[LoaderInSlot] = []
        self._attached: dict[LoaderSlot, Callable[[], Any]] = {}
        self._passes: dict[LoaderSlot, int] = {}
        self._exits: dict[tuple[LoaderSlot, tuple[str, int]], LoopExits] = {}
        self._has_checked_start = False
        self._steps_before = 0
        self._first_step = FirstStepObserver()
        self._seed: str | None = None
        self._engine_steps: int | None = None

    @property
    def wrapper(self) -> Any:
        """The model as passed, which is not kept alive."""
        return self._wrapper()

    def use_model(self, module: Any) -> None:
        """Record the model as it is wrapped."""
        telemetry = self.telemetry
        self._wrapper = weak_reference(module)
        replicated, broadcast = replication(module)
        device = device_of(module)
        telemetry.steps.use_device(device)
        telemetry.memory.use_device(device)
        telemetry.replica.attach(unwrapped(module), replicated=replicated, broadcast=broadcast, wrapper=module)
        telemetry.replica.settings.last_loss = lambda: self.loss
        self._seed = value_or_default(lambda: str(sys.modules["torch"].initial_seed()), None)
        if is_engine(module):
            self._engine_steps = engine_steps(module)
            telemetry.replica.settings.use_optimizers(value_or_default(lambda: [module.basic_optimizer], []))
        if self.observes_first_step:
            value_or_default(lambda: self._first_step.start(module), None)
        value_or_default(self.watch_backward, None)
        self._refresh_facts()

    def restore(self) -> None:
        """Remove what observes the first step, and what the base class changed."""
        self._first_step.finish()
        super().restore()

    def attach(self, loader: LoaderInSlot) -> None:
        """Describe a loader unless it is known: it may be wrapped anew in every epoch."""
        known = self._attached.get(loader.slot)
        if known is None or known() is not loader.wrapped:
            self._attached[loader.slot] = weak_reference(loader.wrapped)
            self.telemetry.loaders.attach(*loader.slot, loader.wrapped)
            if self.telemetry.training.data_parallel_size is None:
                self._refresh_facts()

    def pass_start(self, loader: LoaderInSlot, exits: LoopExits) -> None:
        """Record the start of a pass; before the very first batch, all ranks are evaluated.

        ``exits``: of the loop.
        """
        self.attach(loader)
        # A counter of all steps leaves fewer to later passes; the first one shows whether it ends the loop.
        self.telemetry.loaders.loop_exits(*loader.slot, self._exits.setdefault((loader.slot, exits.place), exits))
        if exits.by_next:
            self.telemetry.loaders.taken_by_next(*loader.slot)
        self._active_loaders.append(loader)
        self.telemetry.stage_start(loader.slot.stage)
        if not self._has_checked_start:
            self._has_checked_start = True
            self._refresh_facts()
            self.session.check_start()
        self.telemetry.epoch_start(loader.slot.stage, self._passes.get(loader.slot, 0))

    def _refresh_facts(self) -> None:
        """Read the facts again: groups, samplers and joined inputs may be new."""
        loaders = self.telemetry.loaders.facts().loaders
        facts = plain_facts(self.wrapper, [one.sampler for one in loaders if one.sampler])
        seed = (Variable(TORCH_SEED, self._seed),) if self._seed is not None else ()
        self.telemetry.training = msgspec.structs.replace(
            facts,
            precision=facts.precision or self._first_step.precision,
            arguments=(*facts.arguments, *seed, *self._first_step.settings),
        )

    def _after_first_step(self) -> None:
        """Record what the first optimizer step showed. ``w.step()`` may be called before the optimizer steps."""
        observer = self._first_step
        if observer.optimizers or self.steps > 1:
            observer.finish()
            if self._engine_steps is None:
                self.telemetry.replica.settings.use_optimizers(observer.optimizers)
            self._refresh_facts()

    def step(self, loss: object) -> None:
        """Record an optimizer step. (step path)"""
        self.loss = loss
        if self._engine_steps is not None and not self._has_engine_stepped():
            return
        self.steps += 1
        self.telemetry.optimizer_step()
        if self._first_step.is_active:
            self._after_first_step()

    def _has_engine_stepped(self) -> bool:
        """Return whether DeepSpeed's engine took a step: its ``step()`` is called after every accumulated batch."""
        known, self._engine_steps = self._engine_steps, engine_steps(self.wrapper)
        return known != self._engine_steps

    def batch_start(self, loader: LoaderInSlot, number: int, batch: object) -> None:
        """Record a batch. (step path)"""
        stage, index = loader.slot
        if stage == "train":
            self._steps_before = self.steps
        self.telemetry.batch_start(stage, number, index, batch)

    def batch_end(self, loader: LoaderInSlot) -> None:
        """Record the end of a batch when the loop asks for the next one. (step path)"""
        if loader.slot.stage != "train":
            self.telemetry.batch_end(loader.slot.stage)
            return
        loss, self.loss = self.loss, None
        self.telemetry.batch_end("train", step=self.steps, loss=self.take_loss(loss))

    def batch_left(self, loader: LoaderInSlot) -> None:
        """Record that the loop was left within a batch, which is complete if the optimizer stepped."""
        if loader.slot.stage == "train" and self.steps > self._steps_before:
            self.batch_end(loader)

    def pass_end(self, loader: LoaderInSlot, *, ended: bool, left_at: Frame | None = None) -> None:
        """Record the end of a pass; ``ended``: the loader was exhausted, or else left at the line ``left_at``."""
        telemetry, (stage, index) = self.telemetry, loader.slot
        telemetry.loader_end(stage, index, ended=ended, left_at=left_at)
        telemetry.epoch_end(stage)
        self._passes[loader.slot] = self._passes.get(loader.slot, 0) + 1
        self._active_loaders = [one for one in self._active_loaders if one is not loader]
        if self._active_loaders:
            outer = self._active_loaders[-1].slot
            telemetry.stage_end(stage, back_to=outer.stage)
            telemetry.progress.epoch = self._passes.get(outer, 0)


class WatchedLoader(Generic[T]):
    """A watched loader, with the loader's own attributes; every pass over it is an epoch."""

    def __init__(self, watch: Watch, loader: Iterable[T], slot: LoaderSlot) -> None:
        self._watch = watch
        self.wrapped = loader
        self.slot = slot

    def __iter__(self) -> Iterator[T]:
        """Iterate over the loader and record the end of the pass, complete or not."""
        watch, ended, left_at = self._watch, False, None
        watch._pass_start(self, sys._getframe().f_back)
        try:
            for number, batch in enumerate(self.wrapped):
                watch._batch_start(self, number, batch)
                yield batch
                watch._batch_end(self)
            ended = True
        except GeneratorExit:
            left_at = user_frame_above(sys._getframe().f_back)
            watch._batch_left(self)
            raise
        finally:
            watch._pass_end(self, ended, left_at)

    def __len__(self) -> int:
        """Return the length of the loader."""
        return len(self.wrapped)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as sampler and dataset."""
        if name == "wrapped":  # requested before it is set, as copying does
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class Watch(Adapter[PlainRun]):
    """Watches what happens within ``with``::

    with doctor.watch() as w:
        w.model(model)
        for batch in w.loader(loader):
            ...
            w.step(loss=loss)
    """

    def __enter__(self) -> Watch:
        """Start watching. The process group may exist already; else RANK and WORLD_SIZE are used."""
        self._begin(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; an exception propagates."""
        self._finish(error)

    def loader(self, loader: Iterable[T], stage: str = "train", *, index: int = 0) -> WatchedLoader[T]:
        """Return a watched ``loader`` to iterate over. ``index``: of several loaders of one stage.

        Raises:
            ValueError: ``stage`` is not ``train``, ``validate``, ``test`` or ``predict``.
        """
        if stage not in STAGES:
            raise ValueError(f"stage is {stage!r}; expected {' or '.join(map(repr, STAGES))}")
        watched = WatchedLoader(self, loader, LoaderSlot(stage, index))
        self._attach(watched)
        return watched

    @guarded
    def model(self, run: PlainRun, module: object) -> None:
        """Pass the model as it is wrapped, before the first batch.

        Wrapped means by DistributedDataParallel, FSDP or ``fully_shard``. The wrapper tells which ranks train it
        together on different data; without a wrapper, the samplers do.
        """
        run.use_model(module)

    @guarded
    def step(self, run: PlainRun, loss: object = None) -> None:
        """Record an optimizer step; call it on every rank after ``optimizer.step()``.

        Of DeepSpeed's engine, after each ``engine.step()``, of which those count that end an accumulation.
        Replicas are compared at equal steps. ``loss``: a tensor, which stays on its device.
        """
        run.step(loss)

    @guarded
    def mark(self, run: PlainRun, point: str) -> None:
        """Record a point: ``forward``, ``backward``, ``optimizer``, ``checkpoint``.

        Optional: it refines the time breakdown, and allows more time for a checkpoint.
        """
        run.telemetry.mark(point)

    def _start(self) -> PlainRun:
        process = torch_rank(os.environ)
        return PlainRun(self._new_session(process.rank, process.world_size, Path.cwd(), plain_facts(None)))

    @guarded
    def _finish(self, run: PlainRun, error: BaseException | None) -> None:
        self._end_run(error)

    @guarded
    def _attach(self, run: PlainRun, loader: WatchedLoader[Any]) -> None:
        run.attach(loader)

    @guarded
    def _pass_start(self, run: PlainRun, loader: WatchedLoader[Any], caller: FrameType | None) -> None:
        run.pass_start(loader, value_or_default(lambda: loop_exits(caller), LoopExits()))

    @guarded
    def _batch_start(self, run: PlainRun, loader: WatchedLoader[Any], number: int, batch: object) -> None:
        run.batch_start(loader, number, batch)

    @guarded
    def _batch_end(self, run: PlainRun, loader: WatchedLoader[Any]) -> None:
        run.batch_end(loader)

    @guarded
    def _batch_left(self, run: PlainRun, loader: WatchedLoader[Any]) -> None:
        run.batch_left(loader)

    @guarded
    def _pass_end(self, run: PlainRun, loader: WatchedLoader[Any], ended: bool, left_at: Frame | None) -> None:
        run.pass_end(loader, ended=ended, left_at=left_at)


def plain_facts(module: object, samplers: Iterable[Sampler] = ()) -> TrainingFacts:
    """Return the known facts of process group, wrapper (``module``) and samplers."""
    process, device = torch_rank(os.environ), device_of(module)
    placement = infer_data_parallel_rank(module, samplers, process)
    facts = TrainingFacts(
        framework="plain",
        release=value_or_default(lambda: str(sys.modules["torch"].__version__), None),
        strategy=None if module is None else type(module).__name__,
        backend=backend(),
        device=None if device is None else str(device),
        device_id=device_id(device),
        world_size=process.world_size,
        data_parallel_rank=placement.rank,
        data_parallel_size=placement.size,
        data_parallel_root=placement.root,
        joins=joins_uneven_inputs(module),
        arguments=ddp_arguments(module),
    )
    return with_engine_facts(facts, module) if is_engine(module) else facts


watch = Watch
"""Public alias: ``with doctor.watch() as w``."""

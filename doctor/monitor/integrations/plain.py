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
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from doctor.core.facts import Sampler, TrainingFacts
from doctor.monitor.integrations.adapter import Adapter, AdapterRun, guarded
from doctor.monitor.integrations.data_parallel import infer_data_parallel_rank
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.torch_state import (
    backend,
    device_id,
    device_of,
    joins_uneven_inputs,
    replication,
    torch_rank,
    unwrapped,
)
from doctor.monitor.watch_session import WatchSession

T = TypeVar("T")

STAGES = ("train", "validate", "test", "predict")
"""What a loader may be for."""


class LoaderSlot(NamedTuple):
    """What tells the loaders of a loop apart."""

    stage: str
    number: int


class PlainRun(AdapterRun):
    """``wrapper``: the model as it was told. ``steps``: of the optimiser; ``loss``: of the last one."""

    def __init__(self, attendance: WatchSession) -> None:
        super().__init__(attendance)
        self.wrapper: object = None
        self.steps = 0
        self.loss: object = None
        self._under_way: list[WatchedLoader[Any]] = []
        self._attached: dict[LoaderSlot, object] = {}
        self._passes: dict[LoaderSlot, int] = {}
        self._has_met = False
        self._steps_before = 0

    def use_model(self, module: Any) -> None:
        """The model as it is wrapped."""
        monitor = self.monitor
        self.wrapper = module
        replicated, broadcast = replication(module)
        device = device_of(module)
        monitor.steps.use_device(device)
        monitor.memory.use_device(device)
        monitor.replica.attach(unwrapped(module), replicated=replicated, broadcast=broadcast)
        self._look_again()

    def attach(self, loader: WatchedLoader[Any]) -> None:
        """Describe a loader, unless it is the one that is known: it may be wrapped anew for every epoch."""
        if self._attached.get(loader.slot) is not loader.wrapped:
            self._attached[loader.slot] = loader.wrapped
            self.monitor.loaders.attach(*loader.slot, loader.wrapped)
            if self.monitor.training.data_parallel_size is None:
                self._look_again()

    def pass_start(self, loader: WatchedLoader[Any]) -> None:
        """A pass over ``loader`` begins. Before the first batch of all, the ranks are judged."""
        self.attach(loader)
        self._under_way.append(loader)
        self.monitor.stage_start(loader.slot.stage)
        if not self._has_met:
            self._has_met = True
            self._look_again()
            self.attendance.meet()
        self.monitor.epoch_start(loader.slot.stage, self._passes.get(loader.slot, 0))

    def _look_again(self) -> None:
        """Groups and samplers may have been made since the beginning, and uneven inputs may be joined by now."""
        loaders = self.monitor.loaders.facts().loaders
        self.monitor.training = plain_facts(self.wrapper, [one.sampler for one in loaders if one.sampler])

    def step(self, loss: object) -> None:
        """The optimizer has stepped. (step path)"""
        self.steps += 1
        self.loss = loss
        self.monitor.optimizer_step()

    def batch_start(self, loader: WatchedLoader[Any], number: int, batch: object) -> None:
        """A batch is there. (step path)"""
        stage, index = loader.slot
        if stage == "train":
            self._steps_before = self.steps
        self.monitor.batch_start(stage, number, index, batch)

    def batch_end(self, loader: WatchedLoader[Any]) -> None:
        """The loop comes back for more. (step path)"""
        if loader.slot.stage != "train":
            self.monitor.batch_end(loader.slot.stage)
            return
        loss, self.loss = self.loss, None
        self.monitor.batch_end("train", step=self.steps, loss=loss)

    def batch_left(self, loader: WatchedLoader[Any]) -> None:
        """The loop is left within a batch, which is done where the optimizer has stepped in it."""
        if loader.slot.stage == "train" and self.steps > self._steps_before:
            self.batch_end(loader)

    def pass_end(self, loader: WatchedLoader[Any], *, ended: bool) -> None:
        """The loop is over; ``ended``: the loader gave nothing more."""
        monitor, (stage, index) = self.monitor, loader.slot
        monitor.loader_end(stage, index, ended=ended)
        monitor.epoch_end(stage)
        self._passes[loader.slot] = self._passes.get(loader.slot, 0) + 1
        self._under_way = [one for one in self._under_way if one is not loader]
        if self._under_way:
            outer = self._under_way[-1].slot
            monitor.stage_end(stage, back_to=outer.stage)
            monitor.progress.epoch = self._passes.get(outer, 0)


class WatchedLoader(Generic[T]):
    """A loader while it is watched. Every pass over it is an epoch; all else is asked of the loader itself."""

    def __init__(self, watch: Watch, loader: Iterable[T], slot: LoaderSlot) -> None:
        self._watch = watch
        self.wrapped = loader
        self.slot = slot

    def __iter__(self) -> Iterator[T]:
        """A pass over the loader, whose end is told whether the loop came to it or left it before."""
        watch, ended = self._watch, False
        watch._pass_start(self)
        try:
            for number, batch in enumerate(self.wrapped):
                watch._batch_start(self, number, batch)
                yield batch
                watch._batch_end(self)
            ended = True
        except GeneratorExit:
            watch._batch_left(self)
            raise
        finally:
            watch._pass_end(self, ended)

    def __len__(self) -> int:
        """Batches, as the loader says."""
        return len(self.wrapped)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Sampler, dataset and all else of the loader."""
        if name == "wrapped":  # asked for before it is there, as copying does
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
        """Begin to watch. The process group may be there already, or be told by RANK and WORLD_SIZE."""
        self._begin(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The end, by an exception or without; it goes on to where it was going."""
        self._finish(error)

    def loader(self, loader: Iterable[T], stage: str = "train", *, index: int = 0) -> WatchedLoader[T]:
        """``loader``, to be iterated over in its place. ``index`` tells several loaders of one stage apart.

        Raises:
            ValueError: ``stage`` is none of ``train``, ``validate``, ``test`` and ``predict``.
        """
        if stage not in STAGES:
            raise ValueError(f"stage is {stage!r}; it may be {' or '.join(map(repr, STAGES))}")
        watched = WatchedLoader(self, loader, LoaderSlot(stage, index))
        self._attach(watched)
        return watched

    @guarded
    def model(self, run: PlainRun, module: object) -> None:
        """Tell the model, as it is wrapped (DistributedDataParallel, FSDP, ``fully_shard``), before the first batch.
        Which ranks train it together, each on its own data, is known by the wrapper; without one by the samplers."""
        run.use_model(module)

    @guarded
    def step(self, run: PlainRun, loss: object = None) -> None:
        """The optimizer has stepped; to be called on every rank, after ``optimizer.step()``: replicas are compared at
        equal steps. ``loss``: a tensor, which stays on its device."""
        run.step(loss)

    @guarded
    def mark(self, run: PlainRun, point: str) -> None:
        """A point is reached: ``forward``, ``backward``, ``optimizer``, ``checkpoint``. Nothing depends on it but how
        exactly it is told where time goes, and that a checkpoint is given more of it."""
        run.monitor.mark(point)

    def _start(self) -> PlainRun:
        here = torch_rank(os.environ)
        return PlainRun(self._attendance(here.rank, here.world_size, Path.cwd(), plain_facts(None)))

    @guarded
    def _finish(self, run: PlainRun, error: BaseException | None) -> None:
        self._leave(error)

    @guarded
    def _attach(self, run: PlainRun, loader: WatchedLoader[Any]) -> None:
        run.attach(loader)

    @guarded
    def _pass_start(self, run: PlainRun, loader: WatchedLoader[Any]) -> None:
        run.pass_start(loader)

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
    def _pass_end(self, run: PlainRun, loader: WatchedLoader[Any], ended: bool) -> None:
        run.pass_end(loader, ended=ended)


def plain_facts(module: object, samplers: Iterable[Sampler] = ()) -> TrainingFacts:
    """Who trains, by the process group, and the model's wrapper (``module``) and the samplers as far as they are known
    yet."""
    here, device = torch_rank(os.environ), device_of(module)
    share = infer_data_parallel_rank(module, samplers, here)
    return TrainingFacts(
        framework="plain",
        release=value_or_default(lambda: str(sys.modules["torch"].__version__), None),
        strategy=None if module is None else type(module).__name__,
        backend=backend(),
        device=None if device is None else str(device),
        device_id=device_id(device),
        world_size=here.world_size,
        data_parallel_rank=share.rank,
        data_parallel_size=share.size,
        data_parallel_root=share.root,
        joins=joins_uneven_inputs(module),
    )


watch = Watch
"""The name it is known by: ``with doctor.watch() as w``."""

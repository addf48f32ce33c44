"""Trains some steps with real weights on a real device, in a process per rank.

After a failure, the last line of stderr is the error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.measure.throughput import RankMeasurement, TrainingTask
from doctor.estimate.memory.optimizers import optimizers_of
from doctor.estimate.memory.strategies import low_dtype, true_dtype
from doctor.estimate.tracing.blocks import checkpointed, repeated_blocks
from doctor.estimate.tracing.factory import call_factory, find_factory
from doctor.estimate.tracing.loss import is_lightning, loss_of
from doctor.estimate.tracing.pytree import map_tensors, samples_in
from doctor.estimate.tracing.trainer_stub import attached

WINDOWS, MOST = 3, 100
"""Windows that are timed, after two warm-up steps, and most steps of each."""
WINDOW = 1.5
"""Seconds of all windows, if the deadline allows it."""


class MeasuredTraining(NamedTuple):
    """What is trained. ``wrapped``: returns the loss of a batch. ``size``: samples of a micro-batch."""

    wrapped: Any
    batch: Any
    size: int
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    device: torch.device


class LossModule(torch.nn.Module):
    """Returns the loss of a batch from ``forward``, as DistributedDataParallel needs it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        loss = loss_of(self.module, batch, 0)
        if loss is None:
            raise UnusableError(
                "the module returns no loss for the backward pass; modules that optimize manually cannot be measured"
            )
        return loss


def main(text: str) -> None:
    """Run the :class:`TrainingTask` in JSON, and write its :class:`RankMeasurement` to stdout; prints go to stderr."""
    task = msgspec.json.decode(text, type=prepared(TrainingTask))
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    measurement = work(task)
    with answer:
        answer.write(msgspec.json.encode(measurement))
    os._exit(0)  # without waiting for threads of a process group or of the factory


def work(task: TrainingTask) -> RankMeasurement:
    """Run and time some steps."""
    began = time.monotonic()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if task.ranks > 1:
        method = f"file://{task.meeting}"
        torch.distributed.init_process_group("gloo", init_method=method, rank=task.rank, world_size=task.ranks)
    made = call_factory(find_factory(task.factory, Path(task.directory)), task.factory)
    with contextlib.ExitStack() as stack:
        if is_lightning(made.module):
            stack.enter_context(attached(made.module, made.trainer, task.ranks, torch.Tensor.backward))
        if task.plan.checkpointing:
            stack.enter_context(checkpointed(repeated_blocks(made.module)))
        training = prepare(task, made.module, made.batch, made.trainer, device)
        windows, steps = timed(functools.partial(step, training, task.plan), task, device, began)
    return RankMeasurement(
        samples=WINDOWS * steps * training.size * task.plan.accumulate,
        seconds=sum(windows),
        unsteady=(max(windows) - min(windows)) / 2 / statistics.median(windows),
        peak_bytes=peak(device),
        batch_size=training.size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    )


def prepare(
    task: TrainingTask, module: torch.nn.Module, batch: Any, trainer: Any, device: torch.device
) -> MeasuredTraining:
    """Place module, batch and optimizers on the device."""
    plan, dtype = task.plan, true_dtype(task.plan)
    module.to(device, dtype).train()
    size = samples_in(batch)
    samples = (plan.batch_size or size) * task.copies
    if not size and samples != size:
        raise UnusableError("the tensors of the batch have no common batch dimension")

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return fitted(tensor, size, samples).to(device, dtype if tensor.is_floating_point() else None)

    batch = map_tensors(batch, placed)
    with_loss = LossModule(module)
    wrapped = torch.nn.parallel.DistributedDataParallel(with_loss) if task.ranks > 1 else with_loss
    scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "16-mixed")
    return MeasuredTraining(wrapped, batch, samples, optimizers_of(module, trainer, plan.optimizer), scaler, device)


def fitted(tensor: torch.Tensor, size: int, samples: int) -> torch.Tensor:
    """Repeat or cut ``tensor`` to ``samples`` samples, unless its first dimension is not ``size``."""
    if not tensor.dim() or len(tensor) != size or samples == size:
        return tensor
    return tensor[torch.arange(samples) % size]


def step(training: MeasuredTraining, plan: TrainingPlan) -> None:
    """Run one step of the optimizers."""
    wrapped, batch, _, optimizers, scaler, device = training
    for number in range(plan.accumulate):
        waits = number < plan.accumulate - 1 and isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
        with wrapped.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast(device.type, low_dtype(plan), enabled=plan.precision.endswith("-mixed")):
                loss = wrapped(batch) / plan.accumulate
            scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()


def timed(one: Callable[[], None], task: TrainingTask, device: torch.device, began: float) -> tuple[list[float], int]:
    """Return the seconds of each window, and its number of steps, on which all ranks agree."""
    one()
    warm, now = _seconds(one, 1, device), time.monotonic()
    window = min(WINDOW, (task.seconds - (now - began)) / 4) / WINDOWS
    steps = agreed(max(1, min(MOST, int(window / max(1e-6, warm)))), task)
    return [_seconds(one, steps, device) for _ in range(WINDOWS)], steps


def _seconds(one: Callable[[], None], steps: int, device: torch.device) -> float:
    _sync(device)
    before = time.monotonic()
    for _ in range(steps):
        one()
    _sync(device)
    return time.monotonic() - before


def agreed(count: int, task: TrainingTask) -> int:
    """Return the count of rank 0 on all ranks."""
    if task.ranks == 1:
        return count
    shared = torch.tensor([count])
    torch.distributed.broadcast(shared, 0)
    return int(shared)


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device) -> int:
    """Return the peak in bytes: reserved by the allocator on a GPU, or else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""One process: some real training steps, and the largest memory that torch's allocator gave out for them.

    python benchmarks/estimate_truth.py DEVICE CASE

``CASE``: a :class:`Case` as JSON. ``DEVICE``: ``cuda``, where ``torch.cuda.max_memory_allocated`` answers, or ``cpu``,
where torch's profiler notes each allocation; kernels of optimizers are those that torch takes on CUDA (``foreach``).
Prints a :class:`Truth` as JSON. Of two ranks (RANK and WORLD_SIZE as torchrun sets them) each runs this program; where
they shard on a CPU, one is enough: the other's part comes from torch's ``fake`` group, which allocates nothing, while
the copies that Gloo makes there are none that NCCL would make, and others from run to run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from doctor.estimate.data_model import TrainingPlan  # noqa: E402 - the path comes first

STEPS = 3
PHASES = ("forward", "backward", "optimizer step")
TYPES = {"16-mixed": "float16", "16-true": "float16", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16"}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained: ``factory`` as the command takes it, and ``blocks``: the class of the blocks that
    ``plan.checkpointing`` runs again and FSDP shards one by one."""

    factory: str
    plan: TrainingPlan
    blocks: str = ""

    def processes(self, device: str) -> int:
        """How many have to run."""
        return 1 if device == "cpu" and self.plan.strategy == "fsdp2" else self.plan.world_size

    @property
    def name(self) -> str:
        """The factory and all of the plan that is not as usual."""
        plan, words = self.plan, [self.factory.rpartition(":")[2]]
        words += [f"batch {plan.batch_size}"] if plan.batch_size else []
        words += [plan.optimizer] if plan.optimizer else []
        words += [plan.precision] if plan.precision != "32-true" else []
        words += ["checkpointing"] if plan.checkpointing else []
        words += [f"accumulate {plan.accumulate}"] if plan.accumulate > 1 else []
        words += [f"{plan.strategy} x {plan.world_size}"] if plan.strategy != "none" else []
        return ", ".join(words)


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """``peak``: bytes at most from the first step on. ``reserved``: what the allocator had of the device at most, and
    ``used``: what this process took of it in all, ``None`` on a CPU. ``moment``: of the peak, where it is known.
    ``settled``: bytes at the end."""

    peak: int
    moment: str = ""
    reserved: int | None = None
    used: int | None = None
    settled: int = 0


def main(device: str, case: Case) -> Truth:
    """Run it."""
    watch = on_cuda if device == "cuda" else on_cpu
    with contextlib.ExitStack() as stack:
        if case.plan.world_size > 1:
            stack.enter_context(group(device, case))
        return watch(functools.partial(prepare, case, device))


def on_cpu(prepare: Callable[[], Callable[[], None]]) -> Truth:
    """By torch's profiler: it counts from its start on, so it starts before the model is made."""
    from torch.profiler import ProfilerActivity, profile, record_function

    optimizers = importlib.import_module("torch.optim.optimizer")
    everywhere = mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", return_value=["cpu"])
    with everywhere, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps = prepare()
        with record_function("doctor: steps"):
            steps()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return by_trace(json.loads(path.read_bytes())["traceEvents"])


def by_trace(events: list[dict[str, Any]]) -> Truth:
    """From the events of a profile with memory: the largest running total since the first step began."""
    begin = min(event["ts"] for event in events if event.get("name") == "doctor: steps" and "dur" in event)
    totals = [
        (event["args"]["Total Allocated"], event["ts"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    peak, at = max((total for total in totals if total[1] >= begin), default=max(totals))
    held = (
        event["name"]
        for event in events
        if event.get("name") in PHASES and "dur" in event and event["ts"] <= at <= event["ts"] + event["dur"]
    )
    return Truth(peak=peak, moment=next(held, ""), settled=max(totals, key=lambda total: total[1])[0])


def on_cuda(prepare: Callable[[], Callable[[], None]]) -> Truth:
    """By torch's allocator, and by the driver."""
    import torch

    before = in_use()
    steps = prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    steps()
    torch.cuda.synchronize()
    return Truth(
        peak=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.max_memory_reserved(),
        used=in_use() - before,
        settled=torch.cuda.memory_allocated(),
    )


def in_use() -> int:
    """Bytes of the first GPU that the driver says are taken; unlike CUDA's own question this makes no context."""
    import pynvml

    pynvml.nvmlInit()  # type: ignore[no-untyped-call]
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def group(device: str, case: Case) -> Iterator[None]:
    """The default process group; two ranks of one GPU can't meet over NCCL."""
    import torch

    distributed: Any = torch.distributed
    if case.processes(device) == 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.plan.world_size)
    else:
        distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def prepare(case: Case, device: str) -> Callable[[], None]:
    """The steps of ``case``, to be run; its model lies on the device."""
    import torch

    torch.manual_seed(0)
    module_name, _, name = case.factory.partition(":")
    module, batch = getattr(importlib.import_module(module_name), name)()
    batch = resized(batch, case.plan.batch_size)
    if hasattr(module, "configure_optimizers"):
        return functools.partial(fit, module, batch, case.plan, device)
    plan, dtype = case.plan, getattr(torch, TYPES.get(case.plan.precision, "float32"))
    is_low = plan.precision.endswith("-true") and dtype is not torch.float32
    module.to(device, dtype if is_low else None)
    batch = each(batch, lambda tensor: tensor.to(device, dtype if is_low and tensor.is_floating_point() else None))
    repeated = [child for child in module.modules() if type(child).__name__ == case.blocks]
    wrapped = wrap(module, repeated, plan, device)
    optimizer = optimizer_of(plan.optimizer or "adamw", module)
    return functools.partial(train, wrapped, batch, optimizer, plan, device)


def wrap(module: Any, repeated: list[Any], plan: TrainingPlan, device: str) -> Any:
    """As the plan's strategy wants it."""
    if plan.checkpointing:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(module, check_fn=lambda child: any(child is one for one in repeated))
    if plan.strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module)
    if plan.strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (plan.world_size,))
        for block in repeated:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module


def optimizer_of(name: str, module: Any) -> Any:
    """Of ``torch.optim``, by its name in any case."""
    import torch

    kind = {one.lower(): getattr(torch.optim, one) for one in dir(torch.optim)}[name.lower()]
    return kind([one for one in module.parameters() if one.requires_grad], lr=1e-3)


def train(module: Any, batch: Any, optimizer: Any, plan: TrainingPlan, device: str) -> None:
    """Steps of an ordinary loop."""
    import torch
    from torch.profiler import record_function

    mixed = plan.precision.endswith("-mixed")
    scaler = torch.amp.GradScaler(device, enabled=plan.precision == "16-mixed")
    dtype = getattr(torch, TYPES.get(plan.precision, "float32"))
    for _ in range(STEPS):
        for number in range(plan.accumulate):
            with between_ranks(module, is_last=number == plan.accumulate - 1):
                with record_function("forward"), torch.autocast(device, dtype, enabled=mixed):
                    loss = loss_of(module, batch) / plan.accumulate
                with record_function("backward"):
                    scaler.scale(loss).backward()
                del loss
        if plan.world_size > 1:
            # Gloo's thread lets go of a bucket a moment later; what it frees itself, the profiler does not see.
            time.sleep(0.2)
        with record_function("optimizer step"):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def between_ranks(module: Any, *, is_last: bool) -> Any:
    """Gradients are exchanged after the last micro-batch alone, where the wrapper can do so."""
    return module.no_sync() if hasattr(module, "no_sync") and not is_last else contextlib.nullcontext()


def loss_of(module: Any, batch: Any) -> Any:
    """What the module gives, or the ``loss`` in it."""
    given = (
        module(**batch) if isinstance(batch, dict) else module(*batch) if isinstance(batch, tuple) else module(batch)
    )
    return getattr(given, "loss", given)


def fit(module: Any, batch: Any, plan: TrainingPlan, device: str) -> None:
    """Steps of a Trainer."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    trainer = Trainer(
        accelerator=device,
        devices=1,
        max_steps=STEPS,
        precision=plan.precision,
        accumulate_grad_batches=plan.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [batch] * (STEPS * plan.accumulate)
    trainer.fit(module, DataLoader(batches, batch_size=None, collate_fn=lambda one: one))  # type: ignore[arg-type]


def resized(batch: Any, size: int | None) -> Any:
    """So many samples of it, over and over where there are fewer: along the dimension that all tensors begin with."""
    import torch

    return batch if size is None else each(batch, lambda tensor: tensor[torch.arange(size) % len(tensor)])


def each(batch: Any, change: Callable[[Any], Any]) -> Any:
    """With every tensor changed."""
    if isinstance(batch, dict):
        return {name: change(tensor) for name, tensor in batch.items()}
    return tuple(change(tensor) for tensor in batch) if isinstance(batch, tuple) else change(batch)


if __name__ == "__main__":
    found = main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Case))
    if os.environ.get("RANK", "0") == "0":
        print(msgspec.json.encode(found).decode())

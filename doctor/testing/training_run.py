"""A healthy job that trains, for the cases of checks: a job of ``healthy()``, and the facts of its monitor."""

from __future__ import annotations

import msgspec

from doctor.core import facts
from doctor.testing.cases import GIB, JobBuilder, healthy

NOON = 1_760_000_000.0
"""Time of the facts of these jobs, seconds since the epoch."""

TRAIN_STEP = facts.Frame("/home/me/train.py", 42, "training_step", user=True)
BACKWARD = facts.Frame("/opt/env/lib/python3.11/site-packages/torch/autograd/graph.py", 829, "_engine_run_backward")


def running(
    hosts: int = 1, per_host: int = 2, *, gpus: int | None = None, epoch: int = 1, batch: int = 40
) -> JobBuilder:
    """Return a healthy Lightning DDP job in an epoch of 100 batches, with validation after each epoch. ``gpus``: see
    :func:`doctor.testing.cases.healthy`."""
    sketch = healthy(hosts, per_host, gpus=gpus)
    world = hosts * per_host
    on_gpu = gpus != 0
    sketch = sketch.put(facts.HostUseFacts(seconds=60.0, cpu_periods=0, segments=100_000, retransmitted=10))
    for rank in range(world):
        for section in _sections(rank, rank % per_host, world, on_gpu, epoch, batch):
            sketch = sketch.put(section, ranks=(rank,))
    return sketch


def _sections(rank: int, local: int, world: int, on_gpu: bool, epoch: int, batch: int) -> tuple[facts.Section, ...]:
    checksums = (facts.Checksum(50, "1f00"), facts.Checksum(100, "2e00"))
    return (
        _training(rank, local, world, on_gpu),
        _progress(local, epoch, batch),
        _loaders(rank, world, epoch, batch),
        _steps(epoch * 100 + batch),
        _memory(local, on_gpu, epoch * 100 + batch),
        _model(),
        facts.ReplicaFacts(checksums=checksums, losses=epoch * 100 + batch),
        recorder(world, epoch * 100 + batch),
    )


def _training(rank: int, local: int, world: int, on_gpu: bool) -> facts.TrainingFacts:
    return facts.TrainingFacts(
        framework="lightning",
        release="2.6.1",
        strategy="ddp",
        backend="nccl" if on_gpu else "gloo",
        device=f"cuda:{local}" if on_gpu else "cpu",
        device_id=f"0000:{0x10 + local:02x}:00.0" if on_gpu else None,
        world_size=world,
        data_parallel_rank=rank,
        data_parallel_size=world,
        precision="32-true",
        max_epochs=10,
        seed=7,
        checkpoints="/home/me/runs/checkpoints",
        arguments=(facts.Variable("max_epochs", "10"),),
    )


def _progress(local: int, epoch: int, batch: int) -> facts.ProgressFacts:
    return facts.ProgressFacts(
        run="r1",
        state="running",
        pid=10_000 + local,
        at=NOON,
        stage="train",
        point="backward",
        epoch=epoch,
        step=epoch * 100 + batch,
        batch=batch,
        loader=0,
        passed=500,
        idle=0.1,
        limit=8.0,
        stack=(BACKWARD, TRAIN_STEP),
        stack_from="interpreter",
        kernel_state="S",
        ended=tuple(facts.EpochEnd("train", 0, one, 100) for one in range(epoch)),
        recent=(
            facts.PointInTime("train", "data", batch - 1, NOON - 0.4),
            facts.PointInTime("train", "step", batch, NOON - 0.3),
            facts.PointInTime("train", "backward", batch, NOON - 0.1),
        ),
    )


def _loaders(rank: int, world: int, epoch: int, batch: int) -> facts.LoaderFacts:
    sampler = facts.Sampler("DistributedSampler", True, world, rank, seed=0, epoch=epoch, shuffle=True, pads=True)
    epochs = tuple(
        facts.LoaderEpoch(
            one,
            drawn=f"d{one}-{rank}",
            content=f"c{one}-{rank}",
            first=(one * 1000 + rank, one * 1000 + rank + world),
            batches=100 if one < epoch else batch,
            samples=(100 if one < epoch else batch) * 32,
            sizes=(32,),
            ended=one < epoch,
        )
        for one in range(epoch + 1)
    )
    train = facts.Loader(
        "train",
        loader="DataLoader",
        dataset="Images",
        length=100,
        dataset_length=100 * 32 * world,
        batch_size=32,
        batch_sampler="BatchSampler",
        drop_last=False,
        sampler=sampler,
        workers=2,
        epochs=epochs,
    )
    return facts.LoaderFacts(loaders=(train,))


def _steps(seen: int) -> facts.StepFacts:
    window = facts.Window(0, 20, 0.4, data=0.01, forward=0.1, backward=0.25, optimizer=0.03, other=0.01, slowest=0.5)
    starts = range(max(0, seen - 100) // 20 * 20, seen // 20 * 20, 20)
    each = {"data": 0.01, "forward": 0.1, "backward": 0.25, "optimizer": 0.03, "batch-end": 0.01}
    spans = tuple(
        facts.TimeSpan(first, min(16, seen - first), tuple(16 * each.get(part, 0.0) for part in facts.TIME_PARTS))
        for first in range(0, seen, 16)
    )
    return facts.StepFacts(
        windows=tuple(msgspec.structs.replace(window, first_step=first) for first in starts),
        seen=seen,
        spans=spans,
        span_batches=16,
    )


def _memory(local: int, on_gpu: bool, step: int) -> facts.RunMemoryFacts:
    device = {"allocated": 20 * GIB, "reserved": 30 * GIB, "peak": 28 * GIB, "device_used": 31 * GIB} if on_gpu else {}
    samples = tuple(
        facts.MemorySample(
            at_step,
            at=NOON - (step - at_step) * 0.4,
            **device,
            resident=4 * GIB,
            workers=2 * GIB,
            host_available=1000 * GIB,
            units=32,
        )
        for at_step in range(50, step + 1, 50)
    )
    if not on_gpu:
        return facts.RunMemoryFacts(device="cpu", resident=4 * GIB, samples=samples)
    return facts.RunMemoryFacts(
        device=f"cuda:{local}",
        device_id=f"0000:{0x10 + local:02x}:00.0",
        allocator="native",
        total=80 * GIB,
        device_free=49 * GIB,
        allocated=20 * GIB,
        reserved=30 * GIB,
        peak_allocated=28 * GIB,
        peak_reserved=30 * GIB,
        inactive=GIB,
        foreign=GIB,
        retries=0,
        failures=0,
        processes=(facts.GpuProcess(10_000 + local, 31 * GIB, "python"),),
        resident=4 * GIB,
        samples=samples,
    )


def _model() -> facts.ModelFacts:
    tensors = (
        facts.TensorShape("layer.weight", (10, 32), "float32"),
        facts.TensorShape("layer.bias", (10,), "float32"),
    )
    return facts.ModelFacts(
        name="Net",
        parameters=330,
        trainable=330,
        count=2,
        digest="5f0c2a91",
        tensors=tensors,
        replicated=True,
        broadcast=True,
        initial="0",
    )


def recorder(world: int, sequence: int, *, members: tuple[int, ...] | None = None) -> facts.RecorderFacts:
    """Return a flight recorder whose newest collective is the ``sequence``-th all-reduce of the default group."""
    group = facts.ProcessGroup("0", "default_pg", members or tuple(range(world)), sequence, sequence - 1, sequence - 1)
    entries = tuple(
        facts.Collective(
            "0",
            number,
            "all_reduce",
            backend="nccl",
            input_sizes=((330,),),
            output_sizes=((330,),),
            types=("Float",),
            state="completed" if number < sequence else "scheduled",
            retired=number < sequence,
            at=NOON - (sequence - number) * 0.4,
            frames=(BACKWARD, TRAIN_STEP),
        )
        for number in range(max(1, sequence - 3), sequence + 1)
    )
    return facts.RecorderFacts(version="2.10", groups=(group,), collectives=entries, wrapped=False)

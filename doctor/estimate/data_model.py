"""What is asked of an estimate, what one traced step of training holds, and the answer: plain frozen data."""

from __future__ import annotations

from typing import Literal

import msgspec

Strategy = Literal["none", "ddp", "fsdp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
StepPhase = Literal["forward", "backward", "optimizer step", "between steps"]
"""When in a step a peak comes."""

MOST_SAMPLES = 1 << 20
"""Samples of a micro-batch beyond which the memory is not what limits it."""


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a job will train. ``None``: as the factory's optimizer, Trainer or batch says, else AdamW.

    ``optimizer``: the name of a class of ``torch.optim``, in any case (``adamw``). ``batch_size``: samples of one rank
    and micro-batch. ``accumulate``: micro-batches of one optimizer step. ``checkpointing``: every block of the model
    that repeats is run again in the backward pass. ``ranks_per_device``: ranks that share one device.
    """

    strategy: Strategy = "none"
    devices: int = 1
    nodes: int = 1
    precision: Precision = "32-true"
    optimizer: str | None = None
    batch_size: int | None = None
    accumulate: int = 1
    checkpointing: bool = False
    ranks_per_device: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.devices * self.nodes * self.ranks_per_device


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank on its device at the moment of its peak, by what they are for."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    batch: int = 0
    buffers: int = 0
    temporary: int = 0
    communication: int = 0
    """Buckets of DDP, flat buffers of DeepSpeed, reduce-scatter inputs."""
    gathered: int = 0
    """Shards of others that are there whole for a moment (FSDP, ZeRO-3)."""
    rounding: int = 0
    """What torch's caching allocator holds besides: blocks of 512 bytes, segments, fragments."""
    context: int = 0
    """The CUDA context with its libraries, and NCCL's buffers: not seen by torch's allocator."""
    others: int = 0
    """What other processes hold on the device, from a capture or from ranks that share it."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in self.__struct_fields__)

    @property
    def allocated(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` would say."""
        return self.total - self.rounding - self.context - self.others


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one rank, run on tensors without data. ``parts``: at the peak, without ``rounding``,
    ``context`` and ``others``. ``reserved``: the peak that the caching allocator would hold for it, bytes.

    ``batch_size``: the samples that were run; 0 where a batch has no common first dimension. ``bound``: why this is no
    traced step but follows a stated rule, mostly the most that there can be; empty for a traced one. ``notes``: what a
    reader must know (a custom operation that was passed over, a strategy that was calculated).
    """

    plan: TrainingPlan
    parts: MemoryBreakdown
    moment: StepPhase
    reserved: int
    batch_size: int
    parameter_count: int
    parameter_bytes: int
    trainable_count: int
    batch_bytes: int
    bound: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


class LoaderUse(msgspec.Struct, frozen=True, kw_only=True):
    """What of a factory's Trainer and loaders is of concern: ``None`` where it gave none. Bytes are of one rank.

    ``dataset_bytes``: of tensors, arrays and lists that the data set holds in memory, as far as they can be counted.
    ``checkpoint_bytes``: of a checkpoint with optimizer state that each rank would load. ``pinned``: page-locked
    batches.
    """

    workers: int | None = None
    prefetch: int | None = None
    dataset_bytes: int | None = None
    checkpoint_bytes: int | None = None
    pinned: bool | None = None
    asked: TrainingPlan | None = None
    """What the Trainer itself says: strategy, devices, precision, accumulation."""


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """Something that would help. ``peak_bytes`` and ``largest_batch``: with it."""

    name: str
    words: str
    plan: TrainingPlan
    peak_bytes: int
    saved_bytes: int
    largest_batch: int | None = None


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in the memory of one node for all of its ranks at the worst moment."""

    processes: int = 0
    dataset: int = 0
    workers: int = 0
    checkpoint: int = 0
    pinned: int = 0
    ranks: int = 1
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All of it."""
        return self.processes + self.dataset + self.workers + self.checkpoint + self.pinned


class MeasuredThroughput(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train, run for a few steps. ``samples_per_second``: of all ranks, the median of the repetitions.

    ``ratio``: to one rank by itself in the same round, the median; ``spread``: half of the distance between the lowest
    and the highest of these ratios. ``peak_bytes``: all ranks together, what torch's allocator reserved on a GPU (CUDA
    contexts not counted), or resident memory of the processes on a CPU. ``device``: what it ran on. ``error``: why
    there are no numbers; empty where there are.
    """

    name: str
    plan: TrainingPlan
    samples_per_second: float = 0.0
    spread: float = 0.0
    peak_bytes: int = 0
    error: str = ""
    ratio: float | None = None
    device: str = ""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``peak_bytes``: on the device by one rank, ``parts.total`` without ``others``. ``device_memory``: of
    one device, ``None`` where nobody said which; ``device_name``: as it was asked for. ``largest_batch``: samples of a
    micro-batch that fit, ``None`` where it is not known or none fits (``fits`` says which). ``when``: a sentence.
    ``searched``: whether the search for it came to its end; where not, a larger one may fit.
    ``safe_batch``: the largest that leaves free what the estimate may be wrong by. ``sample_bytes``: what one more
    sample takes. ``measured``: ways to train, timed where the estimate was made."""

    plan: TrainingPlan
    peak_bytes: int
    parts: MemoryBreakdown
    when: str
    batch_size: int
    parameter_count: int
    largest_batch: int | None = None
    searched: bool = True
    safe_batch: int | None = None
    sample_bytes: int | None = None
    fits: bool | None = None
    device_memory: int | None = None
    device_name: str = ""
    ways: tuple[Suggestion, ...] = ()
    host: HostMemory = HostMemory()
    measured: tuple[MeasuredThroughput, ...] = ()
    bound: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

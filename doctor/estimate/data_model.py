"""The plan of a training, one traced step of it, and the estimate: plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from doctor.core.errors import UnusableError

Strategy = Literal["none", "ddp", "fsdp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
ZeroGrad = Literal["early", "late", "in-place"]
"""When a loop clears gradients: before the forward pass, between forward and backward pass, or never, so that each
backward pass adds to zeroed ones (``set_to_none=False``)."""
LoopOutputs = Literal["held", "step", "released"]
"""How long a loop refers to the model's outputs: until those of the next forward pass replace them, as
``out = model(batch)`` in a loop does; until the function of the step returns; or until the loss is calculated."""
StepPhase = Literal["forward", "backward", "optimizer step", "between steps"]
"""The phase of a step in which the peak occurs."""

Quantization = Literal["4bit", "8bit"]
"""How bitsandbytes stores frozen weights of linear layers: NF4 in blocks, or LLM.int8()."""
Dtype = Literal["float32", "float16", "bfloat16"]

MOST_SAMPLES = 1 << 20
"""Samples of a micro-batch that are searched at most: memory is not the limit beyond."""

MOST_RANKS = 1 << 20


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a job will train. ``None``: the optimizer of the factory or Trainer, or else AdamW; the factory's batch.

    ``optimizer``: the name of a class of ``torch.optim``, in any case (``adamw``), of an optimizer of bitsandbytes
    (``adamw8bit``), or what Transformers calls one (``paged_adamw_8bit``). ``batch_size``: samples of one rank and
    micro-batch. ``accumulate``: micro-batches of one optimizer step. ``checkpointing``: repeated blocks of the
    model run again in the backward pass. ``zero_grad`` and ``outputs``: what the user's loop does; ``None``: ``early``
    and ``held``, or as the Trainer of the factory does it."""

    strategy: Strategy = "none"
    devices: int = 1
    nodes: int = 1
    precision: Precision = "32-true"
    optimizer: str | None = None
    batch_size: int | None = None
    accumulate: int = 1
    checkpointing: bool = False
    ranks_per_device: int = 1
    zero_grad: ZeroGrad | None = None
    outputs: LoopOutputs | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.devices * self.nodes * self.ranks_per_device


class LoraAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters as peft adds them. ``targets``: names of layers, or ``all-linear``; empty for peft's default."""

    rank: int
    targets: tuple[str, ...] = ()
    dropout: float = 0.0


class ModelRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A model of Transformers without weights, and the shape of its batch.

    ``name``: as the user named it. ``config``: the JSON of its ``config.json``. ``sequence_length``: tokens of a
    sample, ``None`` for a default. ``dtype``: of its weights, and ``compute_dtype`` of dequantized ones.
    ``double_quantization``: of the blocks' scales. ``upcasts``: frozen weights that are not quantized are cast to
    float32, as peft's ``prepare_model_for_kbit_training`` does."""

    name: str
    config: str
    sequence_length: int | None = None
    dtype: Dtype = "float32"
    compute_dtype: Dtype = "bfloat16"
    lora: LoraAdapters | None = None
    quantization: Quantization | None = None
    double_quantization: bool = True
    upcasts: bool = True


def plan_of(options: Mapping[str, Any], trainer: TrainingPlan | None) -> TrainingPlan:
    """Return the plan: ``options``, fields of :class:`TrainingPlan` unless ``None``, over what the Trainer says.

    Several ranks without a strategy use ``ddp``, as with Lightning's ``auto``.

    Raises:
        UnusableError: the plan has too many ranks.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    plan = msgspec.structs.replace(trainer or TrainingPlan(), **chosen)
    if plan.world_size > MOST_RANKS:
        raise UnusableError(f"a job of {plan.world_size} ranks is too large to estimate")
    if plan.world_size > 1 and plan.strategy == "none" and chosen.get("strategy") != "none":
        return msgspec.structs.replace(plan, strategy="ddp")
    return plan


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank on its device at its peak, by purpose."""

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
    """Gathered shards of other ranks (FSDP, ZeRO-3)."""
    rounding: int = 0
    """What torch's caching allocator holds in addition: rounding to 512 bytes, segments, fragmentation."""
    context: int = 0
    """The CUDA context with its libraries, and NCCL's buffers, outside of torch's allocator."""
    others: int = 0
    """Memory of other processes on the device: from a capture, or of ranks that share it."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, name) for name in self.__struct_fields__)

    @property
    def allocated(self) -> int:
        """The value of ``torch.cuda.max_memory_allocated``."""
        return self.total - self.rounding - self.context - self.others


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one rank, run on fake tensors. ``parts``: without ``rounding``, ``context`` and ``others``.

    ``reserved``: the peak in bytes that the caching allocator would reserve. ``batch_size``: samples; 0 if the batch
    has no common first dimension. ``bound``: why this is an upper bound; empty for a traced step. ``notes``:
    caveats."""

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
    """What a factory's Trainer and loader show; ``None`` if it returned none. Bytes are of one rank.

    ``dataset_bytes``: of tensors, arrays and lists that the dataset holds in memory, as far as they can be counted.
    ``checkpoint_bytes``: of a checkpoint with optimizer state that each rank would load."""

    workers: int | None = None
    prefetch: int | None = None
    dataset_bytes: int | None = None
    checkpoint_bytes: int | None = None
    pinned: bool | None = None
    parameter_count: int = 0
    parameter_bytes: int = 0
    asked: TrainingPlan | None = None
    """The plan of the Trainer: strategy, devices, precision, accumulation."""


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """A change that would help. ``peak_bytes`` and ``largest_batch``: with it. ``searched``: whether the search for the
    largest batch was completed."""

    name: str
    words: str
    plan: TrainingPlan
    peak_bytes: int
    saved_bytes: int
    largest_batch: int | None = None
    searched: bool = True


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one node's host memory for all of its ranks, in bytes."""

    processes: int = 0
    dataset: int = 0
    workers: int = 0
    checkpoint: int = 0
    pinned: int = 0
    ranks: int = 1
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.processes + self.dataset + self.workers + self.checkpoint + self.pinned


class MeasuredThroughput(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train, run for a few steps. ``samples_per_second``: of all ranks, the median of the repetitions.

    ``ratio``: to a single rank in the same round, the median; ``spread``: half the difference between the lowest and
    the highest ratio. ``peak_bytes``: of all ranks, reserved by torch's allocator on a GPU (without CUDA contexts), or
    resident memory of the processes on a CPU. ``error``: why there are no numbers."""

    name: str
    plan: TrainingPlan
    samples_per_second: float = 0.0
    spread: float = 0.0
    peak_bytes: int = 0
    error: str = ""
    ratio: float | None = None
    device: str = ""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """``peak_bytes``: of one rank's process on its device, ``parts.total`` without ``others``. ``reserved_bytes`` and
    ``allocated_bytes``: what of it ``torch.cuda.max_memory_reserved`` and ``max_memory_allocated`` report.
    ``low_bytes`` and ``high_bytes``: the range of the peak. ``device_memory``: of one device.

    ``device_name``: as the user named it. ``when``: the phase of the peak. ``largest_batch``: samples of a micro-batch
    that fit at the upper end of their range, ``None`` if unknown or none fits (see ``fits``). ``searched``: whether the
    search for it was completed, ``None`` without one. ``sample_bytes``: memory of one more sample.
    ``ways``: changes that would help. ``measured``: variants that were timed on this machine."""

    plan: TrainingPlan
    peak_bytes: int
    parts: MemoryBreakdown
    when: str
    batch_size: int
    parameter_count: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    low_bytes: int = 0
    high_bytes: int = 0
    largest_batch: int | None = None
    searched: bool | None = True
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

"""Reads from a factory's Trainer, loader and dataset what they need of host memory, and which plan they imply."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, get_args

import torch

from doctor.estimate.data_model import LoaderUse, Precision, Strategy, TrainingPlan
from doctor.estimate.tracing.factory import FactoryOutput
from doctor.estimate.tracing.quantized_layers import element_count

LOOKED_AT = 1000
"""Entries of a list that are measured; the total is extrapolated."""
DEPTH = 4


def loading_of(made: FactoryOutput) -> LoaderUse:
    """Return what the factory's output shows; ``None`` for the rest."""
    loader = made.loader
    tensors = (*made.module.parameters(), *made.module.buffers())
    return LoaderUse(
        workers=getattr(loader, "num_workers", None),
        prefetch=getattr(loader, "prefetch_factor", None),
        dataset_bytes=bytes_of(loader.dataset) if hasattr(loader, "dataset") else None,
        # With AdamW's two states of each trained parameter.
        checkpoint_bytes=sum(each.nbytes * (3 if each.requires_grad else 1) for each in tensors),
        pinned=getattr(loader, "pin_memory", None),
        parameter_count=sum(map(element_count, made.module.parameters())),
        parameter_bytes=sum(each.nbytes for each in made.module.parameters()),
        asked=_asked(made.trainer),
    )


def bytes_of(held: object, depth: int = DEPTH) -> int:
    """Return the bytes of tensors, arrays, strings and lists that an object holds, to a limited depth."""
    size = getattr(held, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(held, (str, bytes, int, float, bool, type(None))):
        return sys.getsizeof(held)
    if not depth:
        return 0
    if isinstance(held, Mapping):
        return _of_many(list(held.values()), depth) + _of_many(list(held), depth)
    if isinstance(held, (list, tuple, set, frozenset)):
        return sys.getsizeof(held) + _of_many(held, depth)
    if isinstance(held, torch.nn.Module) or not hasattr(held, "__dict__"):
        return 0
    return _of_many(list(vars(held).values()), depth)


def _of_many(entries: Iterable[object], depth: int) -> int:
    entries = entries if isinstance(entries, Sequence) else list(entries)
    looked = entries[:: max(1, len(entries) // LOOKED_AT)]
    total = sum(bytes_of(entry, depth - 1) for entry in looked)
    return int(total * len(entries) / len(looked)) if looked else 0


def _asked(trainer: Any) -> TrainingPlan | None:
    if trainer is None:
        return None
    arguments: Any = getattr(trainer, "args", None)
    if hasattr(arguments, "per_device_train_batch_size"):
        mixed: Precision = "bf16-mixed" if arguments.bf16 else "16-mixed" if arguments.fp16 else "32-true"
        return TrainingPlan(
            precision=mixed,
            batch_size=arguments.per_device_train_batch_size,
            accumulate=max(1, arguments.gradient_accumulation_steps),
            checkpointing=bool(arguments.gradient_checkpointing),
        )
    precision = str(getattr(trainer, "precision", ""))
    return TrainingPlan(
        strategy=_strategy(getattr(trainer, "strategy", None)),
        devices=max(1, _number(trainer, "num_devices")),
        nodes=max(1, _number(trainer, "num_nodes")),
        precision=cast(Precision, precision) if precision in get_args(Precision) else "32-true",
        accumulate=max(1, _number(trainer, "accumulate_grad_batches")),
    )


def _number(owner: object, name: str) -> int:
    value = getattr(owner, name, 1)
    return value if isinstance(value, int) else 1


def _strategy(strategy: object) -> Strategy:
    name = type(strategy).__name__.lower()
    if "modelparallel" in name:
        return "fsdp2"
    if "fsdp" in name:
        return "fsdp"
    if "deepspeed" in name:
        config = getattr(strategy, "config", None)
        stage = (config.get("zero_optimization") or {}).get("stage", 2) if isinstance(config, dict) else 2
        return cast(Strategy, f"deepspeed-{stage}") if stage in (1, 2, 3) else "ddp"
    return "ddp" if "ddp" in name else "none"

"""What a strategy adds to and takes from one rank's memory: the plain one, and DistributedDataParallel's buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.tracing.storage_recorder import StorageRecorder

FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
"""Bytes of DistributedDataParallel's buckets (``dist._DEFAULT_FIRST_BUCKET_BYTES``, ``bucket_cap_mb``)."""

DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


class SingleDevice:
    """One device, or a strategy that keeps everything whole. Subclasses say what they do instead."""

    notes: tuple[str, ...] = ()

    def __init__(self, module: Module, recorder: StorageRecorder, plan: TrainingPlan) -> None:
        self.module, self.recorder, self.plan = module, recorder, plan
        self.parameters = tuple({id(each): each for each in module.parameters()}.values())

    def begin(self) -> None:
        """Set up what stays for the whole training."""

    def held_by_optimizer(self, parameter: Parameter) -> Iterable[Parameter]:
        """What the optimizer steps in a parameter's place."""
        return (parameter,)

    def before_forward(self) -> None:
        """Do what comes before a micro-batch."""

    def after_forward(self, loss: object) -> None:
        """Do what comes once its loss is there."""

    def after_backward(self) -> None:
        """Do what comes once all gradients are there."""

    def before_optimizer(self) -> None:
        """Do what comes between the last backward pass and the optimizer."""

    def after_optimizer(self) -> None:
        """Do what comes after it."""

    def gradients(self) -> list[torch.Tensor]:
        """Those that are there now."""
        return [each.grad for each in self.stepped() if each.grad is not None]

    def stepped(self) -> Sequence[Parameter]:
        """All parameters that an optimizer may step."""
        return self.parameters

    def close(self) -> None:
        """Take every hook away."""


class DataParallel(SingleDevice):
    """DistributedDataParallel: gradients are copied into buckets, which stay, unless the buckets are the gradients."""

    def __init__(self, module: Module, recorder: StorageRecorder, plan: TrainingPlan, trainer: Any = None) -> None:
        super().__init__(module, recorder, plan)
        options = getattr(getattr(trainer, "strategy", None), "_ddp_kwargs", None) or {}
        self._is_view = bool(options.get("gradient_as_bucket_view"))
        self._hooks: list[Any] = []
        self._cap = int(float(options.get("bucket_cap_mb") or 25) * (1 << 20))

    def begin(self) -> None:
        """Allocate the buckets: the last parameters first, a small one to begin with."""
        if self._is_view:
            self.notes = ("gradient_as_bucket_view is on: gradients live in the buckets",)
            for parameter in self.parameters:
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._into_bucket))  # type: ignore[no-untyped-call]
        held, cap = 0, min(FIRST_BUCKET, self._cap)
        for parameter in reversed([each for each in self.parameters if each.requires_grad]):
            held += parameter.nbytes
            if held >= cap:
                self.recorder.ledger.allocate(held, "communication")
                held, cap = 0, self._cap
        if held:
            self.recorder.ledger.allocate(held, "communication")

    def _into_bucket(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.recorder.forget(parameter.grad)

    def close(self) -> None:
        """Take every hook away."""
        for hook in self._hooks:
            hook.remove()


def compute_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """Of parameters in the forward pass: ``None`` as they are. A sharded strategy casts what it gathers, and DeepSpeed
    the whole module; elsewhere mixed precision is autocast alone."""
    number, _, kind = plan.precision.partition("-")
    if kind == "true":
        return None if number == "32" else DTYPES[number]
    return DTYPES[number] if plan.strategy.startswith(("fsdp", "deepspeed")) else None


def autocast_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """What autocast casts to, ``None`` without it. DeepSpeed has a precision of its own."""
    number, _, kind = plan.precision.partition("-")
    return DTYPES[number] if kind == "mixed" and not plan.strategy.startswith("deepspeed") else None

"""How strategies change the memory of a rank: a single device, and DistributedDataParallel's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter

from doctor.estimate.data_model import TrainingPlan

if TYPE_CHECKING:
    from doctor.estimate.tracing.storage_recorder import StorageRecorder

FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
"""Bytes of DistributedDataParallel's buckets (``dist._DEFAULT_FIRST_BUCKET_BYTES``, ``bucket_cap_mb``)."""

_LOW_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16}


class SingleDevice:
    """One device, or a strategy that shards nothing. Subclasses override the hooks of a step."""

    notes: tuple[str, ...] = ()

    def __init__(self, module: Module, recorder: StorageRecorder, plan: TrainingPlan) -> None:
        self.module, self.recorder, self.plan = module, recorder, plan
        self.parameters = tuple(module.parameters())
        self.trained = [each for each in self.parameters if each.requires_grad]
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Allocate what exists during the whole training."""

    def held_by_optimizer(self, parameter: Parameter) -> Iterable[Parameter]:
        """Return the parameters that the optimizer steps instead of ``parameter``."""
        return (parameter,)

    def before_forward(self) -> None:
        """Run before a micro-batch."""

    def after_forward(self, loss: object) -> None:
        """Run after the forward pass of a micro-batch."""

    def after_backward(self) -> None:
        """Run after the backward pass of a micro-batch."""

    def before_optimizer(self) -> None:
        """Run before the optimizer."""

    def after_optimizer(self) -> None:
        """Run after the optimizer."""

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that exist now."""
        return [each.grad for each in self.stepped() if each.grad is not None]

    def stepped(self) -> Sequence[Parameter]:
        """Return all parameters that an optimizer may step."""
        return self.parameters

    def on_gradient(self, parameters: Iterable[Parameter], act: Callable[[torch.Tensor], None]) -> None:
        """Call ``act`` with each of these parameters once its gradient is accumulated."""
        for each in parameters:
            self._hooks.append(each.register_post_accumulate_grad_hook(act))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()


class DataParallel(SingleDevice):
    """DistributedDataParallel: gradients are copied into permanent buckets, or are views of them."""

    def __init__(self, module: Module, recorder: StorageRecorder, plan: TrainingPlan, trainer: Any = None) -> None:
        super().__init__(module, recorder, plan)
        options = getattr(getattr(trainer, "strategy", None), "_ddp_kwargs", None) or {}
        self._is_view = bool(options.get("gradient_as_bucket_view"))
        self._cap = int(float(options.get("bucket_cap_mb") or 25) * (1 << 20))

    def begin(self) -> None:
        """Allocate the buckets, the last parameters first; the first bucket is small."""
        if self._is_view:
            self.notes = ("gradient_as_bucket_view is on: gradients live in the buckets",)
            self.on_gradient(self.trained, self._into_bucket)
        held, cap = 0, min(FIRST_BUCKET, self._cap)
        for parameter in reversed(self.trained):
            held += parameter.nbytes
            if held >= cap:
                self.recorder.ledger.allocate(held, "communication")
                held, cap = 0, self._cap
        if held:
            self.recorder.ledger.allocate(held, "communication")

    def _into_bucket(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.recorder.forget(parameter.grad)


def low_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """Return the 16-bit dtype of the plan's precision, or ``None``."""
    return _LOW_DTYPES.get(plan.precision.partition("-")[0])


def true_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """Return the 16-bit dtype of weights and inputs, or ``None`` if they keep theirs."""
    return low_dtype(plan) if plan.precision.endswith("-true") else None


def compute_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """Return the dtype of parameters in the forward pass, or ``None`` if they keep theirs.

    FSDP casts what it gathers, and DeepSpeed the whole module; elsewhere mixed precision is autocast alone."""
    return low_dtype(plan) if plan.strategy.startswith(("fsdp", "deepspeed")) else true_dtype(plan)


def autocast_dtype(plan: TrainingPlan) -> torch.dtype | None:
    """Return the dtype that autocast casts to, or ``None`` without autocast, as with DeepSpeed."""
    is_mixed = plan.precision.endswith("-mixed") and not plan.strategy.startswith("deepspeed")
    return low_dtype(plan) if is_mixed else None

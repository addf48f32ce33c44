"""Calculates DeepSpeed's ZeRO: DeepSpeed itself can't run on fake tensors.

The model itself is traced in DeepSpeed's precision; what ZeRO holds in addition follows its documentation
(deepspeed.ai/docs/config-json, "ZeRO Optimizations") and ``deepspeed/runtime/zero/stage_1_and_2.py`` and ``stage3.py``:
parameters and gradients of 16 bits, a master copy of 32 bits and the optimizer's states in partitions, one or two
buckets of ``reduce_bucket_size`` elements whatever the model's size, and in stage 3 up to
``stage3_max_live_parameters`` whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from doctor.estimate.data_model import TrainingPlan
from doctor.estimate.memory.strategies import SingleDevice
from doctor.estimate.tracing.storage_recorder import StorageRecorder

BUCKET_ELEMENTS = 500_000_000
LIGHTNING_BUCKET_ELEMENTS = 200_000_000
"""Defaults of ``reduce_bucket_size`` and ``allgather_bucket_size``: DeepSpeed's own, and Lightning's
DeepSpeedStrategy's."""
LIVE_ELEMENTS = 1_000_000_000
"""Default of ``stage3_max_live_parameters``: released parameters below it stay whole for their next use."""


class ZeroPartitioned(SingleDevice):
    """``stage``: 1 partitions the optimizer, 2 gradients too, 3 parameters too."""

    def __init__(self, module: Module, recorder: StorageRecorder, plan: TrainingPlan, trainer: Any = None) -> None:
        super().__init__(module, recorder, plan)
        self.stage = int(plan.strategy[-1])
        zero = _zero_options(trainer)
        self._bucket = int(zero.get("reduce_bucket_size", LIGHTNING_BUCKET_ELEMENTS if trainer else BUCKET_ELEMENTS))
        self._buckets = 2 if zero.get("overlap_comm", self.stage == 3 or trainer is not None) else 1
        self._live = int(zero.get("stage3_max_live_parameters", LIVE_ELEMENTS))
        self._share: Parameter | None = None
        self._partition: int | None = None
        self.notes = (
            f"DeepSpeed is calculated from its documented buffers: {self._buckets} of {self._bucket:,} elements",
        )

    def begin(self) -> None:
        """Allocate the buckets, the master partition, and in stage 3 shards instead of parameters."""
        ledger, ranks = self.recorder.ledger, self.plan.world_size
        if self.stage == 3:
            for parameter in self.parameters:
                self.recorder.forget(parameter)
            ledger.allocate(-(-sum(each.nbytes for each in self.parameters) // ranks), "parameters")
            whole = sum(each.numel() for each in self.parameters)
            size = sum(each.nbytes for each in self.parameters) / max(1, whole)
            ledger.allocate(int(min(whole, self._live) * size), "gathered")
        if self.stage > 1:
            self.on_gradient(self.trained, self._into_bucket)
        for _ in range(self._buckets if self.trained else 0):
            ledger.allocate(self._bucket * self.trained[0].itemsize, "communication")
        count = -(-sum(each.numel() for each in self.trained) // ranks)
        self._share = Parameter(torch.empty(count, dtype=torch.float32, device=self.recorder.device))
        self.recorder.mark((self._share,), "optimizer")

    def _into_bucket(self, parameter: torch.Tensor) -> None:
        """Keep only this rank's partition of the gradients, from stage 2 on, in a buffer that is freed at the step."""
        parameter.grad = None
        if self._partition is None:
            size = sum(each.nbytes for each in self.trained)
            self._partition = self.recorder.ledger.allocate(-(-size // self.plan.world_size), "gradients")

    def before_optimizer(self) -> None:
        """Allocate the partition's gradients in 32 bits."""
        if self._share is not None:
            self._share.grad = torch.empty_like(self._share)
            self.recorder.mark((self._share.grad,), "gradients")

    def after_optimizer(self) -> None:
        """Free all gradients."""
        if self._share is not None:
            self._share.grad = None
        for each in self.trained:
            each.grad = None
        if self._partition is not None:
            self.recorder.ledger.free(self._partition)
            self._partition = None

    def held_by_optimizer(self, parameter: Parameter) -> Iterable[Parameter]:
        """Return the one flat partition."""
        return (self._share,) if self._share is not None else ()

    def stepped(self) -> Sequence[Parameter]:
        """Return the partition, and the parameters, which have gradients before stage 2."""
        return [*self.parameters, *([self._share] if self._share is not None else [])]


def _zero_options(trainer: Any) -> dict[str, Any]:
    config = getattr(getattr(trainer, "strategy", None), "config", None)
    found = config.get("zero_optimization") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}

"""The traced steps: forward and backward of one or two micro-batches, and the optimizer, twice."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import LoopOutputs, TrainingPlan, ZeroGrad
from doctor.estimate.memory.bitsandbytes_optimizers import PAGED
from doctor.estimate.memory.optimizers import as_on_gpu, optimizers_of, replace_parameters, states_of
from doctor.estimate.memory.strategies import SingleDevice, autocast_dtype, low_dtype, true_dtype
from doctor.estimate.tracing.blocks import checkpointed, in_words, repeated_blocks
from doctor.estimate.tracing.factory import FactoryOutput
from doctor.estimate.tracing.fake_mode import FakeDeviceMode
from doctor.estimate.tracing.loss import is_lightning, result_of
from doctor.estimate.tracing.pytree import map_tensors, resized, samples_in, tensors_in
from doctor.estimate.tracing.storage_recorder import StorageRecorder
from doctor.estimate.tracing.trainer_stub import attached, give_optimizers, without_metrics

STEPS = 2
"""From the second step on, the optimizer has its states."""
MICRO_BATCHES = 2
"""More do not change the peak: from the second one on, gradients exist."""


class TracedTraining(AbstractContextManager["TracedTraining"]):
    """A module on the device with its strategy, batch and optimizers; :meth:`run` runs the steps."""

    def __init__(
        self,
        plan: TrainingPlan,
        made: FactoryOutput,
        recorder: StorageRecorder,
        strategy: SingleDevice,
        fakes: FakeDeviceMode,
    ) -> None:
        self.plan, self.strategy = plan, strategy
        self._made, self._recorder, self._fakes = made, recorder, fakes
        self._module = made.module
        self._stack = ExitStack()
        self.notes: tuple[str, ...] = ()
        self._batch: Any = None
        self._outputs: Any = None
        self._optimizers: list[torch.optim.Optimizer] = []

    def __enter__(self) -> TracedTraining:
        """Place what stays on the device."""
        with self._stack:
            self._module.train()
            self._recorder.mark(self._module.parameters(), "parameters")
            self._recorder.mark(self._module.buffers(), "buffers")
            if self._stack.enter_context(without_metrics(self._module)):
                self.notes = (*self.notes, "the metrics of torchmetrics are not run")
            if is_lightning(self._module):
                ranks = self.plan.world_size
                self._stack.enter_context(attached(self._module, self._made.trainer, ranks, self._backward))
            if self.plan.checkpointing:
                self._checkpoint()
            self._make_optimizers()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the module."""
        for parameter in self._module.parameters():
            parameter.grad = None
        self._optimizers.clear()
        self._batch = self._outputs = None
        self._stack.close()

    def _checkpoint(self) -> None:
        blocks = repeated_blocks(self._module)
        for each in self._module.modules():
            config: Any = getattr(each, "config", None)
            if getattr(config, "use_cache", False) is True:
                # As Transformers does: a second run would find the cached keys of the first.
                config.use_cache = False
                self._stack.callback(setattr, config, "use_cache", True)
        self._stack.enter_context(checkpointed(blocks))
        note = f"activation checkpointing of {in_words(blocks)}"
        self.notes = (*self.notes, note if blocks else "no repeated blocks, so none is checkpointed")

    def _make_optimizers(self) -> None:
        self._optimizers = optimizers_of(self._module, self._made.trainer, self.plan.optimizer)
        self.strategy.begin()
        for optimizer in self._optimizers:
            replace_parameters(optimizer, self.strategy.held_by_optimizer)
            as_on_gpu(optimizer)
            self._recorder.mark(states_of(optimizer), "optimizer")
            if getattr(optimizer, "is_paged", False):
                self.notes = (*self.notes, PAGED)
            self._stack.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)
            self._stack.callback(optimizer.register_step_post_hook(self._after_optimizer).remove)
        if is_lightning(self._module):
            give_optimizers(self._module, self._optimizers)

    def run(self) -> None:
        """Run the steps, which the recorder records."""
        batch = resized(self._made.batch, self.plan.batch_size)
        if self.plan.batch_size and samples_in(self._made.batch) == 0:
            self.notes = (
                *self.notes,
                "the tensors of the batch have no common first dimension: the factory's batch size is used",
            )
        dtype = low_dtype(self.plan) if self.plan.strategy.startswith("deepspeed") else true_dtype(self.plan)
        self._batch = map_tensors(batch, lambda tensor: self._fakes.on_device(tensor, dtype))
        self._recorder.mark(tensors_in(self._batch), "batch")
        for _ in range(STEPS):
            for number in range(min(self.plan.accumulate, MICRO_BATCHES)):
                self._micro_batch(number)
            self._step()
            if self._outputs_live == "step":
                self._outputs = None
            gc.collect()
        self._recorder.ledger.enter("between steps")

    def _micro_batch(self, number: int) -> None:
        self._recorder.ledger.enter("forward")
        self.strategy.before_forward()
        loss = self._loss(number)
        self.strategy.after_forward(loss)
        if self._trains_itself:
            return
        if loss is None:
            raise UnusableError("the step returns no loss with a gradient, and no output to use in its place")
        if number == 0 and self._zero_grad == "late":
            self._clear_gradients()
        self._backward(loss)

    @property
    def _zero_grad(self) -> ZeroGrad:
        """When gradients are cleared; Lightning's loops do it between forward and backward pass."""
        return "late" if is_lightning(self._module) else self.plan.zero_grad or "early"

    @property
    def _outputs_live(self) -> LoopOutputs:
        """How long the loop refers to what the module returned.

        Transformers' Trainer returns from ``compute_loss`` with the loss alone; Lightning's closure keeps what
        ``training_step`` returns until the optimizer has stepped."""
        if is_lightning(self._module):
            return "step"
        return self.plan.outputs or ("held" if self._made.trainer is None else "released")

    @property
    def _trains_itself(self) -> bool:
        """Whether the module's training step runs the optimizers (manual optimization)."""
        return is_lightning(self._module) and getattr(self._module, "automatic_optimization", True) is False

    def _backward(self, loss: torch.Tensor) -> None:
        self._recorder.ledger.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        self.strategy.after_backward()
        self._recorder.mark(self.strategy.gradients(), "gradients")
        if self._trains_itself:
            self._recorder.ledger.enter("forward")

    def _loss(self, number: int) -> torch.Tensor | None:
        dtype = autocast_dtype(self.plan)
        before = torch.get_default_dtype()
        if self.plan.precision.endswith("-true"):
            torch.set_default_dtype(true_dtype(self.plan) or torch.float32)
        try:
            with torch.autocast(self._fakes.device.type, dtype=dtype) if dtype is not None else nullcontext():
                found = result_of(self._module, self._batch, number)
        finally:
            torch.set_default_dtype(before)
        self._outputs = None if self._outputs_live == "released" else found
        return found.loss

    def _step(self) -> None:
        if not self._trains_itself:
            for optimizer in self._optimizers:
                # Some require the argument ``closure``; none calls a missing one.
                optimizer.step(None)
        self._recorder.ledger.enter("between steps")
        if self._zero_grad == "early":
            self._clear_gradients()

    def _before_optimizer(self, *_: object) -> None:
        self._recorder.ledger.enter("optimizer step")
        self.strategy.before_optimizer()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._recorder.mark(states_of(optimizer), "optimizer")
        self.strategy.after_optimizer()
        self._recorder.ledger.enter("forward" if self._trains_itself else "between steps")

    def _clear_gradients(self) -> None:
        for parameter in self.strategy.stepped():
            parameter.grad = None

"""Traces training steps of what a factory made, in the process that imports torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
import torch._dynamo

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import TracedStep, TrainingPlan
from doctor.estimate.memory.fsdp import FullyShardedV1, FullyShardedV2
from doctor.estimate.memory.strategies import DataParallel, SingleDevice, compute_dtype
from doctor.estimate.memory.zero import ZeroPartitioned
from doctor.estimate.tracing.autocast import install as install_autocast
from doctor.estimate.tracing.factory import FactoryOutput, call_factory, in_words
from doctor.estimate.tracing.fake_mode import FakeDeviceMode, is_fake
from doctor.estimate.tracing.fake_ops import FakeOps
from doctor.estimate.tracing.kernel_choice import KernelSelection
from doctor.estimate.tracing.kernel_choice import install as install_kernels
from doctor.estimate.tracing.loader_memory import loading_of
from doctor.estimate.tracing.loss import hint_for
from doctor.estimate.tracing.materialization import materialized
from doctor.estimate.tracing.pytree import resized, samples_in, tensors_in
from doctor.estimate.tracing.quantized_layers import QuantizedLinear, element_count
from doctor.estimate.tracing.scope import left_out
from doctor.estimate.tracing.storage_recorder import StorageRecorder
from doctor.estimate.tracing.train_step import TracedTraining
from doctor.estimate.upper_bound import ModuleCoverage, bounded, is_of_fakes


def _by_cudnn(recorder: StorageRecorder, substitutes: FakeOps) -> Iterator[str]:
    if recorder.convolves:
        yield (
            "cuDNN workspaces for convolutions are counted as one copy of the weight gradient; "
            "the actual size depends on the GPU"
        )
    if substitutes.recurs:
        yield "recurrent layers are counted step by step; the memory that cuDNN keeps for them depends on the GPU"


SHARDING = ("fsdp", "fsdp2", "deepspeed-3")
"""Strategies that shard parameters. Of bitsandbytes' layers they do so only if these store weights as 16-bit numbers
(``bnb_4bit_quant_storage``)."""


class _OtherBranch(Exception):
    """The step may work with the other value of conditions on data."""


class StepTracer:
    """A factory, called once (:func:`doctor.estimate.tracing.factory.call_factory`) and traced under several plans.

    ``name``: as the user named it. ``find``: imports it."""

    def __init__(self, name: str, find: Callable[[], Callable[[], object]]) -> None:
        self._name = name
        install_kernels()
        install_autocast()
        torch._dynamo.config.disable = True  # its compiler needs data; a note says that its savings are not counted
        make = find()
        self._fakes = FakeDeviceMode()
        recorder = StorageRecorder(self._fakes.device, FakeOps())
        recorder.is_building = True
        with self._fakes.active(), recorder:
            self._made = call_factory(make, self._name)
        self.loading = loading_of(self._made)
        self._notes = tuple(self._notes_on_made())
        # Every step ends with a collection, which need not visit the many objects that exist by now.
        gc.collect()
        gc.freeze()

    def _notes_on_made(self) -> Iterator[str]:
        if self._fakes.note:
            yield self._fakes.note
        yield from self._made.notes
        words = left_out(self._made)
        if words:
            yield words
        real = sum(each.nbytes for each in self._made.module.parameters() if not is_fake(each))
        if real:
            yield f"the factory loads {real / 2**20:.2g} MiB of real weights, which are not included in the bound"

    def run(self, plan: TrainingPlan, workspace: int, capability: str = "") -> TracedStep:
        """Trace two steps: from the second one on, the optimizer has its states.

        ``workspace``: bytes of cuBLAS's workspace. ``capability``: compute capability of the GPU, empty if unknown.

        Raises:
            UnusableError: the model fails on this batch, or can't run on fake tensors at all.
        """
        began = time.monotonic()
        if plan.strategy in SHARDING and any(isinstance(each, QuantizedLinear) for each in self._made.module.modules()):
            raise UnusableError(f"{self._name}: {plan.strategy} with quantized weights is not supported")
        try:
            traced = self._attempt(plan, workspace, capability, truth=False)
        except _OtherBranch:
            traced = self._attempt(plan, workspace, capability, truth=True)
        gc.collect()
        return msgspec.structs.replace(traced, seconds=time.monotonic() - began)

    def _attempt(
        self, plan: TrainingPlan, workspace: int, capability: str, *, truth: bool, shares: tuple[int, ...] = ()
    ) -> TracedStep:
        # Integers in the data are often lengths of sequences: the batch's longest second dimension.
        length = max((each.shape[1] for each in tensors_in(self._made.batch) if each.dim() > 1), default=1)
        substitutes = FakeOps(truth=truth, length=length, shares=shares)
        recorder = StorageRecorder(self._fakes.device, substitutes, workspace, capability)
        coverage = ModuleCoverage(self._made.module)
        try:
            with self._scene(plan, recorder, substitutes, capability) as training, coverage:
                training.run()
        except UnusableError as error:
            raise UnusableError(f"{self._name}: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever the user's model raises
            if substitutes.asked_truth and not truth:
                raise _OtherBranch from None
            if not is_of_fakes(error) or not recorder.ledger.everything:
                hint = hint_for(self._made.module, self._made.batch)
                raise UnusableError(f"{self._name}: a training step raised {in_words(error)}{hint}") from None
            parts, words = bounded(plan, self._made, recorder.ledger, coverage, in_words(error))
            return self._traced(
                plan, parts=parts, moment="backward", reserved=parts.total, bound=words, notes=self._notes
            )
        found = substitutes.partitions.found
        if not shares and max(found, default=1) > 1:
            return self._attempt(plan, workspace, capability, truth=truth, shares=found)
        parts, moment = recorder.ledger.peak()
        return self._traced(
            plan,
            parts=parts,
            moment=moment,
            reserved=recorder.ledger.reserved(),
            bound="; ".join(substitutes.bounds),
            notes=(*self._notes, *training.notes, *training.strategy.notes, *_by_cudnn(recorder, substitutes)),
        )

    @contextmanager
    def _scene(
        self, plan: TrainingPlan, recorder: StorageRecorder, substitutes: FakeOps, capability: str
    ) -> Iterator[TracedTraining]:
        made = self._made
        with ExitStack() as stack:
            stack.enter_context(self._fakes.active())
            stack.enter_context(recorder)
            stack.enter_context(KernelSelection(self._fakes.device, substitutes, capability))
            master = next((each.dtype for each in made.module.parameters() if each.is_floating_point()), None)
            stack.enter_context(materialized(made.module, self._fakes, compute_dtype(plan)))
            strategy = _strategy(plan, made, recorder, master)
            stack.callback(strategy.close)
            yield stack.enter_context(TracedTraining(plan, made, recorder, strategy, self._fakes))

    def _traced(self, plan: TrainingPlan, **found: Any) -> TracedStep:
        parameters = list(self._made.module.parameters())
        batch = resized(self._made.batch, plan.batch_size)
        return TracedStep(
            plan=plan,
            batch_size=samples_in(batch),
            parameter_count=sum(map(element_count, parameters)),
            parameter_bytes=sum(each.nbytes for each in parameters),
            trainable_count=sum(each.numel() for each in parameters if each.requires_grad),
            batch_bytes=sum(each.nbytes for each in tensors_in(batch)),
            **found,
        )


def _strategy(
    plan: TrainingPlan, made: FactoryOutput, recorder: StorageRecorder, master: torch.dtype | None
) -> SingleDevice:
    if plan.strategy == "none":
        return SingleDevice(made.module, recorder, plan)
    if plan.strategy == "ddp":
        return DataParallel(made.module, recorder, plan, made.trainer)
    if plan.strategy.startswith("deepspeed"):
        return ZeroPartitioned(made.module, recorder, plan, made.trainer)
    # The precisions 16-true and bf16-true cast what the optimizer steps, too.
    kept = None if plan.precision.endswith("true") else master
    return (FullyShardedV2 if plan.strategy == "fsdp2" else FullyShardedV1)(made.module, recorder, plan, kept)

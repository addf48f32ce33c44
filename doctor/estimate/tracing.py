"""Traces training steps with what one factory made, in the process that has torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo

from doctor.errors import UnusableError
from doctor.estimate.autocasting import install as install_autocast
from doctor.estimate.bounding import Coverage, bounded, is_of_fakes
from doctor.estimate.dressing import dressed
from doctor.estimate.factory import Made, call, find, in_words
from doctor.estimate.fakes import Fakes, is_fake
from doctor.estimate.kernels import Kernels
from doctor.estimate.kernels import install as install_kernels
from doctor.estimate.ledger import Ledger
from doctor.estimate.loading import loading_of
from doctor.estimate.plan import Plan, Traced
from doctor.estimate.recording import Recorder
from doctor.estimate.sharding import FlatSharded, Sharded
from doctor.estimate.stepping import Training
from doctor.estimate.strategies import Alone, Replicated, compute_dtype
from doctor.estimate.substitutes import Substitutes
from doctor.estimate.trees import resized, samples_in, tensors_in
from doctor.estimate.zero import Partitioned


def _by_cudnn(recorder: Recorder, substitutes: Substitutes) -> Iterator[str]:
    """What only a GPU knows."""
    if recorder.convolves:
        yield (
            "of the workspaces that cuDNN takes for convolutions one copy of a weight's gradient is counted; "
            "how much more depends on the GPU"
        )
    if substitutes.recurs:
        yield "recurrent layers are counted step by step; what cuDNN keeps of them instead depends on the GPU"


class _OtherTruth(Exception):
    """With the other answer to conditions on data the step may work."""


class Bench:
    """A factory, called once, on which plans are tried.

    Raises:
        UnusableError: what :mod:`doctor.estimate.factory` says is wrong with it.
    """

    def __init__(self, factory: str, directory: str) -> None:
        self._name = factory
        install_kernels()
        install_autocast()
        torch._dynamo.config.disable = True  # its compiler wants data; what it would save is said not to be counted
        make = find(factory, Path(directory))
        self._fakes = Fakes()
        self._made = self._make(make)
        self.loading = loading_of(self._made)
        self._notes = tuple(self._notes_on_made())
        # Every step ends with a collection; what is there by now stays, and there is much of it.
        gc.collect()
        gc.freeze()

    def _make(self, make: Any) -> Made:
        recorder = Recorder(self._fakes.device, Substitutes())
        recorder.is_building = True
        with self._fakes.active(), recorder:
            return call(make, self._name)

    def _notes_on_made(self) -> Iterator[str]:
        if self._fakes.note:
            yield self._fakes.note
        if any(type(each).__name__ == "OptimizedModule" for each in self._made.module.modules()):
            yield "torch.compile is left out: compiled, the step usually holds less"
        real = sum(each.nbytes for each in self._made.module.parameters() if not is_fake(each))
        if real:
            yield f"the factory loads {real / 2**20:.2g} MiB of real weights: what that takes is outside the bound"

    def run(self, plan: Plan, workspace: int) -> Traced:
        """One step, or rather two: from the second on an optimizer has its states.

        Raises:
            UnusableError: the model fails on this batch, or can't be run without data at all.
        """
        began = time.monotonic()
        try:
            traced = self._attempt(plan, workspace, truth=False)
        except _OtherTruth:
            traced = self._attempt(plan, workspace, truth=True)
        gc.collect()
        return msgspec.structs.replace(traced, seconds=time.monotonic() - began)

    def _attempt(self, plan: Plan, workspace: int, *, truth: bool, shares: tuple[int, ...] = ()) -> Traced:
        substitutes = Substitutes(truth=truth, length=_length(self._made.batch), shares=shares)
        recorder = Recorder(self._fakes.device, substitutes, workspace)
        coverage = Coverage(self._made.module)
        try:
            with self._scene(plan, recorder, substitutes) as training, coverage:
                training.run()
        except UnusableError as error:
            raise UnusableError(f"{self._name}: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever the user's model raises
            if substitutes.asked_truth and not truth:
                raise _OtherTruth from None
            if not is_of_fakes(error) or not recorder.ledger.everything:
                raise UnusableError(f"{self._name}: a training step raised {in_words(error)}") from None
            return self._bounded(plan, recorder.ledger, coverage, in_words(error))
        found = substitutes.partitions.found
        if not shares and max(found, default=1) > 1:
            return self._attempt(plan, workspace, truth=truth, shares=found)
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
    def _scene(self, plan: Plan, recorder: Recorder, substitutes: Substitutes) -> Iterator[Training]:
        """Everything that a step is traced in."""
        made = self._made
        with ExitStack() as stack:
            stack.enter_context(self._fakes.active())
            stack.enter_context(recorder)
            stack.enter_context(Kernels(self._fakes.device, substitutes))
            master = _master_dtype(made)
            stack.enter_context(dressed(made.module, self._fakes, compute_dtype(plan)))
            strategy = _strategy(plan, made, recorder, master)
            stack.callback(strategy.close)
            yield stack.enter_context(Training(plan, made, recorder, strategy, self._fakes))

    def _bounded(self, plan: Plan, ledger: Ledger, coverage: Coverage, why: str) -> Traced:
        parts, words = bounded(plan, self._made, ledger, coverage, why)
        return self._traced(plan, parts=parts, moment="backward", reserved=parts.total, bound=words, notes=self._notes)

    def _traced(self, plan: Plan, **found: Any) -> Traced:
        parameters = {id(each): each for each in self._made.module.parameters()}.values()
        batch = resized_batch(self._made, plan)
        return Traced(
            plan=plan,
            batch_size=samples_in(batch),
            parameter_count=sum(each.numel() for each in parameters),
            parameter_bytes=sum(each.nbytes for each in parameters),
            trainable_count=sum(each.numel() for each in parameters if each.requires_grad),
            batch_bytes=sum(each.nbytes for each in tensors_in(batch)),
            **found,
        )


def resized_batch(made: Made, plan: Plan) -> Any:
    """The batch that the plan asks for; the factory's own where it asks for none."""
    return resized(made.batch, plan.batch_size) if plan.batch_size else made.batch


def _length(batch: Any) -> int:
    """What an integer in the data is taken as: the batch's longest second dimension, as lengths of sequences are."""
    return max((each.shape[1] for each in tensors_in(batch) if each.dim() > 1), default=1)


def _master_dtype(made: Made) -> torch.dtype | None:
    return next((each.dtype for each in made.module.parameters() if each.is_floating_point()), None)


def _strategy(plan: Plan, made: Made, recorder: Recorder, master: torch.dtype | None) -> Alone:
    if plan.strategy == "none":
        return Alone(made.module, recorder, plan)
    if plan.strategy == "ddp":
        return Replicated(made.module, recorder, plan, made.trainer)
    if plan.strategy.startswith("deepspeed"):
        return Partitioned(made.module, recorder, plan, made.trainer)
    # A precision of 16-true or bf16-true casts what the optimizer steps too.
    kept = None if plan.precision.endswith("true") else master
    return (Sharded if plan.strategy == "fsdp2" else FlatSharded)(made.module, recorder, plan, kept)

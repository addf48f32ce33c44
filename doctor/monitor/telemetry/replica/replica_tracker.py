"""Tracks the replica of a rank: whether it stays equal to the others', and stays finite."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import msgspec

from doctor.collectors.base import NotPresent
from doctor.core.clock import monotonic
from doctor.core.facts import Checksum, Counted, ModelFacts, NonFinite, ReplicaFacts
from doctor.monitor.telemetry.cuda_events import event_factory
from doctor.monitor.telemetry.replica.checksum import ParameterChunks, digest
from doctor.monitor.telemetry.replica.gradient_check import GradientCheck
from doctor.monitor.telemetry.replica.loss_tracker import LossTracker
from doctor.monitor.telemetry.replica.model_layout import describe_model
from doctor.monitor.telemetry.replica.readback import Readback
from doctor.monitor.telemetry.replica.sample_history import SampleHistory
from doctor.monitor.telemetry.replica.step_settings import StepSettingsTracker

if TYPE_CHECKING:
    import torch

INITIAL_PARTS = 128
"""Parts that are summed before the first step: a quarter of a GiB on a CPU, 32 GiB on a CUDA device; of larger
models the beginning."""

EARLY_SAMPLE = 10
"""The optimizer step and the batch of a first sample: with steps of seconds, the fiftieth comes minutes later."""
ALONE_EVERY = 0.5
"""Seconds between two samples of a rank without peers, whose samples nothing compares. One takes 0.15 ms, which short
steps must not pay every ``every_n_steps``."""
MOST_NAMED = 64
"""Parameters that facts name."""
REDUCES = "require_forward_param_sync"
"""The attribute of DistributedDataParallel by which the last forward pass with gradients prepared their reduction
(``_post_forward``, torch/nn/parallel/distributed.py)."""


class ReplicaTracker:
    """Checksums of the parameters and the losses of a rank.

    A checksum is taken every ``every_n_steps`` optimizer steps and as many batches, and once before
    (:data:`EARLY_SAMPLE`); both count from 1. A model of many
    tensors is sampled part by part in turn, so that a sample takes less than a millisecond on a CPU and some kernel
    launches on a CUDA device, whose results are read when they have arrived. If both are due at once, one sample serves
    both.

    Gradients are checked once, on a CPU, after a loss that is not finite, if they still exist (Lightning clears them in
    the next step, others at the end of this one) and the loss belongs to this very batch: some batches later every
    gradient is affected. Of a finite loss, ``gradients`` shows one that is NaN before it is reduced, and that later
    losses follow.

    ``settings``: those of optimizers and modules, sampled after the same optimizer steps as the checksums.
    ``has_peers``: returns whether other ranks take the same samples; all of them need one after the same step.

    ``loss`` takes the number of a batch and its loss, as :meth:`.LossTracker.record`; if it returns ``True``,
    :meth:`batch_end` is to be called at once, and otherwise at least every ``every_n_steps``.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every = max(1, every_n_steps)
        self.early = EARLY_SAMPLE if self._every > EARLY_SAMPLE else 0
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._wrapper: Callable[[], object] = _no_wrapper
        self._model: ModelFacts | None = None
        self._parts: ParameterChunks | None = None
        self._readback: Readback | None = None
        self._losses = LossTracker()
        self.settings = StepSettingsTracker()
        self.gradients = GradientCheck()
        self.loss = self._losses.record
        self.has_peers: Callable[[], bool] = lambda: True
        self._due = 0.0
        self._checksums: dict[Counted, SampleHistory[Checksum]] = {"step": SampleHistory(), "batch": SampleHistory()}
        self._initial: dict[str, str] = {}
        self._last: ChecksumSample | None = None
        self._gradients: tuple[NonFinite, ...] | None = None
        self._reduces = False
        self._reductions = 0

    def attach(
        self, module: object, *, replicated: bool | None, broadcast: bool | None, wrapper: object = None
    ) -> None:
        """Set the model, a bare :class:`torch.nn.Module`, which is not kept alive.

        ``replicated``: all data-parallel ranks hold the same values (``None``: unknown); ``broadcast``: the wrapper
        broadcasts them; ``wrapper``: that one, which is not kept alive either. Not for the step path: reads all
        parameters once, and waits for that.
        """
        model = cast("torch.nn.Module", module)
        facts = describe_model(model, replicated, broadcast)
        self._module = weakref.ref(model)
        self._wrapper = _no_wrapper if wrapper is None else weakref.ref(wrapper)
        self._reduces, self._reductions = hasattr(wrapper, REDUCES), 0
        self.settings.attach(model)
        if replicated:
            self.gradients.attach(model)
        elif facts.replicated is False:
            self.gradients.attach_sharded(model)
        self._parts = ParameterChunks(model) if facts.replicated is not False else None
        parameter = next(model.parameters(), None)
        events = event_factory(parameter.device) if parameter is not None else None
        self._readback = Readback(events) if events is not None else None
        self._losses.readback = self._readback
        self._checksums = {"step": SampleHistory(), "batch": SampleHistory()}
        initial, self._initial = _initial_checksums(self._parts) if self._parts is not None else (None, {})
        self._model = msgspec.structs.replace(facts, initial=initial)

    def describe(self, module: torch.nn.Module, replicated: bool | None, broadcast: bool | None) -> None:
        """Set the names, shapes and types of a model that is not trained; its values are not read."""
        self._model = describe_model(module, replicated, broadcast)

    def optimizer_step(self, step: int, batches: int | None = None) -> None:
        """Record optimizer step number ``step``. To be called at least every ``every_n_steps``.

        ``batches``: those trained so far, with the one of this step.
        """
        if (step % self._every == 0 or step == self.early) and self._is_due(step, step):
            self._take_sample("step", step, step)
            # Nothing but this shows that a rank did not update its shard; other wrappers leave ranks their own pace.
            is_sharded = self._model is not None and self._model.replicated is False
            self.settings.take_sample(
                step // self._every,
                step,
                batches if is_sharded else None,
                self._reductions if self._reduces else None,
            )

    def backward_begins(self) -> None:
        """Count a backward pass in which DistributedDataParallel reduces gradients. (step path)"""
        if self._reduces and getattr(self._wrapper(), REDUCES, False):
            self._reductions += 1

    def batch_end(self, batch: int, steps: int = -1) -> None:
        """Record the end of a batch after ``steps`` optimizer steps.

        Samples are not labeled by steps alone: a manual loop may not count them while the parameters change.
        """
        self._losses.fetch()
        self.gradients.batch_end()
        non_finite = self._losses.first
        if non_finite is not None and non_finite.step == batch and self._gradients is None:
            module = self._module() if self._module is not None else None
            self._gradients = _non_finite_gradient(module, batch) if module is not None else ()
        if self._readback is not None:
            self._readback.collect()
        if (batch % self._every == 0 or batch == self.early) and self._is_due(batch, steps):
            self._take_sample("batch", batch, steps)

    def finish(self) -> None:
        """Check the last losses as far as they arrive. For the training thread, as no batch follows.

        A query from another thread would end the capture of a CUDA graph.
        """
        self._losses.finish()

    def model(self) -> ModelFacts:
        """Return the facts of the model; raise :class:`NotPresent` before it is attached."""
        if self._model is None:
            raise NotPresent("no model was attached to the monitor")
        return self._model

    def facts(self, *, stands: bool = False) -> ReplicaFacts:
        """Return everything recorded so far. For any thread: no device is queried.

        ``stands``: the training thread stands still, so that gradients that it has not computed are recorded.
        """
        losses = (self._losses.first,) if self._losses.first else ()
        own = (gradient,) if (gradient := self.gradients.before(self._losses.first)) else ()
        return ReplicaFacts(
            checksums=tuple(one for counted in ("step", "batch") for one in self._checksums[counted].kept(_by_step)),
            non_finite=(*losses, *own, *(self._gradients or ())),
            losses=self._losses.seen,
            non_finite_losses=self._losses.in_a_row,
            settings=self.settings.kept(),
            unfrozen=self.settings.unfrozen()[:MOST_NAMED],
            without_gradient=self.settings.without_gradient()[:MOST_NAMED] if stands else (),
        )

    def _is_due(self, count: int, steps: int) -> bool:
        """Return whether to take a sample: always with peers, and one that was just taken is filed twice."""
        last = self._last
        if self.has_peers() or (last is not None and (last.number, last.steps) == (count // self._every, steps)):
            return True
        now = monotonic()
        if now < self._due:
            return False
        self._due = now + ALONE_EVERY
        return True

    def _take_sample(self, counted: Counted, count: int, steps: int) -> None:
        """Take the checksum of the next part, unless it was taken after the same optimizer step.

        Nothing is computed that could not be fetched.
        """
        import torch

        number, readback, parts = count // self._every, self._readback, self._parts
        if parts is None:
            return
        last = self._last
        if last is not None and steps >= 0 and (number, steps) == (last.number, last.steps):
            self._keep(last, counted, count)
            return
        if readback is not None and not readback.is_open():
            return
        label, sums = parts.sums(number)
        if not sums:
            return
        # Of DistributedDataParallel: whether the backward pass reduces gradients, ``False`` within no_sync().
        local = getattr(self._wrapper(), "require_backward_grad_sync", True) is False
        self._last = sample = ChecksumSample(number, steps, label, local=local)
        self._keep(sample, counted, count)
        if readback is None:
            self._arrived(sample, map(int, sums))
        else:
            numbers = torch.stack([torch.as_tensor(one) for one in sums])
            readback.send(numbers, lambda arrived: self._arrived(sample, arrived))

    def _keep(self, sample: ChecksumSample, counted: Counted, count: int) -> None:
        """File a sample under a count, now or when its value arrives."""
        if sample.value is None:
            sample.waiting.append((counted, count))
            return
        initial = self._initial.get(sample.label)
        changed = None if initial is None else sample.value != initial
        self._checksums[counted].add(
            sample.number, Checksum(count, sample.value, sample.label, counted, changed, sample.local)
        )

    def _arrived(self, sample: ChecksumSample, numbers: Iterable[int]) -> None:
        sample.value = digest(numbers)
        for counted, count in sample.waiting:
            self._keep(sample, counted, count)


class ChecksumSample(msgspec.Struct):
    """Sample ``number``, after ``steps`` optimizer steps (-1: not counted).

    ``value``: ``None`` until it has arrived; ``waiting``: the counts to file it under; ``local``: taken within
    ``no_sync()``.
    """

    number: int
    steps: int
    label: str
    value: str | None = None
    local: bool = False
    waiting: list[tuple[Counted, int]] = msgspec.field(default_factory=list)


def _no_wrapper() -> None:
    return None


def _by_step(checksum: Checksum) -> tuple[int, str]:
    return checksum.step, checksum.part


def _initial_checksums(parts: ParameterChunks) -> tuple[str, dict[str, str]]:
    """Return the checksums of a whole model, and of its parts by label; waits for its device."""
    whole: list[int] = []
    by_label: dict[str, str] = {}
    for sample in range(min(len(parts.all), INITIAL_PARTS)):
        label, sums = parts.sums(sample)
        numbers = [int(one) for one in sums]
        whole += numbers
        by_label[label] = digest(numbers)
    return digest(whole), by_label


def _non_finite_gradient(module: torch.nn.Module, batch: int) -> tuple[NonFinite, ...]:
    """Return the first gradient on the CPU that is not finite."""
    import torch

    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None or gradient.device.type != "cpu" or gradient.layout != torch.strided:
            continue
        finite = torch.isfinite(gradient.detach())
        if not finite.all():
            return (NonFinite(batch, "gradient", name, str(gradient.detach()[~finite][0].item())),)
    return ()

"""How the replica of a rank fares: whether it stays equal to the others', and whether its numbers stay finite."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from doctor.collectors.base import NotPresent
from doctor.core.facts import Checksum, Counted, ModelFacts, NonFinite, ReplicaFacts
from doctor.monitor.telemetry.cuda_events import event_factory
from doctor.monitor.telemetry.replica.checksum import ParameterChunks, digest
from doctor.monitor.telemetry.replica.loss_tracker import LossTracker
from doctor.monitor.telemetry.replica.model_layout import describe_model
from doctor.monitor.telemetry.replica.readback import Readback

if TYPE_CHECKING:
    import torch

INITIAL_PARTS = 128
"""Parts that are added up before the first step: a quarter of a GiB on a CPU, 32 GiB on a CUDA device; of larger models
the beginning."""
KEPT, RATIO, LEVELS = 16, 8, 4
"""Of every look, of every 8th, 64th and 512th the newest 16 are kept: ranks that are asked at different moments have
some in common."""


class ReplicaTracker:
    """Checksums of the parameters every ``every_n_steps`` optimizer steps and as many batches, and the loss of every
    batch.

    A model of many tensors is looked at part by part, by turns, so that a look takes less than a millisecond on a CPU
    and some launches on a CUDA device, whose results are read when they have arrived. Steps and batches count
    from 1. Where both are due at once, one look serves both.

    Gradients are looked at on a CPU after a loss that is not finite, once, where they are still there (Lightning clears
    them in the next step, others at the end of this one) and the loss is that of this very batch: some batches later
    every gradient is spoilt. Ones that are not finite under a finite loss are no news: either a GradScaler is searching
    for its scale, or the next loss tells.

    ``loss`` takes the number of a batch and its loss, as :meth:`.Losses.see`; where that says so :meth:`batch_end` is
    to be called at once, and at the latest every ``every_n_steps``.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every = max(1, every_n_steps)
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._model: ModelFacts | None = None
        self._parts: ParameterChunks | None = None
        self._readback: Readback | None = None
        self._losses = LossTracker()
        self.loss = self._losses.see
        self._checksums: dict[Counted, ChecksumHistory] = {"step": ChecksumHistory(), "batch": ChecksumHistory()}
        self._began: dict[str, str] = {}
        self._last: ChecksumSample | None = None
        self._gradients: tuple[NonFinite, ...] | None = None

    def attach(self, module: object, *, replicated: bool | None, broadcast: bool | None) -> None:
        """The model that is trained, as a bare :class:`torch.nn.Module`; it is not kept alive. ``replicated``: all
        data-parallel ranks hold the same values (``None``: not known); ``broadcast``: the wrapper makes them equal.

        Not on the step path: reads all parameters once, and waits for that.
        """
        model = cast("torch.nn.Module", module)
        facts = describe_model(model, replicated, broadcast)
        self._module = weakref.ref(model)
        self._parts = ParameterChunks(model) if facts.replicated is not False else None
        self._readback = _readback(next(model.parameters(), None))
        self._losses.readback = self._readback
        self._checksums = {"step": ChecksumHistory(), "batch": ChecksumHistory()}
        began = initial_checksums(self._parts) if self._parts is not None else None
        self._began = began.parts if began else {}
        self._model = msgspec.structs.replace(facts, initial=began and began.whole)

    def optimizer_step(self, step: int) -> None:
        """The optimizer has stepped, ``step`` times so far. To be called at least every ``every_n_steps``."""
        if step % self._every == 0:
            self._look("step", step, step)

    def batch_end(self, batch: int, steps: int = -1) -> None:
        """A batch is done; ``steps`` of the optimizer so far. They do not label everything: a loop that optimizes by
        hand may not count them while the parameters change."""
        self._losses.fetch()
        spoilt = self._losses.first
        if spoilt is not None and spoilt.step == batch and self._gradients is None:
            self._gradients = self._spoilt_gradients(batch)
        if self._readback is not None:
            self._readback.collect()
        if batch % self._every == 0:
            self._look("batch", batch, steps)

    def finish(self) -> None:
        """No batch follows: take the last losses as far as they come. For the training thread: another one's question
        would end the capture of a CUDA graph."""
        self._losses.finish()

    def model(self) -> ModelFacts:
        """The model; :class:`NotPresent` before it is attached."""
        if self._model is None:
            raise NotPresent("no model was attached to the monitor")
        return self._model

    def facts(self) -> ReplicaFacts:
        """What was seen so far. For any thread: nothing is asked of a device."""
        losses = (self._losses.first,) if self._losses.first else ()
        return ReplicaFacts(
            checksums=tuple(one for counted in ("step", "batch") for one in self._checksums[counted].kept()),
            non_finite=(*losses, *(self._gradients or ())),
            losses=self._losses.seen,
        )

    def _look(self, counted: Counted, count: int, steps: int) -> None:
        """Take the checksum of the part whose turn it is, unless it was taken after the same step of the optimizer;
        nothing is computed that could not be fetched."""
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
        self._last = look = ChecksumSample(number, steps, label)
        self._keep(look, counted, count)
        if readback is None:
            self._arrived(look, map(int, sums))
        else:
            numbers = torch.stack([torch.as_tensor(one) for one in sums])
            readback.send(numbers, lambda arrived: self._arrived(look, arrived))

    def _keep(self, look: ChecksumSample, counted: Counted, count: int) -> None:
        """File a look under a count, now or when its value is there."""
        if look.value is None:
            look.waiting.append((counted, count))
            return
        began = self._began.get(look.label)
        moved = None if began is None else look.value != began
        self._checksums[counted].add(look.number, Checksum(count, look.value, look.label, counted, moved))

    def _arrived(self, look: ChecksumSample, numbers: Iterable[int]) -> None:
        look.value = digest(numbers)
        for counted, count in look.waiting:
            self._keep(look, counted, count)

    def _spoilt_gradients(self, batch: int) -> tuple[NonFinite, ...]:
        module = self._module() if self._module is not None else None
        return tuple(islice(non_finite_gradients(module, batch), 1)) if module is not None else ()


@dataclass
class ChecksumSample:
    """The ``number``-th look, after ``steps`` of the optimizer (-1: not counted). ``value``: ``None`` until it has
    arrived; ``waiting``: the counts that it will be filed under."""

    number: int
    steps: int
    label: str
    value: str | None = None
    waiting: list[tuple[Counted, int]] = field(default_factory=list)


class ChecksumHistory:
    """The newest checksums, and ever fewer of older looks. One thread adds, any thread reads."""

    def __init__(self) -> None:
        self._levels = [deque[Checksum](maxlen=KEPT) for _ in range(LEVELS)]

    def add(self, look: int, checksum: Checksum) -> None:
        """Keep the checksum of the ``look``-th look."""
        for level, kept in enumerate(self._levels):
            if look % RATIO**level == 0:
                kept.append(checksum)

    def kept(self) -> tuple[Checksum, ...]:
        """All that are kept, oldest first."""
        found = {checksum for kept in self._levels for checksum in tuple(kept)}
        return tuple(sorted(found, key=lambda checksum: (checksum.step, checksum.part)))


class InitialChecksums(NamedTuple):
    """Checksums of a model before its first step: of the ``whole``, and of its ``parts`` by label."""

    whole: str
    parts: dict[str, str]


def initial_checksums(parts: ParameterChunks) -> InitialChecksums:
    """What a model is before its first step; waits for its device."""
    whole: list[int] = []
    by_label: dict[str, str] = {}
    for look in range(min(len(parts.all), INITIAL_PARTS)):
        label, sums = parts.sums(look)
        numbers = [int(one) for one in sums]
        whole += numbers
        by_label[label] = digest(numbers)
    return InitialChecksums(digest(whole), by_label)


def non_finite_gradients(module: torch.nn.Module, batch: int) -> Iterator[NonFinite]:
    """Gradients on the CPU that are there and not finite, in the order of the parameters. Reads every one of them."""
    import torch

    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None or gradient.device.type != "cpu" or gradient.layout != torch.strided:
            continue
        finite = torch.isfinite(gradient.detach())
        if not finite.all():
            yield NonFinite(batch, "gradient", name, str(gradient.detach()[~finite][0].item()))


def _readback(parameter: torch.Tensor | None) -> Readback | None:
    events = event_factory(parameter.device) if parameter is not None else None
    return Readback(events) if events is not None else None

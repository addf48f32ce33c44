"""Loaders of ranks some of which have none: their batches are compared, and nothing else.

Of the tensor-parallel ranks of Megatron-LM the first one alone has a loader, and of its pipeline stages the first and
the last; the others receive its batches in the forward pass. Were its batches those of the run, the points of a step
would differ between ranks that do the same work: a rank that reads would be slower than those that wait for it, and
these would have another number of batches. So steps are counted by the optimizer on every rank, and loaders are
compared only among the ranks of one data-parallel group, which have the same place in every other dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

from doctor.monitor.integrations.plain import LoaderSlot
from doctor.monitor.telemetry.data.loader_history import LoaderHistories
from doctor.monitor.telemetry.stacks.loop_exits import LoopExits


class TrainingPass(Protocol):
    """One pass over a loader, whose batches train."""

    slot: LoaderSlot
    exits: LoopExits
    kind: tuple[Any, ...]

    @property
    def wrapped(self) -> Any:
        """The loader."""

    @property
    def is_over(self) -> bool:
        """Whether no batch can follow."""


class UncountedPasses:
    """Records what the passes of training yield, one after the other; of several at once, the first."""

    def __init__(self, loaders: LoaderHistories) -> None:
        self._loaders = loaders
        self._current: TrainingPass | None = None
        self._kinds: set[tuple[Any, ...]] = set()
        self._ended = 0

    def begin(self, one: TrainingPass) -> None:
        """Record the first batch of a pass: it is taken if no other is under way, and if its kind trained before."""
        if self._current is not None and not self._current.is_over:
            return
        if self._kinds and one.kind not in self._kinds:
            return
        if self._current is not None:
            self.end(self._current, ended=False, is_confirmed=True)
        self._current = one
        self._loaders.attach(*one.slot, one.wrapped)
        self._loaders.loop_exits(*one.slot, one.exits)
        if one.exits.by_next:
            self._loaders.taken_by_next(*one.slot)
        self._loaders.epoch_start(one.slot.stage, self._ended)

    def fetched(self, one: TrainingPass, batch: object) -> None:
        """Record a batch. (step path)"""
        if one is self._current:
            self._loaders.record_batch(*one.slot, batch)

    def end(self, one: TrainingPass, *, ended: bool, is_confirmed: bool) -> None:
        """Record the end of a pass; ``ended``: the loader was exhausted; ``is_confirmed``: an optimizer has stepped."""
        if one is not self._current:
            return
        self._current = None
        if not is_confirmed:
            self._loaders.forget(*one.slot)
            return
        self._kinds.add(one.kind)
        self._loaders.epoch_end(*one.slot, ended=ended)
        self._ended += 1

    def restarted(self, loader: object, *, is_confirmed: bool) -> None:
        """Record that a new pass over a loader begins, which leaves the one before."""
        if self._current is not None and self._current.wrapped is loader:
            self.end(self._current, ended=False, is_confirmed=is_confirmed)

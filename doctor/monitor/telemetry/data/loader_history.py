"""The loaders of a rank: their properties, and what they delivered in each epoch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from doctor.core.facts import Loader, LoaderEpoch, LoaderFacts
from doctor.monitor.telemetry.data.batch_fingerprint import BatchFingerprint
from doctor.monitor.telemetry.data.batch_size import BatchSizeReader
from doctor.monitor.telemetry.data.loader_inspection import index_sampler_of, read_loader
from doctor.monitor.telemetry.data.sample_trace import LoaderPass, SampleTrace
from doctor.monitor.telemetry.data.sampler_inspection import epoch_of
from doctor.monitor.telemetry.stacks.loop_exits import LoopExits

KEPT_EPOCHS = 8
KEPT_FIRST = 2
"""Newest epochs whose first indices are included."""
LEAST_CONTENTS, MOST_CONTENTS = 4, 17
"""Batches of an epoch that get a fingerprint: one more than there are workers, within these bounds."""
MOST_SIZES = 8
"""Maximum number of distinct batch sizes; more would only say that they vary."""


class LoaderHistories:
    """All loaders of this rank. Any thread may call :meth:`facts`."""

    def __init__(self) -> None:
        self._trace = SampleTrace()
        self._histories: dict[tuple[str, int], _LoaderHistory] = {}
        self._epochs: dict[str, int] = {}

    def open(self) -> None:
        """Start tracing samplers, also for loaders attached later, because workers prefetch."""
        self._trace.open()

    def close(self) -> None:
        """Restore torch; the recorded history stays."""
        self._trace.close()

    def attach(
        self, stage: str, index: int, loader: object, limit: int | None = None, combined: str | None = None
    ) -> None:
        """Set ``loader`` as the stage's loader ``index``, without iterating over it.

        ``limit``: maximum of batches that are taken; ``combined``: how several loaders of a stage end together. A
        loader that is attached anew keeps its history.
        """
        known = self._histories.get((stage, index))
        if known is not None and known.is_of(loader):
            known.limit = limit
            return
        self._histories[stage, index] = _LoaderHistory(
            read_loader(stage, index, loader, limit, combined),
            loader,
            self._trace.newest,
            self._epochs.get(stage, 0),
            known.epochs if known is not None else None,
        )

    def taken_by_next(self, stage: str, index: int) -> None:
        """Record that the program takes batches of a loader by ``next()``, and may start it anew where it ends."""
        known = self._histories.get((stage, index))
        if known is not None:
            known.by_next = True

    def loop_exits(self, stage: str, index: int, exits: LoopExits) -> None:
        """Record how the loop over a loader can end before it."""
        known = self._histories.get((stage, index))
        if known is not None:
            known.exits = exits

    def epoch_start(self, stage: str, epoch: int) -> None:
        """Record that the loaders of ``stage`` are about to deliver the batches of ``epoch``."""
        self._epochs[stage] = epoch
        for history in self._of(stage):
            history.next_epoch(epoch)

    def record_batch(self, stage: str, index: int, batch: object) -> None:
        """Record that a loader delivered ``batch``. (step path)"""
        self.batch_recorder(stage, index)(batch)

    def batch_recorder(self, stage: str, index: int) -> Callable[[object], None]:
        """Return the recorder of a loader's batches, valid until the loader is attached anew."""
        history = self._histories.get((stage, index))
        if history is None:
            unknown, epoch = Loader(stage, index, kind="other"), self._epochs.get(stage, 0)
            history = _LoaderHistory(unknown, None, self._trace.newest, epoch, None)
            self._histories[stage, index] = history
        return history.record_batch

    def epoch_end(self, stage: str, index: int, *, ended: bool) -> int:
        """End the epoch of a loader and return its number of batches; ``ended``: it was exhausted."""
        history = self._histories.get((stage, index))
        return history.end(ended) if history is not None else 0

    def forget(self, stage: str, index: int) -> None:
        """Drop a loader that turned out not to be one of ``stage``."""
        self._histories.pop((stage, index), None)

    def units(self) -> int | None:
        """Return tokens, else samples, of the largest training batch since the last call."""
        return max((history.take_units() for history in self._of("train")), default=0) or None

    def facts(self) -> LoaderFacts:
        """Return the facts known by now. Not for the step path."""
        hidden = self._trace.hidden
        return LoaderFacts(
            loaders=tuple(history.facts() for _, history in sorted(self._histories.items())),
            hidden=(hidden,) if hidden else (),
        )

    def _of(self, stage: str) -> list[_LoaderHistory]:
        return [history for (name, _), history in list(self._histories.items()) if name == stage]


class _LoaderEpoch:
    __slots__ = ("batches", "contents", "ended", "last", "loader_pass", "number", "sampler_epoch", "samples", "sizes")

    def __init__(self, number: int, loader_pass: LoaderPass | None, sampler_epoch: int | None) -> None:
        self.number = number
        self.sampler_epoch = sampler_epoch
        self.loader_pass = loader_pass
        self.batches = 0
        self.samples: int | None = 0
        self.sizes: set[int] = set()
        self.last: int | None = None
        self.contents: list[BatchFingerprint] = []
        self.ended = False

    def facts(self, with_first: bool) -> LoaderEpoch:
        contents = tuple(_known(self.contents))
        return LoaderEpoch(
            self.number,
            drawn=self.loader_pass.drawn if self.loader_pass else None,
            content=contents[0] if contents else None,
            first=tuple(self.loader_pass.first) if self.loader_pass and with_first else (),
            batches=self.batches,
            samples=self.samples,
            sizes=tuple(sorted(self.sizes)),
            ended=self.ended,
            contents=contents,
            sampler_epoch=self.sampler_epoch,
        )


def _known(contents: list[BatchFingerprint]) -> Iterator[str]:
    """Yield the digests up to the first missing one; a gap would shift those of one rank."""
    for one in list(contents):
        digest = one.digest()
        if digest is None:
            return
        yield digest


class _LoaderHistory:
    __slots__ = (
        "_current",
        "_fingerprinted",
        "_loader",
        "_loader_facts",
        "_newest",
        "_next",
        "_sampler",
        "_size_reader",
        "by_next",
        "epochs",
        "exits",
        "limit",
        "units",
    )

    def __init__(
        self,
        loader_facts: Loader,
        loader: object,
        newest: Callable[[object], LoaderPass | None],
        epoch: int,
        epochs: deque[_LoaderEpoch] | None,
    ) -> None:
        self.limit = loader_facts.limit
        self.by_next = False
        self.exits = LoopExits()
        self.units = 0
        self.epochs: deque[_LoaderEpoch] = deque(maxlen=KEPT_EPOCHS) if epochs is None else epochs
        self._loader_facts = loader_facts
        self._loader = weak_reference(loader)
        self._sampler = weak_reference(index_sampler_of(loader))
        self._newest = newest
        self._next = epoch
        self._current: _LoaderEpoch | None = None
        self._size_reader = BatchSizeReader()
        self._fingerprinted = min(max(LEAST_CONTENTS, (loader_facts.workers or 0) + 1), MOST_CONTENTS)

    def is_of(self, loader: object) -> bool:
        return loader is not None and self._loader() is loader

    def next_epoch(self, epoch: int) -> None:
        self._current = None
        self._next = epoch

    def record_batch(self, batch: object) -> None:
        """Count a batch, and the size of the one before, which was not the last. (step path)"""
        current = self._current or self._begin()
        if current.batches < self._fingerprinted:
            current.contents.append(BatchFingerprint(batch))
        current.batches += 1
        size = self._size_reader.measure(batch)
        if size is None:
            current.samples = None
            return
        samples, units = size
        if units > self.units:
            self.units = units
        if current.samples is not None:
            current.samples += samples
        last = current.last
        if last is not None and last not in current.sizes and len(current.sizes) < MOST_SIZES:
            current.sizes.add(last)
        current.last = samples

    def take_units(self) -> int:
        units, self.units = self.units, 0
        return units

    def end(self, ended: bool) -> int:
        """End the epoch. The size of a last batch chosen by a limit counts like any other."""
        current = self._current or self._begin()
        current.ended = ended
        if current.loader_pass is not None:
            current.loader_pass.close()
        if not ended and current.last is not None and len(current.sizes) < MOST_SIZES:
            current.sizes.add(current.last)
        self._current = None
        self._next = current.number + 1
        return current.batches

    def facts(self) -> Loader:
        epochs = list(self.epochs)
        sampler, outermost = self._loader_facts.sampler, self._sampler()
        if sampler is not None and outermost is not None:
            sampler = msgspec.structs.replace(sampler, epoch=epoch_of(outermost))
        return msgspec.structs.replace(
            self._loader_facts,
            limit=self.limit,
            by_next=self.by_next,
            loop_limit=self.exits.limit,
            has_exits=self.exits.has_others,
            sampler=sampler,
            epochs=tuple(one.facts(place >= len(epochs) - KEPT_FIRST) for place, one in enumerate(epochs)),
        )

    def _begin(self) -> _LoaderEpoch:
        """Start the epoch whose first batch has arrived.

        It belongs to the newest pass over the loader's sampler: a pass begins before its first batch arrives, and not
        before that of the epoch before.
        """
        while self.epochs and self.epochs[-1].number >= self._next:
            self.epochs.pop()
        sampler = self._sampler()
        loader_pass = self._newest(sampler) if sampler is not None else None
        if any(one.loader_pass is loader_pass for one in self.epochs):
            loader_pass = None
        self._current = _LoaderEpoch(self._next, loader_pass, epoch_of(sampler))
        self.epochs.append(self._current)
        return self._current


def weak_reference(thing: Any) -> Callable[[], Any]:
    """Return a weak reference, so that loaders, which hold datasets, can be freed.

    An object without weak references (a plain list as sampler) is small and is kept.
    """
    try:
        return weakref.ref(thing) if thing is not None else lambda: None
    except TypeError:
        return lambda: thing

"""The loaders of a rank: what they are, what they drew and gave in each epoch."""

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
from doctor.monitor.telemetry.data.sampler_inspection import refresh_epoch

KEPT_EPOCHS = 8
KEPT_FIRST = 2
"""Newest epochs of which the first indices themselves are told."""
LEAST_CONTENTS, MOST_CONTENTS = 4, 17
"""Batches of an epoch whose contents are looked at: one more than workers take turns, within these bounds."""
MOST_SIZES = 8
"""Distinct batch sizes that are told; more say no more than that they vary."""


class LoaderHistories:
    """All loaders of this rank. :meth:`facts` may be called by another thread, all else by the one that trains."""

    def __init__(self) -> None:
        self._draws = SampleTrace()
        self._tallies: dict[tuple[str, int], _LoaderHistory] = {}
        self._epochs: dict[str, int] = {}

    def open(self) -> None:
        """Begin to see what loaders draw: also those that are attached later, since workers are sent ahead."""
        self._draws.open()

    def close(self) -> None:
        """Leave torch as it was. What was seen stays."""
        self._draws.close()

    def attach(
        self, stage: str, index: int, loader: object, limit: int | None = None, combined: str | None = None
    ) -> None:
        """The stage's loader ``index`` is ``loader``, of which ``limit`` batches are taken at most; ``combined``: how
        several loaders of a stage end together. Nothing is drawn from it. Attached anew it keeps its record."""
        known = self._tallies.get((stage, index))
        if known is not None and known.is_of(loader):
            known.limit = limit
            return
        self._tallies[stage, index] = _LoaderHistory(
            read_loader(stage, index, loader, limit, combined),
            loader,
            self._draws.newest,
            self._epochs.get(stage, 0),
            known.epochs if known is not None else None,
        )

    def epoch_start(self, stage: str, epoch: int) -> None:
        """The loaders of ``stage`` are about to give the batches of ``epoch``."""
        self._epochs[stage] = epoch
        for tally in self._of(stage):
            tally.next_epoch(epoch)

    def saw(self, stage: str, index: int, batch: object) -> None:
        """A loader gave ``batch``. (step path)"""
        self.seeing(stage, index)(batch)

    def seeing(self, stage: str, index: int) -> Callable[[object], None]:
        """What takes the batches of a loader until it is attached anew."""
        tally = self._tallies.get((stage, index))
        if tally is None:
            tally = self._tallies[stage, index] = self._unattached(stage, index)
        return tally.saw

    def epoch_end(self, stage: str, index: int, *, ended: bool) -> int:
        """No more is taken from a loader in this epoch; ``ended``: it had no more. Returns the batches that it gave."""
        tally = self._tallies.get((stage, index))
        return tally.end(ended) if tally is not None else 0

    def units(self) -> int | None:
        """Tokens, else samples, of the largest batch of training since this was last asked."""
        return max((tally.take_units() for tally in self._of("train")), default=0) or None

    def facts(self) -> LoaderFacts:
        """What is known by now. Not for the step path."""
        hidden = self._draws.hidden
        return LoaderFacts(
            loaders=tuple(tally.facts() for _, tally in sorted(self._tallies.items())),
            hidden=(hidden,) if hidden else (),
        )

    def _of(self, stage: str) -> list[_LoaderHistory]:
        return [tally for (name, _), tally in list(self._tallies.items()) if name == stage]

    def _unattached(self, stage: str, index: int) -> _LoaderHistory:
        nothing = Loader(stage, index, kind="other")
        return _LoaderHistory(nothing, None, self._draws.newest, self._epochs.get(stage, 0), None)


class _LoaderEpoch:
    """One epoch of one loader."""

    __slots__ = ("batches", "contents", "ended", "last", "number", "passed", "samples", "sizes")

    def __init__(self, number: int, passed: LoaderPass | None) -> None:
        self.number = number
        self.passed = passed
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
            drawn=self.passed.drawn if self.passed else None,
            content=contents[0] if contents else None,
            first=tuple(self.passed.first) if self.passed and with_first else (),
            batches=self.batches,
            samples=self.samples,
            sizes=tuple(sorted(self.sizes)),
            ended=self.ended,
            contents=contents,
        )


def _known(contents: list[BatchFingerprint]) -> Iterator[str]:
    """The digests up to the first batch that can't be looked at (yet): a gap would shift those of one rank."""
    for one in list(contents):
        digest = one.digest()
        if digest is None:
            return
        yield digest


class _LoaderHistory:
    """What one loader is, and its last epochs."""

    __slots__ = (
        "_about",
        "_current",
        "_gauge",
        "_loader",
        "_looked_at",
        "_newest",
        "_next",
        "_sampler",
        "epochs",
        "limit",
        "units",
    )

    def __init__(
        self,
        about: Loader,
        loader: object,
        newest: Callable[[object], LoaderPass | None],
        epoch: int,
        epochs: deque[_LoaderEpoch] | None,
    ) -> None:
        self.limit = about.limit
        self.units = 0
        self.epochs: deque[_LoaderEpoch] = deque(maxlen=KEPT_EPOCHS) if epochs is None else epochs
        self._about = about
        self._loader = _reference(loader)
        self._sampler = _reference(index_sampler_of(loader))
        self._newest = newest
        self._next = epoch
        self._current: _LoaderEpoch | None = None
        self._gauge = BatchSizeReader()
        self._looked_at = min(max(LEAST_CONTENTS, (about.workers or 0) + 1), MOST_CONTENTS)

    def is_of(self, loader: object) -> bool:
        return loader is not None and self._loader() is loader

    def next_epoch(self, epoch: int) -> None:
        self._current = None
        self._next = epoch

    def saw(self, batch: object) -> None:
        """Count a batch. The size of the batch before counts now that it was not the last. (step path)"""
        current = self._current or self._begin()
        if current.batches < self._looked_at:
            current.contents.append(BatchFingerprint(batch))
        current.batches += 1
        size = self._gauge.measure(batch)
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
        """Those of the largest batch since this was last asked."""
        units, self.units = self.units, 0
        return units

    def end(self, ended: bool) -> int:
        """The epoch is over. A last batch that a limit chose is like the others, and its size counts."""
        current = self._current or self._begin()
        current.ended = ended
        if current.passed is not None:
            current.passed.close()
        if not ended and current.last is not None and len(current.sizes) < MOST_SIZES:
            current.sizes.add(current.last)
        self._current = None
        self._next = current.number + 1
        return current.batches

    def facts(self) -> Loader:
        epochs = list(self.epochs)
        sampler, outermost = self._about.sampler, self._sampler()
        if sampler is not None and outermost is not None:
            sampler = refresh_epoch(sampler, outermost)
        return msgspec.structs.replace(
            self._about,
            limit=self.limit,
            sampler=sampler,
            epochs=tuple(one.facts(place >= len(epochs) - KEPT_FIRST) for place, one in enumerate(epochs)),
        )

    def _begin(self) -> _LoaderEpoch:
        """The epoch of which the first batch is there. It was drawn in the newest pass over the loader's sampler: a
        pass begins before its first batch is there, and not before that of the epoch before."""
        while self.epochs and self.epochs[-1].number >= self._next:
            self.epochs.pop()
        sampler = self._sampler()
        passed = self._newest(sampler) if sampler is not None else None
        if any(one.passed is passed for one in self.epochs):
            passed = None
        self._current = _LoaderEpoch(self._next, passed)
        self.epochs.append(self._current)
        return self._current


def _reference(thing: Any) -> Callable[[], Any]:
    """A weak reference: loaders hold data sets, and are freed when their owner lets go. What takes none (a plain list
    as sampler) is small, and is kept."""
    try:
        return weakref.ref(thing) if thing is not None else lambda: None
    except TypeError:
        return lambda: thing

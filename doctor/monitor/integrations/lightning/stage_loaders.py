"""The loaders of one Trainer stage: limits, parts of a batch, and exhaustion."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from operator import getitem
from typing import Any

from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry

Keys = tuple[Any, ...]


class StageLoaders:
    """The loaders in the CombinedLoader of a loop.

    In mode ``sequential`` loaders follow each other, each with batches of its own; in other modes a batch has a part of
    every loader. If a release keeps loaders elsewhere, batches are still counted. ``is_alone``: batches come unchanged
    from one loader. ``taken``: its batches in this epoch.
    """

    def __init__(self, stage: str, loop: Any) -> None:
        self.stage = stage
        self.combined: Any = combined_loader(loop)
        self.loaders: list[Any] = value_or_default(lambda: list(self.combined.flattened), [])
        self._loop = loop
        self._mode = value_or_default(lambda: str(self.combined._mode), "")
        self._limits: list[float] = value_or_default(lambda: _limits(loop), [])
        self._lengths: dict[int, int | None] = {}
        self._parts: tuple[Keys, ...] = ()  # the keys of each loader's part of a batch
        if len(self.loaders) > 1 and self._mode != "sequential":
            keys = tuple(leaf_paths(value_or_default(lambda: self.combined.iterables, None)))
            self._parts = keys if len(keys) == len(self.loaders) else ()
        self._open: set[int] = set()
        self._at = 0
        self.is_alone = len(self.loaders) < 2
        self.taken = 0

    def attach(self, telemetry: RankTelemetry) -> None:
        """Describe the loaders to telemetry, which may iterate an epoch to find their lengths."""
        combined = self._mode if len(self.loaders) > 1 else None
        for index, loader in enumerate(self.loaders):
            telemetry.loaders.attach(self.stage, index, loader, combined=combined)
        self._lengths = {one.index: one.length for one in telemetry.loaders.facts().of(self.stage)}
        for index, loader in enumerate(self.loaders):
            telemetry.loaders.attach(self.stage, index, loader, self.limit(index), combined)

    def limit(self, index: int) -> int | None:
        """Return the Trainer's limit of batches of a loader, if it is less than its length."""
        limit = self._limits[index] if index < len(self._limits) else math.inf
        length = self._lengths.get(index)
        return None if math.isinf(limit) or (length is not None and limit >= length) else int(limit)

    def epoch_start(self) -> None:
        """Start an epoch of all loaders."""
        self._open = set(range(len(self.loaders)))
        self._at = self.taken = 0

    def batch_start(self, telemetry: RankTelemetry, batch: Any, number: int, index: int) -> None:
        """Record batch ``number`` of loader ``index`` of a sequence. (step path)"""
        if index != self._at:  # the loaders that precede it in the sequence have ended
            for earlier in sorted(one for one in self._open if one < index):
                self._end(telemetry, earlier, self.taken if earlier == self._at else 0)
            self._at = index
        self.taken = number + 1
        if not self._parts:
            telemetry.batch_start(self.stage, number, index, batch)
            return
        by_loader = self._split_batch(batch)
        first = next(iter(by_loader), 0)
        telemetry.batch_start(self.stage, number, first, by_loader.pop(first, None))
        for other, found in by_loader.items():
            telemetry.loaders.record_batch(self.stage, other, found)

    def _split_batch(self, batch: Any) -> dict[int, Any]:
        """Return the parts of a batch by loader, without exhausted loaders.

        Those yield ``None`` in mode ``max_size``. A user's hook may have changed the structure; the batch is then
        attributed to all loaders.
        """
        try:
            parts = [functools.reduce(getitem, keys, batch) for keys in self._parts]
        except (LookupError, TypeError):
            return dict.fromkeys(range(len(self._parts)))
        return {index: found for index, found in enumerate(parts) if found is not None}

    def epoch_end(self, telemetry: RankTelemetry) -> None:
        """End the epoch of all loaders; a second call has no effect."""
        for index in sorted(self._open):
            self._end(telemetry, index, self.taken if index == self._at or self._mode != "sequential" else 0)

    def _end(self, telemetry: RankTelemetry, index: int, taken: int) -> None:
        self._open.discard(index)
        telemetry.loader_end(self.stage, index, ended=self._has_ended(index, taken))

    def _has_ended(self, index: int, taken: int) -> bool:
        """Return whether a loader was exhausted, not stopped by a limit after ``taken`` batches.

        A loader of unknown length is exhausted if the loop got nothing more, or moved on to the next loader; in mode
        ``min_size`` any loader may have been the one.
        """
        length, limit = self._lengths.get(index), self.limit(index)
        if limit is not None and taken >= limit:
            return False
        if length is not None and taken >= length:
            return True
        if self._mode == "min_size" and len(self.loaders) > 1:
            return False
        moved_on = self._mode == "sequential" and index < self._at
        return moved_on or value_or_default(lambda: bool(self._loop._data_fetcher.done), False)


def combined_loader(loop: Any) -> Any | None:
    """Return the CombinedLoader of a loop, once it is set up."""
    return getattr(loop, "_combined_loader", None)


def _limits(loop: Any) -> list[float]:
    """Return the limit of each loader.

    Those of evaluation come from the loop, because the loader keeps those of the last sanity check.
    """
    limits = loop.max_batches
    return list(limits if isinstance(limits, list) else loop._combined_loader.limits or ())


def leaf_paths(tree: Any, prefix: Keys = ()) -> Iterable[Keys]:
    """Yield the key path of each leaf of nested containers, as ``torch.utils._pytree`` does."""
    if type(tree) in (dict, OrderedDict, defaultdict):
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    else:
        yield prefix
        return
    for key, child in children:
        yield from leaf_paths(child, (*prefix, key))

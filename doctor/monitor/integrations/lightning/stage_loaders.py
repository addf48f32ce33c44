"""The loaders of one stage of a Trainer: their limits, whose part of a batch is whose, and which came to their end."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry

Keys = tuple[Any, ...]


class StageLoaders:
    """What a loop of Lightning draws from: a CombinedLoader, even of one loader.

    In mode ``sequential`` one loader comes after the other, each with batches of its own; in the other modes a batch
    has a part of every loader. Without loaders, where a release keeps them elsewhere, batches are counted all the same.

    ``is_alone``: batches are of one loader as they are. ``taken``: those that it gave in this epoch.
    """

    def __init__(self, stage: str, loop: Any) -> None:
        self.stage = stage
        self.combined: Any = combined_loader(loop)
        self.loaders: list[Any] = value_or_default(lambda: list(self.combined.flattened), [])
        self._loop = loop
        self._mode = value_or_default(lambda: str(self.combined._mode), "")
        self._limits: list[float] = value_or_default(lambda: _limits(loop), [])
        self._lengths: dict[int, int | None] = {}
        self._parts = self._parting()
        self._open: set[int] = set()
        self._at = 0
        self.is_alone = len(self.loaders) < 2
        self.taken = 0

    def attach(self, monitor: RankTelemetry) -> None:
        """Describe them to the monitor, which also finds out their lengths: some loaders draw an epoch to know it."""
        combined = self._mode if len(self.loaders) > 1 else None
        for index, loader in enumerate(self.loaders):
            monitor.loaders.attach(self.stage, index, loader, combined=combined)
        self._lengths = {one.index: one.length for one in monitor.loaders.facts().of(self.stage)}
        for index, loader in enumerate(self.loaders):
            monitor.loaders.attach(self.stage, index, loader, self.limit(index), combined)

    def limit(self, index: int) -> int | None:
        """Batches that the Trainer takes of a loader at most, where these are fewer than it has."""
        limit = self._limits[index] if index < len(self._limits) else math.inf
        length = self._lengths.get(index)
        return None if math.isinf(limit) or (length is not None and limit >= length) else int(limit)

    def epoch_start(self) -> None:
        """All are to be drawn from again."""
        self._open = set(range(len(self.loaders)))
        self._at = self.taken = 0

    def batch_start(self, monitor: RankTelemetry, batch: Any, number: int, index: int) -> None:
        """A batch is there, ``number`` of its loader, ``index`` the loader of a sequence. (step path)"""
        if index != self._at:
            self._went_past(monitor, index)
        self.taken = number + 1
        if not self._parts:
            monitor.batch_start(self.stage, number, index, batch)
            return
        given = self._given(batch)
        first = next(iter(given), 0)
        monitor.batch_start(self.stage, number, first, given.pop(first, None))
        for other, found in given.items():
            monitor.loaders.saw(self.stage, other, found)

    def _given(self, batch: Any) -> dict[int, Any]:
        """The parts of a batch by their loaders, without those that have ended, which give ``None`` in mode
        ``max_size``. A hook of the user's may have put the batch together otherwise: then it is of all loaders."""
        try:
            parts = [batch_part(batch, keys) for keys in self._parts]
        except (LookupError, TypeError):
            return dict.fromkeys(range(len(self._parts)))
        return {index: found for index, found in enumerate(parts) if found is not None}

    def epoch_end(self, monitor: RankTelemetry) -> None:
        """No more is drawn from any in this epoch. Said twice, it counts once."""
        for index in sorted(self._open):
            self._end(monitor, index, self.taken if index == self._at or self._mode != "sequential" else 0)

    def _went_past(self, monitor: RankTelemetry, index: int) -> None:
        """A later loader of the sequence gives batches now: those before it are done with."""
        for earlier in sorted(one for one in self._open if one < index):
            self._end(monitor, earlier, self.taken if earlier == self._at else 0)
        self._at = index

    def _end(self, monitor: RankTelemetry, index: int, taken: int) -> None:
        self._open.discard(index)
        monitor.loader_end(self.stage, index, ended=self._has_ended(index, taken))

    def _has_ended(self, index: int, taken: int) -> bool:
        """Whether a loader gave nothing more, as against a limit that ``taken`` batches have reached.

        One whose length is not known has ended where the loop was given nothing more, or went on to the next; in mode
        ``min_size`` that may have been any of them.
        """
        length, limit = self._lengths.get(index), self.limit(index)
        if limit is not None and taken >= limit:
            return False
        if length is not None and taken >= length:
            return True
        if self._mode == "min_size" and len(self.loaders) > 1:
            return False
        went_on = self._mode == "sequential" and index < self._at
        return went_on or value_or_default(lambda: bool(self._loop._data_fetcher.done), False)

    def _parting(self) -> tuple[Keys, ...]:
        """Where each loader's part of a batch is; nothing where a batch is of one loader."""
        if len(self.loaders) < 2 or self._mode == "sequential":
            return ()
        found = tuple(leaf_paths(value_or_default(lambda: self.combined.iterables, None)))
        return found if len(found) == len(self.loaders) else ()


def combined_loader(loop: Any) -> Any | None:
    """The CombinedLoader of a loop, once it is set up."""
    return getattr(loop, "_combined_loader", None)


def _limits(loop: Any) -> list[float]:
    """Of each loader. Those of evaluation are asked of the loop: on the loader stand those of the last sanity check."""
    told = loop.max_batches
    return list(told if isinstance(told, list) else loop._combined_loader.limits or ())


def batch_part(batch: Any, keys: Keys) -> Any:
    """The part of a batch that ``keys`` lead to."""
    for key in keys:
        batch = batch[key]
    return batch


def leaf_paths(tree: Any, here: Keys = ()) -> Iterable[Keys]:
    """Where the leaves of nested lists, tuples and mappings are, in the order of ``torch.utils._pytree``."""
    if type(tree) in (dict, OrderedDict, defaultdict):
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    else:
        yield here
        return
    for key, child in children:
        yield from leaf_paths(child, (*here, key))

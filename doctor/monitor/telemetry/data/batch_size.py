"""Batch sizes, read from the first tensor of a batch, whose path is found once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOST_NODES = 64
MOST_LOOKS = 3
"""Number of batches without a tensor after which a loader's batches count as having no size."""
_TOKEN_TYPES = ("int16", "int32", "int64", "uint16", "uint32", "uint64")
"""Integers of one byte are pixels."""

Size = tuple[int, int]
"""Samples of a batch, and its units: tokens for token ids, else samples."""


class BatchSizeReader:
    """Measures the batches of one loader."""

    __slots__ = ("_looks", "_path", "_tokens")

    def __init__(self) -> None:
        self._looks = 0
        self._path: tuple[Any, ...] | None = None
        self._tokens = False

    def measure(self, batch: Any) -> Size | None:
        """Return the size of a batch, or ``None`` if it has none. (step path)"""
        path = self._path
        if path is not None:
            try:
                leaf = batch
                for key in path:
                    leaf = leaf[key]
                shape = leaf.shape
                samples = shape[0]
                return samples, samples * shape[1] if self._tokens else samples
            except (LookupError, TypeError, AttributeError):
                self._path = None
        return self._look(batch) if self._looks < MOST_LOOKS else None

    def _look(self, batch: Any) -> Size | None:
        found = _find(batch)
        if found is None:
            self._looks += 1
            return None
        self._path, leaf = found
        samples, *others = leaf.shape
        self._tokens = len(others) == 1 and str(leaf.dtype).removeprefix("torch.") in _TOKEN_TYPES
        return samples, samples * others[0] if self._tokens else samples


def _find(batch: Any) -> tuple[tuple[Any, ...], Any] | None:
    """Return path and value of the first array of at least one dimension, preferring token ids."""
    stack: list[tuple[tuple[Any, ...], Any]] = [((), batch)]
    for _ in range(MOST_NODES):
        if not stack:
            return None
        path, node = stack.pop()
        if hasattr(node, "dtype") and len(getattr(node, "shape", ())) > 0:
            return path, node
        keys: Iterable[Any] = ()
        if isinstance(node, Mapping):
            keys = sorted(list(node)[:MOST_NODES], key=lambda key: key != "input_ids")
        elif isinstance(node, (list, tuple)):
            keys = range(len(node[:MOST_NODES]))
        stack.extend(((*path, key), node[key]) for key in reversed([*keys]))
    return None

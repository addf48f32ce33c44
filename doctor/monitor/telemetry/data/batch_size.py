"""Batch sizes, read from the first tensor of a batch, whose path is found once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_NODES = 64
MOST_LOOKS = 3
"""Number of batches without a tensor after which a loader's batches count as having no size."""
_TOKENS = "input_ids"


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
                shape = leaf.shape  # as _read does, without its frame
                samples = shape[0]
                return samples, samples * shape[1] if self._tokens else samples
            except (LookupError, TypeError, AttributeError):
                self._path = None
        return self._look(batch) if self._looks < MOST_LOOKS else None

    def _read(self, leaf: Any) -> Size:
        shape = leaf.shape
        samples = shape[0]
        return samples, samples * shape[1] if self._tokens else samples

    def _look(self, batch: Any) -> Size | None:
        found = _find(batch)
        if found is None:
            self._looks += 1
            return None
        self._path, leaf = found
        self._tokens = len(leaf.shape) == 2 and _is_whole(leaf)
        return self._read(leaf)


def _find(batch: Any) -> tuple[tuple[Any, ...], Any] | None:
    """Return path and value of the first array of at least one dimension, preferring token ids."""
    stack: list[tuple[tuple[Any, ...], Any]] = [((), batch)]
    for _ in range(MOST_NODES):
        if not stack:
            return None
        path, node = stack.pop()
        if hasattr(node, "dtype") and len(getattr(node, "shape", ())) > 0:
            return path, node
        stack.extend(((*path, key), child) for key, child in reversed(_items(node)))
    return None


def _items(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        items = [(key, node[key]) for key in list(node)[:MOST_NODES]]
        return sorted(items, key=lambda item: item[0] != _TOKENS)
    return list(enumerate(node[:MOST_NODES])) if isinstance(node, (list, tuple)) else []


def _is_whole(leaf: Any) -> bool:
    """Return whether the values are integers of more than a byte; bytes are pixels."""
    word = str(leaf.dtype).removeprefix("torch.")
    return word in ("int16", "int32", "int64", "uint16", "uint32", "uint64")

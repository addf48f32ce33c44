"""Batches of any structure: tensors in tuples, dictionaries, dataclasses and objects that behave like them."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same tree with every tensor changed; other values are kept."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return _mapping(tree, {key: map_tensors(value, change) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(value, change) for value in tree])
    if _fields(tree):
        changed = copy.copy(tree)
        for name in _fields(tree):
            object.__setattr__(changed, name, map_tensors(getattr(tree, name), change))
        return changed
    return tree


def _mapping(tree: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Keep the type of the mapping, such as BatchEncoding."""
    if type(tree) is dict:
        return changed
    try:
        return type(tree)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def _fields(tree: Any) -> tuple[str, ...]:
    if isinstance(tree, (type, torch.nn.Module)):
        return ()
    if dataclasses.is_dataclass(tree):
        return tuple(field.name for field in dataclasses.fields(tree))
    return tuple(vars(tree)) if callable(getattr(tree, "to", None)) and hasattr(tree, "__dict__") else ()


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Return every tensor of the tree, in order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, keep)
    yield from found


def samples_in(batch: Any) -> int:
    """Return the most common first dimension of its tensors, or 0 if fewer than half share it."""
    firsts = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim())
    if not firsts:
        return 0
    size, count = firsts.most_common(1)[0]
    return int(size) if 2 * count >= firsts.total() else 0


def resized(batch: Any, samples: int | None) -> Any:
    """Return the batch with ``samples`` samples, if any; tensors with another first dimension are kept."""
    if not samples:
        return batch
    before = samples_in(batch)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not before or before == samples or not tensor.dim() or tensor.shape[0] != before:
            return tensor
        return tensor.new_empty((samples, *tensor.shape[1:]))

    return map_tensors(batch, change)

"""Properties of a loader, read without iterating over it or touching any random state."""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Any

from msgspec.structs import replace

from doctor.core.facts import Loader
from doctor.core.random_state import random_state_kept
from doctor.monitor.telemetry.data.dataset_fingerprint import fingerprint
from doctor.monitor.telemetry.data.sampler_inspection import plain_attribute, read_sampler, shard_of, subset_source

_RAISED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError)
"""Exceptions that ``len()`` of a loader without a length may raise."""
_ITERABLE = 1
"""torch.utils.data.dataloader._DatasetKind.Iterable"""
_FIXED_SIZES = frozenset(("BatchSampler", "BatchSamplerShard", "SkipBatchSampler", "_IndexBatchSamplerWrapper"))
_PARTED_BY_THEMSELVES = frozenset(("litdata", "streaming"))
"""Libraries whose datasets shard their stream among all ranks and workers."""


def read_loader(stage: str, index: int, loader: object, limit: int | None, combined: str | None) -> Loader:
    """Describe a torch loader, a derived one, or another iterable of batches (kind ``other``)."""
    start = Loader(stage, index, type(loader).__name__, kind="other", limit=limit, combined=combined)
    base = _base_of(loader)
    if base is None:
        return replace(start, length=_length(loader), batch_size=plain_attribute(loader, "batch_size", int))
    return _read_torch(start, loader, base)


def index_sampler_of(loader: object) -> object:
    """Return the source of a torch loader's indices: batch sampler, sampler, or ``None``."""
    base = _base_of(loader)
    if base is None:
        return None
    batch_sampler = vars(base).get("batch_sampler")
    return vars(base).get("sampler") if batch_sampler is None else batch_sampler


def _base_of(loader: object) -> Any:
    """Return the torch loader in ``loader``: itself, or the one in accelerate's wrapper.

    The dispatcher, which distributes batches from rank 0, has none: what it draws on a rank is not what that rank
    receives.
    """
    if any(base.__name__ == "DataLoaderDispatcher" for base in type(loader).__mro__):
        return None
    attributes: Any = getattr(loader, "__dict__", {})
    base = attributes.get("base_dataloader", loader)
    inside: Any = getattr(base, "__dict__", {})
    return base if {"dataset", "sampler", "batch_sampler", "num_workers"} <= inside.keys() else None


def _read_torch(start: Loader, loader: object, base: Any) -> Loader:
    dataset, outermost = vars(base)["dataset"], index_sampler_of(base)
    iterable = _is_iterable(base)
    dataset_length = _length(dataset)
    batch_sampler = None if iterable else vars(base).get("batch_sampler")
    inner = getattr(batch_sampler, "__dict__", {}).get("_batch_sampler", batch_sampler)
    return replace(
        start,
        dataset=type(dataset).__name__,
        kind="iterable" if iterable else "map",
        length=_length_of_iterable(base, loader, dataset_length) if iterable else _length(loader),
        dataset_length=dataset_length,
        batch_size=_batch_size(base, batch_sampler),
        batch_sampler=type(batch_sampler).__name__ if batch_sampler is not None else None,
        dynamic=batch_sampler is not None and type(inner).__name__ not in _FIXED_SIZES,
        drop_last=plain_attribute(batch_sampler if batch_sampler is not None else base, "drop_last", bool),
        sampler=None if iterable else read_sampler(outermost, dataset_length),
        sharded=_is_sharded(dataset) if iterable else None,
        workers=plain_attribute(base, "num_workers", int),
        persistent=plain_attribute(base, "persistent_workers", bool),
        fingerprint=fingerprint(dataset, None if iterable else subset_source(outermost)),
        part=_part(dataset),
    )


def _part(dataset: object) -> str | None:
    """Return a digest of the indices of a ``Subset``, such as of ``random_split``; the dataset itself may be opaque."""
    is_part = any(
        one.__name__ == "Subset" and one.__module__ == "torch.utils.data.dataset" for one in type(dataset).__mro__
    )
    indices = getattr(dataset, "__dict__", {}).get("indices") if is_part else None
    return None if indices is None else fingerprint(indices)


def _is_iterable(base: Any) -> bool:
    kind = vars(base).get("_dataset_kind")
    if kind is not None:
        return bool(kind == _ITERABLE)
    return any(one.__name__ == "IterableDataset" for one in type(vars(base)["dataset"]).__mro__)


def _batch_size(base: Any, batch_sampler: Any) -> int | None:
    own: int | None = plain_attribute(base, "batch_size", int)
    if own is not None or batch_sampler is None:
        return own
    size: int | None = plain_attribute(batch_sampler, "batch_size", int)
    share = shard_of(batch_sampler)
    splits = share is not None and plain_attribute(batch_sampler, "split_batches", bool)
    return size // share[0] if splits and size and share else size


def _length_of_iterable(base: Any, loader: Any, dataset_length: int | None) -> int | None:
    """Return the number of batches as torch counts them.

    The loader is not asked, because it would then warn of batches beyond that number.
    """
    torch_loader = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    if getattr(type(loader), "__len__", None) is not getattr(torch_loader, "__len__", None):
        return _length(loader)
    size: int | None = plain_attribute(base, "batch_size", int)
    if dataset_length is None or size is None:
        return dataset_length
    return dataset_length // size if plain_attribute(base, "drop_last", bool) else -(-dataset_length // size)


def _length(thing: object) -> int | None:
    if not isinstance(thing, Sized):
        return None
    with random_state_kept():  # some batch samplers iterate a whole epoch to find their length
        try:
            return len(thing)
        except _RAISED:
            return None


def _is_sharded(dataset: object) -> bool | None:
    """Return whether an iterable dataset says that it is sharded among ranks.

    By its own shard attributes, by the rule of its library (litdata, MosaicML streaming), by a node splitter
    (webdataset), or by a call of ``split_dataset_by_node`` (Hugging Face, which also tells if there was none).
    """
    library = type(dataset).__module__.partition(".")[0]
    attributes: Any = getattr(dataset, "__dict__", {})
    if library == "datasets" and "_distributed" in attributes:
        return attributes["_distributed"] is not None
    share = shard_of(dataset)
    if (share is not None and share[0] > 1) or library in _PARTED_BY_THEMSELVES:
        return True
    stages = attributes.get("pipeline")
    splits = isinstance(stages, list) and any(getattr(one, "__name__", "") == "split_by_node" for one in stages)
    return True if splits else None

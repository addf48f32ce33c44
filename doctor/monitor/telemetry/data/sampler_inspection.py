"""Properties of a sampler, read from its attributes; it is never asked for an index."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from doctor.core.facts import Sampler

MOST_LINKS = 6

_SIZES = ("num_replicas", "num_processes", "world_size", "num_shards", "data_parallel_size", "dp_size")
_PLACES = ("rank", "process_index", "shard_id", "shard_index", "data_parallel_rank", "dp_rank")
_INNER = ("_batch_sampler", "batch_sampler", "sampler", "_sampler")
_RANDOM = frozenset(("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"))
_SYNCHRONISED = frozenset(("BatchSamplerShard",))
"""Samplers whose framework (accelerate) synchronizes the random generator of all ranks before each epoch, and
removes the padding from gathered metrics."""


def read_sampler(outermost: object, dataset_length: int | None = None) -> Sampler:
    """Describe the sampler a loader gets indices or batches from, with the samplers inside it."""
    chain = list(_chain(outermost))
    parting = next((one for one in chain if shard_of(one) is not None), None)
    innermost = chain[-1]
    main = innermost if parting is None else parting
    replicas, rank = shard_of(main) or (None, None)
    synchronised = any(type(one).__name__ in _SYNCHRONISED for one in chain)
    return Sampler(
        type(main).__name__,
        distributed=parting is not None,
        replicas=replicas,
        rank=rank,
        seed=_first_held(chain, ("seed", "initial_seed")),
        epoch=_first_held([main, *chain], ("epoch",)),
        shuffle=_shuffles(main, innermost),
        drop_last=plain_attribute(main, "drop_last", bool),
        pads=None if synchronised else _pads(main),
        generator_seed=None if synchronised else _generator_seed(chain),
        inner=type(innermost).__name__ if innermost is not main else None,
        independent=any(_is_independent(one, dataset_length) for one in chain),
        repeats=any(
            "repe" in str(name) and type(value) is int and value > 1
            for one in chain
            for name, value in dict(getattr(one, "__dict__", {})).items()
        ),
    )


def epoch_of(outermost: object) -> int | None:
    """Return the current epoch of a sampler."""
    return _first_held(list(_chain(outermost)), ("epoch",))


def subset_source(outermost: object) -> object:
    """Return the indices that restrict a sampler to a part of the dataset, else ``None``."""
    indices = (inspect.getattr_static(one, "indices", None) for one in _chain(outermost))
    return next((found for found in indices if type(found) in (list, tuple, range) or _is_array(found)), None)


def plain_attribute(thing: object, name: str, kind: type) -> Any:
    """Return an attribute if it is a plain value of that kind; runs no user code."""
    value = inspect.getattr_static(thing, name, None)
    return value if type(value) is kind else None


def _chain(outermost: object) -> Iterator[Any]:
    """Yield the samplers, from the loader's own to the one that chooses indices."""
    here: Any = outermost
    for _ in range(MOST_LINKS):
        yield here
        inner = next(
            (found for name in _INNER if (found := inspect.getattr_static(here, name, None)) is not None), None
        )
        if inner is None and type(wrapped := inspect.getattr_static(here, "dataset", None)).__name__ == (
            "_DatasetSamplerWrapper"
        ):
            inner = inspect.getattr_static(wrapped, "_sampler", None)
        if inner is None or isinstance(inner, property):
            return
        here = inner


def shard_of(thing: object) -> tuple[int, int] | None:
    """Return number of shards and own shard, by the usual attribute names, or ``None``."""
    size = next((value for name in _SIZES if (value := plain_attribute(thing, name, int)) is not None), None)
    place = next((value for name in _PLACES if (value := plain_attribute(thing, name, int)) is not None), None)
    return None if size is None or place is None else (size, place)


def _first_held(chain: list[Any], names: tuple[str, ...]) -> int | None:
    values = (plain_attribute(one, name, int) for one in chain for name in names)
    return next((value for value in values if value is not None), None)


def _is_random(sampler: object) -> bool:
    return any(base.__name__ in _RANDOM for base in type(sampler).__mro__)


def _shuffles(main: object, innermost: object) -> bool | None:
    if _is_random(innermost):
        return True
    own = plain_attribute(main, "shuffle", bool)
    is_sequential = type(innermost).__name__ == "SequentialSampler"
    return False if is_sequential and (own is None or innermost is main) else own


def _pads(sampler: object) -> bool | None:
    """Return whether the sampler pads, by torch's rule.

    Without ``drop_last``, ``total_size`` is rounded up to whole shares; Lightning's sampler for predictions keeps the
    size of the dataset.
    """
    total, samples, replicas = (
        plain_attribute(sampler, name, int) for name in ("total_size", "num_samples", "num_replicas")
    )
    drops = plain_attribute(sampler, "drop_last", bool)
    if drops is None or total is None or samples is None or replicas is None:
        return None
    return bool(not drops and total == samples * replicas and "Unrepeated" not in type(sampler).__name__)


def _generator_seed(chain: list[Any]) -> int | None:
    generators = (inspect.getattr_static(one, "generator", None) for one in chain)
    found = next((one for one in generators if type(one).__name__ == "Generator"), None)
    return found.initial_seed() if found is not None and hasattr(found, "initial_seed") else None


def _is_independent(sampler: object, dataset_length: int | None) -> bool:
    """Return whether ranks draw with replacement, by weights, or a random part per epoch."""
    if not _is_random(sampler):
        return False
    part = plain_attribute(sampler, "_num_samples", int)
    smaller = part is not None and dataset_length is not None and part < dataset_length
    weighted = any(base.__name__ == "WeightedRandomSampler" for base in type(sampler).__mro__)
    return plain_attribute(sampler, "replacement", bool) is True or weighted or smaller


def _is_array(thing: object) -> bool:
    return type(thing).__name__ in ("Tensor", "ndarray")

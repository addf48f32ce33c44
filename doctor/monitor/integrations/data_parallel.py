"""A process's place among the ranks that train one model on different data, where nothing but the loop itself tells:
by the wrapper of the model, else by the samplers of the loaders. A world of ranks alone says nothing of it: they may be
stages of a pipeline, parts of a layer, or models of their own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from doctor.core.facts import Sampler
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.torch_state import TorchRank


class DataParallelRank(NamedTuple):
    """As in :class:`doctor.core.facts.TrainingFacts`: ``data_parallel_rank``, ``_size`` and ``_root``."""

    rank: int | None = None
    size: int | None = None
    root: int | None = None


def infer_data_parallel_rank(module: Any, samplers: Iterable[Sampler], here: TorchRank) -> DataParallelRank:
    """What is known of the process at ``here``. ``module``: the model as it is wrapped, or ``None``."""
    if here.world_size == 1:
        return DataParallelRank(0, 1)
    return _by_wrapper(module, here.rank) or _by_samplers(samplers, here) or DataParallelRank()


def _by_wrapper(module: Any, rank: int) -> DataParallelRank | None:
    """By the largest group of ranks that wrappers within ``module`` reduce gradients over: experts are shared by fewer
    ranks than the rest of a model."""
    wrappers: list[Any] = value_or_default(lambda: list(module.modules()), [])
    shares = [value_or_default(functools.partial(_rank_in, wrapper, rank), None) for wrapper in wrappers]
    return max((share for share in shares if share), key=lambda share: share.size or 0, default=None)


def _rank_in(wrapper: Any, rank: int) -> DataParallelRank | None:
    """The place of ``rank`` in the group of one wrapper; ``None`` for what wraps nothing."""
    names = {kind.__name__ for kind in type(wrapper).__mro__}
    if "FSDPModule" in names:
        return _of_members(_mesh_of(wrapper), rank)
    if "FullyShardedDataParallel" in names:
        return _of_hybrid(_ranks(wrapper.process_group), _ranks(getattr(wrapper, "_inter_node_pg", None)), rank)
    if "DistributedDataParallel" in names:
        return _of_members(_ranks(wrapper.process_group), rank)
    return _of_members(_ranks(wrapper.data_parallel_group), rank) if "DeepSpeedEngine" in names else None


def _ranks(group: object) -> list[int]:
    """Global ranks of a process group."""
    return [] if group is None else list(sys.modules["torch.distributed"].get_process_group_ranks(group))


def _mesh_of(module: Any) -> list[int]:
    """Global ranks of the mesh that ``fully_shard`` was given, those that hold copies of the shards included; empty for
    a module whose parameters are all wrapped further within."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # newer torch keeps several
    first = next(iter(groups), None) if groups is not None else state._fsdp_param_group
    return [] if first is None else [int(one) for one in first.mesh_info.mesh.mesh.flatten().tolist()]


def _of_members(members: list[int], rank: int) -> DataParallelRank | None:
    return DataParallelRank(members.index(rank), len(members), min(members)) if rank in members else None


def _of_hybrid(shards: list[int], copies: list[int], rank: int) -> DataParallelRank | None:
    """Ranks that hold the shards of one copy, and those that hold this shard of all copies, span a grid."""
    if rank not in shards or rank not in copies:
        return _of_members(shards, rank)
    place = copies.index(rank) * len(shards) + shards.index(rank)
    return DataParallelRank(place, len(copies) * len(shards), min(shards) + min(copies) - rank)


def _by_samplers(samplers: Iterable[Sampler], here: TorchRank) -> DataParallelRank | None:
    """By how many the samplers part the data for: all ranks, of which each is at its own place then, or a part of them,
    of which the sampler knows the place. Which ranks these are it does not tell."""
    for sampler in samplers:
        replicas, place = sampler.replicas, sampler.rank
        if not sampler.distributed or replicas is None or place is None or here.world_size % max(replicas, 1):
            continue
        if replicas == here.world_size:
            return DataParallelRank(here.rank, replicas)
        if replicas > 1 and 0 <= place < replicas:
            return DataParallelRank(place, replicas)
    return None

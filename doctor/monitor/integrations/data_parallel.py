"""Infers the data-parallel rank of a process in a loop without a framework.

By the wrapper of the model, else by the samplers of the loaders. The world size alone does not tell: ranks may be
pipeline stages, tensor-parallel parts or independent models.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from doctor.core.facts import Sampler
from doctor.monitor.integrations.hook_guard import value_or_default
from doctor.monitor.integrations.torch_state import TorchRank, is_megatron_ddp


class DataParallelRank(NamedTuple):
    """The data-parallel fields of :class:`doctor.core.facts.TrainingFacts`."""

    rank: int | None = None
    size: int | None = None
    root: int | None = None


def infer_data_parallel_rank(module: Any, samplers: Iterable[Sampler], process: TorchRank) -> DataParallelRank:
    """Return what is known of ``process``. ``module``: the model as it is wrapped, or ``None``."""
    if process.world_size == 1:
        return DataParallelRank(0, 1)
    return _by_wrapper(module, process.rank) or _by_samplers(samplers, process) or DataParallelRank()


def _by_wrapper(module: Any, rank: int) -> DataParallelRank | None:
    """Infer it from the largest group that wrappers within ``module`` reduce gradients over.

    The largest, because experts are shared by fewer ranks than the rest of a model.
    """
    wrappers: list[Any] = value_or_default(lambda: list(module.modules()), [])
    placements = [value_or_default(functools.partial(_rank_in, wrapper, rank), None) for wrapper in wrappers]
    return max(
        (placement for placement in placements if placement), key=lambda placement: placement.size or 0, default=None
    )


def _rank_in(wrapper: Any, rank: int) -> DataParallelRank | None:
    """Return the place of ``rank`` in the group of one wrapper; ``None`` if it is not a wrapper."""
    names = {kind.__name__ for kind in type(wrapper).__mro__}
    if "FSDPModule" in names:
        state = wrapper._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # newer torch keeps several
        first = next(iter(groups), None) if groups is not None else state._fsdp_param_group
        if first is None:  # all parameters are wrapped further inside
            return None
        # The mesh of fully_shard, including replicas of the shards.
        return _of_members([int(one) for one in first.mesh_info.mesh.mesh.flatten().tolist()], rank)
    if "FullyShardedDataParallel" in names:
        return _of_hybrid(_ranks(wrapper.process_group), _ranks(getattr(wrapper, "_inter_node_pg", None)), rank)
    if is_megatron_ddp(wrapper):
        from doctor.monitor.integrations.megatron_ddp import data_parallel_group

        return _of_members(_ranks(data_parallel_group(wrapper)), rank)
    if "DistributedDataParallel" in names:
        return _of_members(_ranks(wrapper.process_group), rank)
    return _of_members(_ranks(wrapper.data_parallel_group), rank) if "DeepSpeedEngine" in names else None


def _ranks(group: object) -> list[int]:
    return [] if group is None else list(sys.modules["torch.distributed"].get_process_group_ranks(group))


def _of_members(members: list[int], rank: int) -> DataParallelRank | None:
    return DataParallelRank(members.index(rank), len(members), min(members)) if rank in members else None


def _of_hybrid(shards: list[int], copies: list[int], rank: int) -> DataParallelRank | None:
    """Return the place in the grid of ``shards`` of one copy and the ``copies`` of this shard."""
    if rank not in shards or rank not in copies:
        return _of_members(shards, rank)
    place = copies.index(rank) * len(shards) + shards.index(rank)
    return DataParallelRank(place, len(copies) * len(shards), min(shards) + min(copies) - rank)


def _by_samplers(samplers: Iterable[Sampler], process: TorchRank) -> DataParallelRank | None:
    """Infer it from the number of replicas that the samplers assume.

    If that is the world size, each rank is at its own place; if it is a divisor, the sampler knows the place, but not
    which ranks form the group.
    """
    for sampler in samplers:
        replicas, place = sampler.replicas, sampler.rank
        if not sampler.distributed or replicas is None or place is None or process.world_size % max(replicas, 1):
            continue
        if replicas == process.world_size:
            return DataParallelRank(process.rank, replicas)
        if replicas > 1 and 0 <= place < replicas:
            return DataParallelRank(place, replicas)
    return None

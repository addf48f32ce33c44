"""What torch tells of a process that trains, whichever framework drives it. Each question may stay unanswered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from doctor.collectors.launch.rank_variables import claim_from
from doctor.knowledge.launchers import ENVIRONMENT
from doctor.monitor.integrations.hook_guard import value_or_default

SHARDING = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
"""Wrappers whose ranks may each hold a part of the parameters."""


class TorchRank(NamedTuple):
    """Who this process is among the ranks of its job."""

    rank: int = 0
    world_size: int = 1


def torch_rank(environ: Mapping[str, str]) -> TorchRank:
    """By the default process group; without one by RANK and WORLD_SIZE, which torchrun sets; else alone."""
    group = distributed()
    if group is not None:
        return TorchRank(group.get_rank(), group.get_world_size())
    told = claim_from(ENVIRONMENT, environ)
    if told is None or told.rank is None or not told.world_size or not 0 <= told.rank < told.world_size:
        return TorchRank()
    return TorchRank(told.rank, told.world_size)


def distributed() -> Any | None:
    """``torch.distributed`` where a default process group is there; never loads it."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def backend() -> str | None:
    """The back end of the default process group."""
    group = distributed()
    return value_or_default(lambda: str(group.get_backend()), None) if group is not None else None


def device_id(device: object) -> str | None:
    """The UUID of a CUDA device as the driver writes it, where CUDA is in use already (torch >= 2.5)."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", None) != "cuda":
        return None
    return value_or_default(lambda: _uuid(torch, device), None)


def _uuid(torch: Any, device: object) -> str | None:
    if not torch.cuda.is_initialized():
        return None
    text = str(torch.cuda.get_device_properties(device).uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def device_of(module: Any) -> Any | None:
    """Where a module's first parameter is."""
    return value_or_default(lambda: next(module.parameters()).device, None)


def unwrapped(module: Any) -> Any:
    """The module within DistributedDataParallel, whose parameters it shares; any other one is itself."""
    return module.module if type(module).__name__ == "DistributedDataParallel" else module


def joins_uneven_inputs(module: object) -> bool:
    """Whether uneven inputs are joined now (torch.distributed.algorithms.Join around a wrapper that takes part)."""
    return bool(getattr(getattr(module, "_join_config", None), "enable", False))


def replication(module: object) -> tuple[bool | None, bool | None]:
    """Whether all ranks hold the same values, and whether the wrapper makes them equal; ``None`` where its class does
    not tell."""
    names = {kind.__name__ for kind in type(module).__mro__}
    if names & set(SHARDING):
        return False, False
    return (True, True) if "DistributedDataParallel" in names else (None, None)

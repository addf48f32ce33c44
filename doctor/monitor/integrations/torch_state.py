"""Facts read from torch about a training process, for any framework; any may be missing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from doctor.collectors.launch.rank_variables import claim_from
from doctor.core.facts import Variable
from doctor.knowledge.launchers import ENVIRONMENT
from doctor.monitor.integrations.deepspeed_engine import holds_equal_parameters, is_engine
from doctor.monitor.integrations.hook_guard import value_or_default

SHARDING = ("FullyShardedDataParallel", "FSDPModule")
"""Wrappers whose ranks may each hold a shard of the parameters."""


MEGATRON = "megatron.core.distributed."
"""Package of Megatron-LM's wrapper, whose class has the name of torch's."""


class TorchRank(msgspec.Struct, frozen=True):
    """Rank and world size of this process."""

    rank: int = 0
    world_size: int = 1


def torch_rank(environ: Mapping[str, str]) -> TorchRank:
    """Read it from the default process group, else RANK and WORLD_SIZE; else a world of one."""
    group = distributed()
    if group is not None:
        return TorchRank(group.get_rank(), group.get_world_size())
    claim = claim_from(ENVIRONMENT, environ)
    if claim is None or claim.rank is None or not claim.world_size or not 0 <= claim.rank < claim.world_size:
        return TorchRank()
    return TorchRank(claim.rank, claim.world_size)


def distributed() -> Any | None:
    """Return ``torch.distributed`` if a default process group exists; never imports it."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def backend() -> str | None:
    """Return the backend of the default process group."""
    group = distributed()
    return value_or_default(lambda: str(group.get_backend()), None) if group is not None else None


def device_id(device: object) -> str | None:
    """Return the UUID of a CUDA device in the driver's form, if CUDA is in use (torch >= 2.5)."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", None) != "cuda" or not torch.cuda.is_initialized():
        return None
    text = value_or_default(lambda: str(torch.cuda.get_device_properties(device).uuid), None)
    return text if text is None or text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def device_of(module: Any) -> Any | None:
    """Return the device of a module's first parameter."""
    return value_or_default(lambda: next(module.parameters()).device, None)


def unwrapped(module: Any) -> Any:
    """Return the module inside DistributedDataParallel or DeepSpeed's engine, else the module itself."""
    return module.module if type(module).__name__ == "DistributedDataParallel" or is_engine(module) else module


def is_megatron_ddp(module: object) -> bool:
    """Return whether ``module`` is Megatron-LM's wrapper."""
    return any(
        kind.__name__ == "DistributedDataParallel" and kind.__module__.startswith(MEGATRON)
        for kind in type(module).__mro__
    )


def ddp_arguments(module: object) -> tuple[Variable, ...]:
    """Return the arguments of a DistributedDataParallel that decide which collectives it calls; else none.

    Buffers are broadcast only if there are any. Not its communication hook, which the program may register later. Nor
    those of Megatron-LM's wrapper, whose ``buffers`` are those of gradients.
    """
    if type(module).__name__ != "DistributedDataParallel" or is_megatron_ddp(module):
        return ()
    wrapper: Any = module
    names = ("find_unused_parameters", "static_graph")
    found = [Variable(name, str(getattr(wrapper, name, False) is True)) for name in names]
    if next(wrapper.buffers(), None) is not None:
        found.append(Variable("broadcast_buffers", str(getattr(wrapper, "broadcast_buffers", True))))
    size = getattr(wrapper, "bucket_bytes_cap", None)
    if isinstance(size, int):
        found.append(Variable("bucket_cap_mb", f"{size / 2**20:g}"))
    return tuple(found)


def joins_uneven_inputs(module: object) -> bool:
    """Return whether uneven inputs are joined now by torch.distributed.algorithms.Join."""
    return bool(getattr(getattr(module, "_join_config", None), "enable", False))


def replication(module: object) -> tuple[bool | None, bool | None]:
    """Return whether all ranks hold the same values, and whether the wrapper broadcasts them.

    ``None`` if the class of the wrapper does not tell.
    """
    names = {kind.__name__ for kind in type(module).__mro__}
    if names & set(SHARDING):
        return False, False
    if is_engine(module):
        whole = holds_equal_parameters(module)
        return whole, whole
    if is_megatron_ddp(module):
        from doctor.monitor.integrations.megatron_ddp import holds_same_parameters

        return holds_same_parameters(module), False
    return (True, True) if "DistributedDataParallel" in names else (None, None)

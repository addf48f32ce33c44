"""Names, shapes and types of parameters, and which of them a replica holds completely."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from doctor.core.facts import ModelFacts, TensorShape

if TYPE_CHECKING:
    import torch

MOST_TENSORS = 4096
SHARDED_KINDS = frozenset({"DTensor", "FlatParameter", "ShardedTensor"})
"""Classes of tensors that are shards: FSDP2 and tensor parallelism, FSDP1, torch.distributed._shard."""
PARTED = "ds_id"
"""Attribute of a DeepSpeed ZeRO-3 parameter, which is mostly elsewhere."""

Named = tuple[str, "torch.nn.Parameter"]


def describe_model(module: torch.nn.Module, replicated: bool | None, broadcast: bool | None) -> ModelFacts:
    """Describe the model.

    If a parameter is visibly a shard, ``replicated`` is ``False`` whatever was passed, and shapes, which differ between
    healthy ranks (FSDP1 with its original parameters), and what is frozen are not in the digest.
    """
    named = list(module.named_parameters())
    shapes = [_shape_of(name, parameter) for name, parameter in named]
    sizes = [0 if _is_lazy(parameter) else int(parameter.numel()) for _, parameter in named]
    sharded = _is_sharded(module, named)
    digest = hashlib.blake2b(digest_size=8)
    for one in shapes:
        row = (one.name, one.type) if sharded else (one.name, one.shape, one.type, *(["frozen"] if one.frozen else []))
        digest.update(f"{row}\n".encode("utf-8", "surrogatepass"))
    return ModelFacts(
        name=type(module).__name__,
        parameters=sum(sizes),
        trainable=sum(size for size, (_, parameter) in zip(sizes, named, strict=True) if parameter.requires_grad),
        count=len(named),
        digest=digest.hexdigest(),
        tensors=tuple(shapes[:MOST_TENSORS]),
        replicated=False if sharded else replicated,
        broadcast=broadcast,
    )


def _shape_of(name: str, parameter: Any) -> TensorShape:
    if _is_lazy(parameter):
        return TensorShape(name, (), "uninitialized")
    dtype = str(parameter.dtype).removeprefix("torch.")
    return TensorShape(name, tuple(parameter.shape), dtype, not parameter.requires_grad)


def _is_sharded(module: torch.nn.Module, named: list[Named]) -> bool:
    if any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules()):  # set by FSDP1
        return True
    return any(
        hasattr(parameter, PARTED) or not SHARDED_KINDS.isdisjoint(kind.__name__ for kind in type(parameter).__mro__)
        for _, parameter in named
    )


def whole_parameters(module: torch.nn.Module) -> list[Named]:
    """Return the parameters that can be compared with other ranks bit by bit, in order.

    Ordinary dense tensors, all on the device of the first, without those that DistributedDataParallel ignores.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    found = [one for one in module.named_parameters() if one[0] not in ignored and _is_plain(one[1])]
    return [one for one in found if one[1].device == found[0][1].device]


def _is_plain(parameter: torch.Tensor) -> bool:
    import torch

    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.layout == torch.strided
        and not (parameter.is_quantized or parameter.is_conj() or parameter.is_neg())
        and parameter.device.type in ("cpu", "cuda")
        and parameter.numel() > 0
    )


def _is_lazy(parameter: Any) -> bool:
    """Return whether a parameter has no shape yet (torch.nn.UninitializedParameter)."""
    return any(kind.__name__ == "UninitializedTensorMixin" for kind in type(parameter).__mro__)

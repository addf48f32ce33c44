"""Lower bound of the device memory of a training, from sizes before its first step.

Nothing is run, allocated or waited for. Optimizer states: the ``_init_group`` of each class of torch.optim (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Group = Mapping[str, Any]

_STATES: dict[str, Callable[[Group], int]] = {
    "Adadelta": lambda group: 2,
    "Adagrad": lambda group: 1,
    "Adam": lambda group: 2 + bool(group.get("amsgrad")),
    "AdamW": lambda group: 2 + bool(group.get("amsgrad")),
    "Adamax": lambda group: 2,
    "Muon": lambda group: 1,
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "RMSprop": lambda group: 1 + bool(group.get("centered")) + bool(group.get("momentum")),
    "SGD": lambda group: int(bool(group.get("momentum"))),
}
"""Tensors of the parameter's shape that an optimizer keeps per parameter, by class; nothing is certain for other
classes."""


def memory_lower_bound(module: Any, optimizers: Iterable[Any], *, buckets: bool = False) -> int | None:
    """Return the bytes on the device of ``module``'s first parameter.

    Parameters, buffers, gradients and optimizer states. ``module``: as it is trained, its tensors on their device.
    ``buckets``: DistributedDataParallel copies gradients into buckets of its own. Of several optimizers, which may step
    alternately, only the one with the largest gradients counts. ``None`` for a module without parameters.
    """
    tensors = [_local(tensor) for tensor in (*module.parameters(), *module.buffers())]
    if not tensors or next(module.parameters(), None) is None:
        return None
    device = tensors[0].device
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device == device]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    groups = [
        [(_bytes(group, device), _states(optimizer, group)) for group in optimizer.param_groups]
        for optimizer in map(_inner, optimizers)
    ]
    gradients = max((sum(size for size, _ in own) for own in groups), default=0)
    kept = sum(size * states for own in groups for size, states in own)
    return int(sum(held.values()) + gradients * (2 if buckets else 1) + kept)


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper, which has its groups but another class."""
    return getattr(optimizer, "optimizer", optimizer)


def _states(optimizer: Any, group: Group) -> int:
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim")
    return _STATES[kind.__name__](group) if is_torch and kind.__name__ in _STATES else 0


def _bytes(group: Group, device: Any) -> int:
    """Return the bytes of a group's parameters that get a gradient on the device."""
    locals_ = (_local(one) for one in group["params"] if one.requires_grad)
    return sum(one.numel() * one.element_size() for one in locals_ if one.device == device)


def _local(tensor: Any) -> Any:
    """Return this rank's part of a distributed tensor (torch.distributed.tensor.DTensor)."""
    return getattr(tensor, "_local_tensor", tensor)

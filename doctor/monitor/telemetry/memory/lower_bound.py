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
    gradients, states = [0], 0
    for optimizer in (getattr(one, "optimizer", one) for one in optimizers):  # the one in Accelerate's wrapper
        kind = type(optimizer)
        state_count = _STATES.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
        sizes = [_gradient_bytes(group, device) for group in optimizer.param_groups]
        gradients.append(sum(sizes))
        if state_count is not None:
            states += sum(size * state_count(group) for size, group in zip(sizes, optimizer.param_groups, strict=True))
    return int(sum(held.values()) + max(gradients) * (2 if buckets else 1) + states)


def _gradient_bytes(group: Group, device: Any) -> int:
    parameters = (_local(one) for one in group["params"] if one.requires_grad)
    return sum(one.numel() * one.element_size() for one in parameters if one.device == device)


def _local(tensor: Any) -> Any:
    """Return this rank's part of a distributed tensor (torch.distributed.tensor.DTensor)."""
    return getattr(tensor, "_local_tensor", tensor)

"""How a module is called with a batch, and what is taken as its loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.nn import Module

from doctor.estimate.tracing.pytree import tensors_in


def loss_of(module: Module, batch: Any, number: int) -> torch.Tensor | None:
    """The loss of micro-batch ``number``; ``None`` where the module trains itself (manual optimization) or skips it."""
    if is_lightning(module):
        return _scalar(_training_step(module, batch, number))
    result, rest = _called(module, batch)
    found = _scalar(result)
    return found if found is not None else _made_up(result, rest)


def is_lightning(module: Module) -> bool:
    """Whether it has a training step of its own."""
    return callable(getattr(module, "training_step", None)) and hasattr(module, "configure_optimizers")


def _training_step(module: Any, batch: Any, number: int) -> Any:
    names = inspect.signature(module.training_step).parameters
    return module.training_step(batch, number) if len(names) > 1 else module.training_step(batch)


def _called(module: Module, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """The result, and what of the batch the module did not take: targets."""
    if isinstance(batch, Mapping):
        if _fits(module, (), dict(batch)):
            return module(**batch), ()
        taken = {name: value for name, value in batch.items() if name in inspect.signature(module.forward).parameters}
        if taken and _fits(module, (), taken):
            return module(**taken), tuple(value for name, value in batch.items() if name not in taken)
        return module(batch), ()
    if isinstance(batch, (tuple, list)):
        if _fits(module, tuple(batch), {}):
            return module(*batch), ()
        if len(batch) > 1 and not _fits_as_one(module):
            return module(batch[0]), tuple(batch[1:])
    return module(batch), ()


def _fits(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a signature that can't be read
        return True
    return True


def _fits_as_one(module: Module) -> bool:
    """Whether the one parameter of ``forward`` is called a batch."""
    names = list(inspect.signature(module.forward).parameters)
    return len(names) == 1 and "batch" in names[0]


def _scalar(result: Any) -> torch.Tensor | None:
    """A loss: a single number that gradients flow through, by itself, first, or named."""
    if isinstance(result, torch.Tensor):
        return result if result.numel() == 1 and result.requires_grad else None
    if isinstance(result, Mapping):
        return _scalar(result.get("loss"))
    if hasattr(result, "loss"):
        return _scalar(result.loss)
    if isinstance(result, (tuple, list)) and result:
        return next((loss for loss in map(_scalar, result) if loss is not None), None)
    return None


def _made_up(result: Any, rest: tuple[Any, ...]) -> torch.Tensor | None:
    """Cross entropy or squared error where a target fits, else the sum of all."""
    outputs = [each for each in tensors_in(result) if each.requires_grad and each.is_floating_point()]
    targets = [each for each in tensors_in(rest) if outputs and each.shape[:1] == outputs[0].shape[:1]]
    if outputs and targets:
        out, target = outputs[0], targets[0]
        if not target.is_floating_point() and target.dim() == out.dim() - 1:
            classes_last = target.shape == out.shape[:-1]
            return (
                F.cross_entropy(out.flatten(0, -2), target.flatten()) if classes_last else F.cross_entropy(out, target)
            )
        if target.shape == out.shape and target.is_floating_point():
            return F.mse_loss(out, target)
    return sum((each.float().sum() for each in outputs[1:]), outputs[0].float().sum()) if outputs else None

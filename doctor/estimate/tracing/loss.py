"""Calls a module with a batch, and finds or makes up its loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.nn import Module

from doctor.estimate.tracing.pytree import tensors_in


class StepResult(NamedTuple):
    """The loss, and all that the module returned, which lives as long as the loop refers to it."""

    loss: torch.Tensor | None
    outputs: Any


def loss_of(module: Module, batch: Any, number: int) -> torch.Tensor | None:
    """Return the loss of micro-batch ``number``, or ``None`` with manual optimization or for a skipped batch."""
    return result_of(module, batch, number).loss


def result_of(module: Module, batch: Any, number: int) -> StepResult:
    """Return the result of micro-batch ``number``."""
    if is_lightning(module):
        training_step: Any = module.training_step
        takes_number = len(inspect.signature(training_step).parameters) > 1
        result = training_step(batch, number) if takes_number else training_step(batch)
        return StepResult(_scalar(result), result)
    result, rest = _called(module, batch)
    found = _scalar(result)
    return StepResult(found if found is not None else _made_up(result, rest), result)


def hint_for(module: Module, batch: Any) -> str:
    """Return what to do if a step failed because optional inputs of the module took targets; else nothing."""
    if is_lightning(module) or not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return ""
    if not _fits(module, tuple(batch), {}):
        return ""
    names = list(_signature(module).parameters.values())[: len(batch)]
    taken = [each.name for each in names[1:] if each.default is not each.empty]
    if len(taken) != len(batch) - 1:
        return ""
    rest = ", ".join(f"'targets{place or ''}': …" for place in range(len(taken)))
    return (
        f"; the batch went to {', '.join(each.name for each in names)}: if the module does not take targets, return a "
        f"dictionary, {{'{names[0].name}': …, {rest}}}"
    )


def is_lightning(module: Module) -> bool:
    """Whether the module has a ``training_step``, as a LightningModule has."""
    return callable(getattr(module, "training_step", None)) and hasattr(module, "configure_optimizers")


def _called(module: Module, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the result, and the parts of the batch that the module did not take: targets."""
    if isinstance(batch, Mapping):
        if _fits(module, (), dict(batch)):
            return module(**batch), ()
        taken = {name: value for name, value in batch.items() if name in _signature(module).parameters}
        if taken and _fits(module, (), taken):
            return module(**taken), tuple(value for name, value in batch.items() if name not in taken)
        return module(batch), ()
    if isinstance(batch, (tuple, list)):
        if _fits(module, tuple(batch), {}):
            return module(*batch), ()
        names = list(_signature(module).parameters)
        takes_batch = len(names) == 1 and "batch" in names[0]
        if len(batch) > 1 and not takes_batch:
            return module(batch[0]), tuple(batch[1:])
    return module(batch), ()


def _signature(module: Module) -> inspect.Signature:
    """Return the parameters of the forward pass: of a compiled module, those of the module that was compiled."""
    return inspect.signature(getattr(module, "_orig_mod", module).forward)


def _fits(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        _signature(module).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a signature that is not available
        return True
    return True


def _scalar(result: Any) -> torch.Tensor | None:
    """Return the loss in a result: a scalar that requires a gradient, by itself, in a sequence, or named."""
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

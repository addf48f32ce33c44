"""Replaces a module's parameters and buffers for one plan, on its device and in its precision, and restores them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter

from doctor.core.errors import UnusableError
from doctor.estimate.tracing.fake_mode import FakeDeviceMode, refresh, with_attributes
from doctor.estimate.tracing.pytree import map_tensors


@contextmanager
def materialized(module: Module, fakes: FakeDeviceMode, dtype: torch.dtype | None) -> Iterator[None]:
    """Materialize the module. ``dtype``: of floating-point parameters and buffers, ``None`` to keep theirs. Shared
    parameters stay shared.

    Raises:
        UnusableError: a lazy module has no sizes yet.
    """
    modules = tuple(module.modules())
    before = [(each, dict(each._parameters), dict(each._buffers)) for each in modules]
    others = [(each, _other_tensors(each)) for each in modules]
    made: dict[int, Any] = {}
    try:
        for each, parameters, buffers in before:
            for place, tensors in ((each._parameters, parameters), (each._buffers, buffers)):
                place.update({name: _once(tensor, made, fakes, dtype) for name, tensor in tensors.items()})
            refresh(each)
        for each, values in others:
            for name, value in values.items():
                is_device = isinstance(value, torch.device)
                vars(each)[name] = fakes.device if is_device else map_tensors(value, fakes.on_device)
        yield
    finally:
        for each, parameters, buffers in before:
            each._parameters.update(parameters)
            each._buffers.update(buffers)
            refresh(each)
        for each, values in others:
            vars(each).update(values)


def _once(tensor: torch.Tensor | None, made: dict[int, Any], fakes: FakeDeviceMode, dtype: torch.dtype | None) -> Any:
    if tensor is None or id(tensor) in made:
        return made.get(id(tensor))
    if isinstance(tensor, UninitializedParameter):
        raise UnusableError("the model has lazy layers without sizes: run it once in the factory before returning it")
    new = made[id(tensor)] = fakes.on_device(tensor, dtype)
    if isinstance(tensor, Parameter):
        new = made[id(tensor)] = with_attributes(Parameter(new, tensor.requires_grad), tensor)
        new.original_dtype = tensor.dtype  # type: ignore[attr-defined]
    return new


def _other_tensors(module: Module) -> dict[str, Any]:
    """Return other attributes with tensors or devices: the device of a LightningModule, states of torchmetrics."""
    names = ("_device", "_defaults", *getattr(module, "_defaults", {}))
    return {name: vars(module)[name] for name in names if name in vars(module)}

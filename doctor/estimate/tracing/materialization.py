"""Gives a module parameters and buffers of its own for one plan, on the device and in the precision asked, and takes
them away again: the module is as the factory made it for the next plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter

from doctor.core.errors import UnusableError
from doctor.estimate.tracing.fake_mode import FakeDeviceMode, refresh
from doctor.estimate.tracing.pytree import map_tensors


@contextmanager
def materialized(module: Module, fakes: FakeDeviceMode, dtype: torch.dtype | None) -> Iterator[None]:
    """``dtype``: of floating parameters and buffers, ``None`` as they are. Parameters that modules share stay shared.

    Raises:
        UnusableError: a lazy module has no sizes yet.
    """
    modules = tuple(module.modules())
    before = [(each, dict(each._parameters), dict(each._buffers)) for each in modules]
    beside = [(each, _beside(each)) for each in modules]
    made: dict[int, Any] = {}
    try:
        for each, parameters, buffers in before:
            for place, tensors in ((each._parameters, parameters), (each._buffers, buffers)):
                place.update({name: _once(tensor, made, fakes, dtype) for name, tensor in tensors.items()})
            refresh(each)
        for each, values in beside:
            vars(each).update({name: _moved(value, fakes) for name, value in values.items()})
        yield
    finally:
        for each, parameters, buffers in before:
            each._parameters.update(parameters)
            each._buffers.update(buffers)
            refresh(each)
        for each, values in beside:
            vars(each).update(values)


def _once(tensor: torch.Tensor | None, made: dict[int, Any], fakes: FakeDeviceMode, dtype: torch.dtype | None) -> Any:
    if tensor is not None and id(tensor) not in made:
        made[id(tensor)] = _twin(tensor, fakes, dtype)
    return made.get(id(tensor))


def _beside(module: Module) -> dict[str, Any]:
    """What is neither parameter nor buffer: the device that a LightningModule tells, and what metrics of torchmetrics
    keep."""
    names = ("_device", "_defaults", *getattr(module, "_defaults", {}))
    return {name: vars(module)[name] for name in names if name in vars(module)}


def _moved(value: Any, fakes: FakeDeviceMode) -> Any:
    return fakes.device if isinstance(value, torch.device) else map_tensors(value, fakes.on_device)


def _twin(tensor: torch.Tensor, fakes: FakeDeviceMode, dtype: torch.dtype | None) -> torch.Tensor:
    if isinstance(tensor, UninitializedParameter):
        raise UnusableError("the model has lazy layers without sizes: let the factory run it once before it returns it")
    new = fakes.on_device(tensor, dtype)
    if not isinstance(tensor, Parameter):
        return new
    twin = Parameter(new, tensor.requires_grad)
    for name, value in vars(tensor).items():
        if not name.startswith("_") and name not in vars(twin):
            setattr(twin, name, value)
    return twin

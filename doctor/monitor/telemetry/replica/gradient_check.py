"""Looks whether this rank's own gradients are NaN, before they are averaged over the ranks.

A loss may be finite whose derivative is not. After the reduction all ranks have the NaN, and their next loss shows it
on all at once. What is NaN spreads from the loss through the backward pass to the first layers, so one small parameter
of these shows it: a hook on it gets its gradient before it is reduced. Of a model that ``fully_shard`` wraps, that is
one of the gathered parameters, which exist from the first forward pass on. On a CPU only, where it takes some
microseconds; reading the value on a GPU would wait for the device.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from doctor.core.facts import NonFinite

if TYPE_CHECKING:
    import torch

LARGEST = 4096
"""Elements of the parameter: the first one that has no more."""
ATTEMPTS = 4
"""Batches in which the gathered parameters are looked for."""


class GradientCheck:
    """The check of one model. ``batch``: returns the number of the batch that the training thread is in.

    ``first``: the first gradient that is NaN, if all since are. A gradient scaler that searches for its scale skips
    the step of a batch whose gradients are not finite, and the next ones are finite again.
    """

    def __init__(self) -> None:
        self.first: NonFinite | None = None
        self.batch: Callable[[], int] = lambda: 0
        self._handle: Any = None
        self._name = ""
        self._sharded: Callable[[], torch.nn.Module | None] = lambda: None
        self._attempts = 0

    def attach_sharded(self, model: torch.nn.Module) -> None:
        """Watch a parameter of a sharded model once it has been gathered."""
        self._sharded, self._attempts = weakref.ref(model), ATTEMPTS

    def batch_end(self) -> None:
        """Look for the gathered parameters, in the first batches. (step path)"""
        if not self._attempts:
            return
        self._attempts -= 1
        model = self._sharded()
        with contextlib.suppress(Exception):  # attributes of torch that no documentation names
            if model is not None and self._watch(_gathered(model)):
                self._attempts = 0

    def attach(self, model: torch.nn.Module) -> None:
        """Watch a parameter of a model; without a suitable one, nothing."""
        self.detach()
        self._watch(model.named_parameters())

    def _watch(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> bool:
        """Watch the first suitable parameter; return whether there is one."""
        name, chosen = next(filter(_is_suitable, named), ("", None))
        if chosen is None:
            return False
        own = weakref.ref(self)

        def look(gradient: torch.Tensor) -> None:
            check = own()
            if check is not None:
                with contextlib.suppress(Exception):  # an exception would end the backward pass
                    check._look(gradient)

        parameter: Any = chosen  # whose method has no types
        self._name, self._handle = name, parameter.register_hook(look)
        return True

    def detach(self) -> None:
        """End the check."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def before(self, loss: NonFinite | None) -> NonFinite | None:
        """Return the first gradient that is NaN, once a later loss is not finite: before, it may be passing."""
        first = self.first
        return first if first is not None and loss is not None and loss.step > first.step else None

    def _look(self, gradient: torch.Tensor) -> None:
        if not math.isnan(gradient.sum().item()):
            self.first = None
        elif self.first is None:
            self.first = NonFinite(self.batch(), "gradient", self._name, "nan")


def _gathered(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the gathered parameters of a model that ``fully_shard`` wraps, as far as they exist."""
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        sharded: Any = module
        state = sharded._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # newer torch keeps several
        for group in groups if groups is not None else [state._fsdp_param_group]:
            for one in group.fsdp_params if group is not None else ():
                parameter = getattr(one, "_unsharded_param", None)
                if parameter is not None:
                    yield one._param_fqn or "", parameter


def _is_suitable(named: tuple[str, torch.nn.Parameter]) -> bool:
    _, one = named
    is_plain = type(one).__name__ == "Parameter" and one.device.type == "cpu" and one.is_floating_point()
    return is_plain and one.requires_grad and one.numel() <= LARGEST

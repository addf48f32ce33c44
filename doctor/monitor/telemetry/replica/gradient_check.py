"""Looks whether this rank's own gradients are NaN, before they are averaged over the ranks.

A loss may be finite whose derivative is not. After the reduction all ranks have the NaN, and their next loss shows it
on all at once. What is NaN spreads from the loss through the backward pass to the first layers, so one small parameter
of these shows it: a hook on it gets its gradient before it is reduced. On a CPU only, where it takes some microseconds;
reading the value on a GPU would wait for the device.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from doctor.core.facts import NonFinite

if TYPE_CHECKING:
    import torch

LARGEST = 4096
"""Elements of the parameter: the first one that has no more."""


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

    def attach(self, model: torch.nn.Module) -> None:
        """Watch a parameter of a model; without a suitable one, nothing."""
        self.detach()
        name, chosen = next(filter(_is_suitable, model.named_parameters()), ("", None))
        if chosen is None:
            return
        own = weakref.ref(self)

        def look(gradient: torch.Tensor) -> None:
            check = own()
            if check is not None:
                with contextlib.suppress(Exception):  # an exception would end the backward pass
                    check._look(gradient)

        parameter: Any = chosen  # whose method has no types
        self._name, self._handle = name, parameter.register_hook(look)

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


def _is_suitable(named: tuple[str, torch.nn.Parameter]) -> bool:
    _, one = named
    is_plain = type(one).__name__ == "Parameter" and one.device.type == "cpu" and one.is_floating_point()
    return is_plain and one.requires_grad and one.numel() <= LARGEST

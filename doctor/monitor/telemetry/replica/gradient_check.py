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

AMONG, LARGEST = 8, 65_536
"""Parameters among which the smallest is taken, from the first one on, and its largest number of elements."""


class GradientCheck:
    """The check of one model. ``batch``: returns the number of the batch that the training thread is in."""

    def __init__(self) -> None:
        self.first: NonFinite | None = None
        self.batch: Callable[[], int] = lambda: 0
        self._handle: Any = None
        self._name = ""

    def attach(self, model: torch.nn.Module) -> None:
        """Watch a parameter of a model; without a suitable one, nothing."""
        self.detach()
        plain = ((name, one) for name, one in model.named_parameters() if type(one).__name__ == "Parameter")
        trained = [(name, one) for name, one in plain if one.requires_grad and one.device.type == "cpu"][:AMONG]
        name, chosen = min(trained, key=lambda pair: pair[1].numel(), default=("", None))
        if chosen is None or chosen.numel() > LARGEST or not chosen.is_floating_point():
            return
        own = weakref.ref(self)

        def look(gradient: torch.Tensor) -> None:
            check = own()
            if check is not None and check.first is None:
                with contextlib.suppress(Exception):  # an exception would end the backward pass
                    check._look(gradient)

        self._name, self._handle = name, chosen.register_hook(look)

    def detach(self) -> None:
        """End the check."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _look(self, gradient: torch.Tensor) -> None:
        # Infinite sums are left to the loss: a gradient scaler that searches for its scale makes some.
        if gradient.is_floating_point() and math.isnan(gradient.sum().item()):
            self.first = NonFinite(self.batch(), "gradient", self._name, "nan")
            self.detach()

"""Observes the first optimizer step of a loop of the user's own: its optimizers, gradient clipping and autocast.

No handle of these is passed to ``doctor.watch``. A hook of torch on all optimizers
(torch/optim/optimizer.py, ``register_optimizer_step_post_hook``), one before the forward pass of the wrapped model, and
wrappers of torch's clipping functions observe them until the first step is done, and are removed then: nothing remains
on the path of later steps. A compiled model (``torch.compile``) gets no hook, because it would be compiled anew.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from doctor.core.facts import Variable
from doctor.monitor.integrations.hook_guard import value_or_default

COMPILED = "OptimizedModule"
"""The class of ``torch.compile(module)`` (torch/_dynamo/eval_frame.py)."""
BY_NORM, BY_VALUE = "_clip_grads_with_norm_", "clip_grad_value_"
"""Functions of torch/nn/utils/clip_grad.py: ``clip_grad_norm_`` calls the first one, by its module, however the user
imported it; the second one is observed where it is called by its module."""


class FirstStepObserver:
    """Observations of one process, from :meth:`start` to :meth:`finish`."""

    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        self.clipping = "none"
        self.precision: str | None = None
        self.is_active = False
        self._parameters: frozenset[int] = frozenset()
        self._undo: list[Callable[[], object]] = []

    def start(self, module: Any) -> None:
        """Observe the first step of ``module``, as it is wrapped."""
        self.finish()
        torch = sys.modules.get("torch")
        if torch is None:
            return
        self.is_active = True
        self.optimizers, self._parameters = [], frozenset(map(id, module.parameters()))
        optimizer = sys.modules["torch.optim.optimizer"]  # torch.optim deletes the name
        handle = optimizer.register_optimizer_step_post_hook(self._stepped)
        self._undo.append(handle.remove)
        clip_grad = sys.modules["torch.nn.utils.clip_grad"]
        for holder, name in ((clip_grad, BY_NORM), (clip_grad, BY_VALUE), (torch.nn.utils, BY_VALUE)):
            value_or_default(functools.partial(self._wrap, holder, name), None)
        if type(module).__name__ != COMPILED and getattr(module, "_compiled_call_impl", None) is None:
            self._undo.append(module.register_forward_pre_hook(self._enters).remove)

    def finish(self) -> None:
        """Remove everything. What was observed stays."""
        self.is_active = False
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            value_or_default(one, None)

    @property
    def settings(self) -> tuple[Variable, ...]:
        """What was observed of clipping, once an optimizer stepped."""
        return (Variable("gradient clipping", self.clipping),) if self.optimizers else ()

    def _stepped(self, optimizer: Any, *_: object) -> None:
        known = any(optimizer is one for one in self.optimizers)
        if not known and self._parameters.intersection(
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        ):
            self.optimizers.append(optimizer)

    def _wrap(self, holder: Any, name: str) -> None:
        original = getattr(holder, name)

        @functools.wraps(original)
        def clip(parameters: Any, limit: Any, *args: Any, **options: Any) -> Any:
            value_or_default(functools.partial(self._clips, name, limit), None)
            return original(parameters, limit, *args, **options)

        setattr(holder, name, clip)
        self._undo.append(functools.partial(_restore, holder, name, clip, original))

    def _clips(self, name: str, limit: Any) -> None:
        what = "norm" if name == BY_NORM else "value"
        self.clipping = f"by {what}, at most {float(limit):g}"

    def _enters(self, module: Any, _: object) -> None:
        """Called at the start of a forward pass; observes the first one in training mode."""
        if self.precision is None and module.training:
            self.precision = value_or_default(functools.partial(_autocast, module), None)


def _restore(holder: Any, name: str, wrapper: object, original: object) -> None:
    """Put the original back, unless another one has replaced the wrapper."""
    if getattr(holder, name) is wrapper:
        setattr(holder, name, original)


def _autocast(module: Any) -> str:
    torch = sys.modules["torch"]
    kind = next(module.parameters()).device.type
    if not torch.is_autocast_enabled(kind):
        return "no autocast"
    return f"autocast to {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"

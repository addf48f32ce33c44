"""Observes the start of each backward pass: ranks wait for one another in it, and for their own work before and after.

``Tensor.backward`` calls ``torch.autograd.backward``, which it looks up at each call (torch/_tensor.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from doctor.core.clock import monotonic
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry

TIME_EVERY = 0.05
"""Seconds from one batch whose gradients were timed to the next one: the hook and the callback take some 30 µs, which
short steps must not pay each time."""
LONG_WAIT = 0.05
"""Seconds from which on a wait for other ranks is recorded after any batch: rare long ones are missed by samples."""


def observe_backward(begins: Callable[[Any], object]) -> Callable[[], None]:
    """Have ``begins`` called with what each backward pass of this process begins at.

    Not of those that it forks, nor for a pass within another one, as reentrant checkpointing makes them.

    Returns:
        What ends that; a wrapper that another library put around ours stays.
    """
    autograd: Any = sys.modules.get("torch.autograd")
    if autograd is None:
        return lambda: None
    original, process, active = autograd.backward, os.getpid(), [True]
    inside: list[int] = []

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if not active or thread in inside or os.getpid() != process:
            return original(*args, **kwargs)
        inside.append(thread)
        try:
            with contextlib.suppress(Exception):  # the program must not be affected
                begins(args[0] if args else kwargs.get("tensors"))
            return original(*args, **kwargs)
        finally:
            inside.remove(thread)

    def end() -> None:
        active.clear()
        if autograd.backward is backward:
            autograd.backward = original

    autograd.backward = backward
    return end


class GradientTimer:
    """Times the part of backward passes in which this rank computes its own gradients.

    When the last gradient is ready, DistributedDataParallel queues what waits for the other ranks as a callback of the
    engine (``Reducer::mark_variable_ready``, torch/csrc/distributed/c10d/reducer.cpp), which runs callbacks in the
    order in which they were queued. One that is queued at the start of the pass comes before it. Only a hook that runs
    within the pass may queue one: that of the loss, which leaves the gradient as it is.

    Of a batch, all passes are timed or none. Not in a run of one rank, nor on a GPU, where the host only launches
    kernels, and not where torch compiles the backward pass with its hooks.

    Attributes:
        due: the time of the monotonic clock from which :meth:`begin` has to be called.
    """

    def __init__(self, telemetry: RankTelemetry) -> None:
        self.due = 0.0
        self._telemetry = telemetry
        self._after: int | None = None  # the batch of which an earlier pass may not have been timed
        self._timed = -1
        self._handle: Any = None
        self._since = 0.0

    def begin(self, root: Any) -> None:
        """Time the pass that begins at ``root``, if its batch is one of those that are timed. (step path)"""
        if not self._telemetry.has_peers:
            self.due = math.inf
            return
        batch, self._since = self._telemetry.batches_begun, monotonic()
        self._leave()
        if batch != self._timed:
            if self._after is None:
                self._after = batch
            elif self._timed > self._after:
                self._after, self.due = None, self._since + TIME_EVERY
            elif batch > self._after:
                self._timed = batch
        if batch == self._timed and batch >= 0 and not self._telemetry.times_device and not _compiles_backward():
            root = root[0] if isinstance(root, (tuple, list)) else root
            self._handle = root.register_hook(self._has_begun)

    def time_wait(self, wait: Callable[[], Any]) -> Any:
        """Call ``wait``, which waits for other ranks, and record its time if it was long or follows a batch whose
        gradients were timed. (step path)"""
        batch = self._telemetry.batches_begun
        if self._telemetry.times_device:
            return wait()
        began = monotonic()
        try:
            return wait()
        finally:
            seconds = monotonic() - began
            if batch == self._timed or seconds >= LONG_WAIT:
                self._telemetry.add_wait(batch, seconds)

    def _leave(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _has_begun(self, _: Any) -> None:
        with contextlib.suppress(Exception):  # an exception would end the pass
            sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(self._are_computed)

    def _are_computed(self) -> None:
        with contextlib.suppress(Exception):
            self._telemetry.add_gradients(self._timed, monotonic() - self._since)
            self._leave()


def _compiles_backward() -> bool:
    """Return whether the backward pass is traced with its hooks (torch/_dynamo/compiled_autograd.py)."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


def loss_of(root: Any) -> Any:
    """Return the loss that a backward pass begins at, without its graph; ``None`` if it is not a single number.

    ``None`` in half precision too: the factor of a GradScaler, 65,536 at first (torch/amp/grad_scaler.py), may overflow
    it in a healthy run.
    """
    if isinstance(root, (tuple, list)):
        root = root[0] if len(root) == 1 else None
    if root is None or root.numel() != 1 or str(root.dtype) == "torch.float16":
        return None
    return root.detach()

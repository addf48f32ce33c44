"""Observes the start of each backward pass: ranks wait for one another in it, and for their own work before and after.

``Tensor.backward`` calls ``torch.autograd.backward``, which it looks up at each call (torch/_tensor.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any


def observe_backward(begins: Callable[[Any], object]) -> Callable[[], None]:
    """Have ``begins`` called with what each backward pass of this process begins at, not of those that it forks.

    Returns:
        What ends that; a wrapper that another library put around ours stays.
    """
    autograd: Any = sys.modules.get("torch.autograd")
    if autograd is None:
        return lambda: None
    original, process, active = autograd.backward, os.getpid(), [True]

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if active and os.getpid() == process:
            with contextlib.suppress(Exception):  # the program must not be affected
                begins(args[0] if args else kwargs.get("tensors"))
        return original(*args, **kwargs)

    def end() -> None:
        active.clear()
        if autograd.backward is backward:
            autograd.backward = original

    autograd.backward = backward
    return end


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

"""Observes the start of each backward pass: ranks wait for one another in it, and for their own work before and after.

``Tensor.backward`` calls ``torch.autograd.backward``, which it looks up at each call (torch/_tensor.py).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any


def observe_backward(begins: Callable[[], object]) -> Callable[[], None]:
    """Have ``begins`` called before each backward pass of this process, not of those that it forks.

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
            begins()
        return original(*args, **kwargs)

    def end() -> None:
        active.clear()
        if autograd.backward is backward:
            autograd.backward = original

    autograd.backward = backward
    return end

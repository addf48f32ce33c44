"""Preserves the random state of the training process, whatever the doctor imports or calls."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the states of ``random``, and of numpy and torch (CPU) if they are loaded, at the end of the block.

    For short calls in the training thread only: numbers that other threads draw meanwhile are drawn again.
    """
    numpy: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = numpy.get_state() if hasattr(numpy, "get_state") else None
    torch_state = torch.get_rng_state() if hasattr(torch, "get_rng_state") else None  # not while torch is imported
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.set_state(numpy_state)
        if torch_state is not None:
            torch.set_rng_state(torch_state)

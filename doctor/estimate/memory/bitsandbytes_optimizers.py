"""The optimizers of bitsandbytes on fake tensors: their states, without their kernels, which need a GPU.

States follow ``Optimizer2State`` and ``Optimizer1State`` of ``bitsandbytes/optim/optimizer.py``, bitsandbytes 0.50. The
kernels update parameters and states in place: they have no temporaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

BLOCK = 256
"""Elements of a state that share a float32 scale."""
LEAST_8BIT = 4096
"""Elements of a parameter from which on its states have 8 bits (``min_8bit_size``)."""
LEAST_PAGED = 100_000
"""Elements of a parameter from which on a paged optimizer keeps its states in unified memory (``get_state_buffer``)."""
MAP = 256
"""Values of an 8-bit state, in a float32 table that all parameters share."""
STATES = {"adam": 2, "adamw": 2, "adagrad": 1, "lion": 1, "rmsprop": 1, "sgd": 1}
_NAME = re.compile(r"(paged)?(adamw?|adagrad|lion|rmsprop|sgd)(?:bnb)?(8bit|32bit)?")
PAGED = "the state of a paged optimizer is in unified memory, which the driver can move to the host: it is not counted"


def named(name: str) -> Callable[..., Optimizer] | None:
    """Return the constructor of ``adamw8bit``, ``pagedadamw32bit``, …; ``None`` for names of other libraries."""
    match = _NAME.fullmatch(name)
    if match is None or not (match.group(1) or match.group(3)):
        return None
    paged, kind, bits = match.groups()
    return partial(BitsAndBytesOptimizer, states=STATES[kind], bits=8 if bits == "8bit" else 32, paged=bool(paged))


class BitsAndBytesOptimizer(Optimizer):
    """``states``: per parameter. ``bits``: of large parameters' states. ``paged``: these are in unified memory."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float = 1e-3, *, states: int, bits: int, paged: bool
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._states, self._bits, self.is_paged = states, bits, paged
        self._maps: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the states of parameters that have a gradient."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and each not in self.state:
                    self.state[each] = dict(enumerate(self._made_for(each)))

    def _made_for(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        count = parameter.numel()
        is_small = count < LEAST_8BIT
        dtype = torch.float32 if self._bits == 32 or is_small else torch.uint8
        made: list[torch.Tensor] = []
        if not self.is_paged or count < LEAST_PAGED:
            made += [torch.empty_like(parameter, dtype=dtype) for _ in range(self._states)]
        if dtype is torch.uint8:
            if not self._maps:
                self._maps = [parameter.new_empty(MAP, dtype=torch.float32) for _ in range(self._states)]
            made += [parameter.new_empty(-(-count // BLOCK), dtype=torch.float32) for _ in range(self._states)]
        return [*made, *self._maps]

"""Replacements for operations whose result depends on data, which fake tensors lack.

Such an operation gets the largest result that it can have, which makes the estimate an upper bound; masks that divide
one tensor among experts get even shares. The report notes both.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from doctor.version import PACKAGE

aten = torch.ops.aten
OWN = (str(Path(torch.__file__).parent), str(Path(PACKAGE, "estimate")))


def full(count: int, value: int) -> torch.Tensor:
    """Return ``count`` integers on the CPU whose value is known, unlike that of other fake tensors."""
    made = torch.empty(count, dtype=torch.int64, device="cpu")
    made.doctor_value = value  # type: ignore[attr-defined]
    return made


class MaskPartitions:
    """Masks that compare one tensor of integers with several numbers, as experts select their tokens: together, they
    never select more than all. ``shares``: the number of masks of each such tensor, in order, in an earlier run."""

    def __init__(self, shares: tuple[int, ...] = ()) -> None:
        self._shares = shares
        self.is_shared = max(shares, default=1) > 1
        self._numbers: list[set[object]] = []

    def compared(self, source: Any, number: object, mask: Any) -> None:
        """Record that ``mask`` is ``source == number``."""
        if not hasattr(source, "doctor_place"):
            source.doctor_place = len(self._numbers)
            self._numbers.append(set())
        mask.doctor_mask = (source.doctor_place, number)

    def most(self, mask: torch.Tensor) -> int:
        """Return how many elements a mask may select: an even share if other masks select from the same tensor."""
        place, number = getattr(mask, "doctor_mask", (None, None))
        if place is None:
            return mask.numel()
        self._numbers[place].add(number)
        return -(-mask.numel() // (self._shares[place] if place < len(self._shares) else 1))

    @property
    def found(self) -> tuple[int, ...]:
        """How many numbers each tensor was compared with, for the next run."""
        return tuple(max(1, len(numbers)) for numbers in self._numbers)


class FakeOps:
    """``bounds``: the reasons why the step is an upper bound. ``truth``: the assumed value of conditions on data;
    ``length``: the assumed value of integers in the data."""

    def __init__(self, *, truth: bool = False, length: int = 1, shares: tuple[int, ...] = ()) -> None:
        self.bounds: dict[str, None] = {}
        self.asked_truth = self.recurs = False
        self.partitions = MaskPartitions(shares)
        self._truth, self.length = truth, length

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operation's result, or the largest that it can have."""
        try:
            result: Any = func(*args, **kwargs) if func is not _GROUPED else _grouped_product(*args, **kwargs)
        except DataDependentOutputException:
            return self._value_of(args[0])
        except DynamicOutputShapeException:
            return self._largest(func, args, kwargs)
        except (UnsupportedOperatorException, NotImplementedError):
            if func.namespace == "aten":
                raise
            self.note(f"{_name(func)} cannot run on fake tensors: its outputs are assumed to be as large as its inputs")
            return _like_inputs(func, args)
        if func is aten.select.int and hasattr(args[0], "doctor_value"):
            result.doctor_value = args[0].doctor_value
        if func is aten.eq.Scalar and not args[0].is_floating_point():
            self.partitions.compared(args[0], args[1], result)
        return result

    def _largest(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        largest = _LARGEST.get(func)
        if largest is None:
            raise DynamicOutputShapeException(func)
        share = "to be an even share" if self.partitions.is_shared else "to be the maximum"
        self.note(f"{_name(func)} has a data-dependent number of outputs, assumed {share}")
        return largest(self.partitions.most, *args, **kwargs)

    def note(self, words: str) -> None:
        """Add a reason why this is a bound, with the innermost line of user code."""
        stack = reversed(traceback.extract_stack(limit=60))
        line = next((frame for frame in stack if not frame.filename.startswith((*OWN, "<"))), None)
        self.bounds.setdefault(f"{words} ({Path(line.filename).name}:{line.lineno})" if line else words)

    def _value_of(self, tensor: torch.Tensor) -> bool | int | float:
        if hasattr(tensor, "doctor_value"):
            return int(tensor.doctor_value)
        if tensor.dtype is torch.bool:
            self.asked_truth = True
            self.note(f"a data-dependent condition is assumed to be {self._truth}")
            return self._truth
        if tensor.is_floating_point() or tensor.is_complex():
            return 1.0
        self.note(f"a data-dependent number is assumed to be {self.length}")
        return self.length


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").rpartition(".")[0] or str(func)


Most = Callable[[torch.Tensor], int]


def _nonzero(most: Most, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((most(tensor), tensor.dim()), dtype=torch.int64)


def _masked_select(most: Most, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((most(mask) if mask.shape == tensor.shape else (tensor * mask).numel(),))


def _unique2(_: Most, tensor: torch.Tensor, *__: object, **___: object) -> tuple[torch.Tensor, ...]:
    flat = tensor.new_empty((tensor.numel(),))
    return flat, tensor.new_empty(tensor.shape, dtype=torch.int64), flat.new_empty(flat.shape, dtype=torch.int64)


def _unique_dim(_: Most, tensor: torch.Tensor, dim: int, *__: object, **___: object) -> tuple[torch.Tensor, ...]:
    count = tensor.new_empty((tensor.shape[dim],), dtype=torch.int64)
    return torch.empty_like(tensor), count, torch.empty_like(count)


def _index(most: Most, tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    whole: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            count = most(index)
            whole.extend(index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim()))
        else:
            whole.append(index)
    return aten.index.Tensor(tensor, whole)


def _repeat_interleave(_: Most, repeats: torch.Tensor, output_size: int | None = None) -> torch.Tensor:
    return repeats.new_empty((output_size or repeats.numel(),), dtype=torch.int64)


_GROUPED = getattr(getattr(aten, "_grouped_mm", None), "default", None)


def _grouped_product(one: torch.Tensor, other: torch.Tensor, offs: Any = None, *_: Any, **kwargs: Any) -> torch.Tensor:
    """Return the result in any precision; torch infers its shape only for bfloat16."""
    if one.dim() == 2 and other.dim() == 2:
        shape: tuple[int, ...] = (offs.shape[0], one.shape[0], other.shape[1])
    elif one.dim() == 2:
        shape = (one.shape[0], other.shape[2])
    else:
        shape = (one.shape[1], other.shape[1]) if other.dim() == 2 else (*one.shape[:2], other.shape[2])
    return one.new_empty(shape, dtype=kwargs.get("out_dtype") or one.dtype)


_LARGEST: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique2,
    aten.unique_dim.default: _unique_dim,
    aten.unique_consecutive.default: _unique2,
    aten.index.Tensor: _index,
    aten.repeat_interleave.Tensor: _repeat_interleave,
}


def _like_inputs(func: Any, args: tuple[Any, ...]) -> Any:
    """Return as many results as the operation has, each like its largest floating-point input."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not tensors:
        raise NotImplementedError(f"{_name(func)} cannot run on fake tensors")
    model = max(tensors, key=lambda tensor: (tensor.is_floating_point(), tensor.numel()))
    made = [torch.empty_like(model) for _ in func._schema.returns]
    return made[0] if len(made) == 1 else tuple(made) or None

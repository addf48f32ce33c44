"""Redirects functions that select their kernel by device to the one that a GPU runs, and functions that read data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch._subclasses.fake_tensor import FakeTensor

from doctor.estimate.tracing.fake_ops import FakeOps, full
from doctor.estimate.tracing.kernel_temporaries import AMPERE

aten = torch.ops.aten
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD = 256
"""The widest head of flash attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), which needs compute
capability 8.0."""

_VARIABLE = torch._C._VariableFunctions
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_READS = ("numpy", "tolist", "_pack_padded_sequence")
"""Functions that are redirected for tensors on the CPU, too."""
_active: list[KernelSelection] = []
_attention_by_torch = F.scaled_dot_product_attention
_SOFTMAX = {"softmax": (torch.softmax, aten._softmax), "log_softmax": (torch.log_softmax, aten._log_softmax)}


def install() -> None:
    """Wrap each function, once per process, before the user's code imports it by name. A mode of ``torch.overrides``
    would not see calls by torch's own Python functions."""
    for owner, name in (
        (F, "scaled_dot_product_attention"),
        (F, "dropout"),
        (torch, "dropout"),
        (torch.Tensor, "numpy"),
        (torch.Tensor, "tolist"),
        *((owner, name) for owner in (torch, torch.Tensor) for name in _SOFTMAX),
        *((torch._VF, name) for name in ("_pack_padded_sequence", "_pad_packed_sequence", *_RECURRENT)),
    ):
        setattr(owner, name, _switch(name, getattr(owner, name)))


def _switch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "doctor_switch"):
        return function

    @wraps(function)
    def switch(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        instead = _active[-1].instead_of(name, first) if _active else None
        return (instead or function)(*args, **kwargs)

    switch.doctor_switch = True  # type: ignore[attr-defined]
    return switch


class KernelSelection(AbstractContextManager[None]):
    """While active, these functions behave on tensors of ``device`` as on a GPU."""

    def __init__(self, device: torch.device, substitutes: FakeOps, capability: str = "") -> None:
        self._type = device.type
        major = capability.partition(".")[0]
        self._has_flash = not major.isdecimal() or int(major) >= AMPERE
        self._substitutes = substitutes
        self._as: dict[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": self._attention,
            "dropout": _dropout,
            "_pack_padded_sequence": self._pack,
            "_pad_packed_sequence": _pad,
            "numpy": self._numpy,
            "tolist": self._tolist,
            **{name: partial(_softmax, name) for name in _SOFTMAX},
            **{name: partial(self._recurrent, getattr(_VARIABLE, name)) for name in _RECURRENT},
        }

    def __enter__(self) -> None:
        """Activate."""
        _active.append(self)

    def __exit__(self, *_: object) -> None:
        """Deactivate."""
        _active.remove(self)

    def instead_of(self, name: str, first: object) -> Callable[..., Any] | None:
        """Return the replacement for the function of this name with first argument ``first``, if any."""
        fits = isinstance(first, FakeTensor) and (first.fake_device.type == self._type or name in _READS)
        return self._as[name] if fits else None

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Select as ``scaled_dot_product_attention`` does on a GPU: flash for 16 bits without a mask, else the
        memory-efficient kernel; both save their result and one number per row."""
        if torch.is_autocast_enabled(self._type):
            dtype = torch.get_autocast_dtype(self._type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        if query.dim() != 4:
            return _attention_by_torch(query, key, value, attn_mask, dropout_p, is_causal)
        is_flash = self._has_flash and attn_mask is None and query.shape[-1] <= FLASH_HEAD
        if is_flash and query.dtype in FLASH_DTYPES:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        bias = _bias(attn_mask, query, key)
        needs_rows = any(each.requires_grad for each in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_rows, dropout_p, is_causal, scale=scale
        )[0]

    def _pack(self, data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack sequences as if all were as long as the longest."""
        self._substitutes.note("all packed sequences are assumed to be as long as the longest")
        steps = data.transpose(0, 1) if batch_first else data
        sizes = full(steps.shape[0], steps.shape[1])
        return steps.reshape(-1, *steps.shape[2:]), sizes

    def _numpy(self, tensor: torch.Tensor, **_: object) -> Any:
        import numpy as np

        self._substitutes.note("tensor data is read; every value is assumed to be the same")
        kind = torch.empty((), dtype=tensor.dtype, device="cpu")
        value = self._substitutes.length if not tensor.is_floating_point() else 1
        dtype = np.dtype(str(kind.dtype).removeprefix("torch.")) if kind.dtype is not torch.bfloat16 else np.float32
        return np.broadcast_to(np.full((), value, dtype=dtype), tuple(tensor.shape)).copy()

    def _tolist(self, tensor: torch.Tensor) -> Any:
        if tensor.constant is not None:  # type: ignore[attr-defined] # a fake tensor with known values
            return tensor.constant.tolist()  # type: ignore[attr-defined]
        return self._numpy(tensor).tolist()

    def _recurrent(self, func: Any, data: torch.Tensor, second: Any, *rest: Any) -> Any:
        """Run packed data as the full sequences that :meth:`_pack` assumed."""
        self._substitutes.recurs = True
        if not isinstance(second, torch.Tensor) or not isinstance(rest[1], (list, tuple)):
            return func(data, second, *rest)
        hidden = rest[0]
        first = hidden[0] if isinstance(hidden, (list, tuple)) else hidden
        steps = data.view(-1, first.shape[1], data.shape[-1])
        out, *states = func(steps, *rest, False)
        return (out.reshape(-1, out.shape[-1]), *states)


def _dropout(
    input: torch.Tensor,  # noqa: A002 - torch's own name for it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> Any:
    """Use ``native_dropout``, whose mask on a GPU takes one byte per element."""
    if not (training and train) or not p:
        return input
    return input.mul_(torch.empty_like(input)) if inplace else torch.native_dropout(input, p, True)[0]


def half_to_float(input: torch.Tensor, dtype: torch.dtype | None) -> bool:  # noqa: A002 - as torch names it
    """Whether a GPU's softmax reads 16-bit numbers and writes float32, without a copy of its input.

    See ``softmax`` in aten/src/ATen/native/SoftMax.cpp: of ``torch.half`` alone, not of bfloat16."""
    return input.dtype is torch.float16 and dtype is torch.float32


def _softmax(
    name: str,
    input: torch.Tensor,  # noqa: A002 - torch's own name for it
    dim: int,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    by_torch, kernel = _SOFTMAX[name]
    if not half_to_float(input, dtype):
        return by_torch(input, dim, dtype=dtype, **options)
    return kernel(input, dim, True)


def _pad(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = sizes.shape[0]
    whole = data.view(steps, -1, *data.shape[1:])
    lengths = full(whole.shape[1], steps)
    return (whole.transpose(0, 1) if batch_first else whole).contiguous(), lengths


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    head = query.shape[-1]
    if head % 8:
        query, key, value = (F.pad(each, (0, 8 - head % 8)) for each in (query, key, value))
    scale = scale if scale is not None else head**-0.5
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return out[..., :head] if head % 8 else out


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Convert a boolean mask to numbers, and pad its rows to the kernel's alignment."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if mask.shape[-1] % 16:
        mask = F.pad(mask, (0, 16 - mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:-1], key.shape[-2])

"""Buffers that CUDA kernels allocate and free inside one operation, which fake tensors do not show.

The sizes follow torch's sources: ``aten/src/ATen/native/cuda/SoftMax.cu`` (``Tensor tmp = grad * output``),
``.../transformers/cuda/flash_attn/flash_api.cpp`` (``mha_bwd``: ``softmax_d``, ``dq_accum``, expanded keys and values)
and ``.../transformers/cuda/mem_eff_attention/kernel_backward.h`` (``workspace_size``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

FLOAT = 4
"""Bytes of a number of an accumulator."""
FLASH_ROWS, FLASH_COLUMNS = 128, 32
"""Flash attention rounds the rows of its accumulators up to 128 and the head dimension to 32."""
AMPERE = 8
"""Major compute capability from which the memory-efficient kernel uses blocks of 128 rows, and flash exists."""


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _softmax(args: tuple[Any, ...], _: int) -> list[int]:
    """Return the product of gradient and output, in the dtype of both."""
    return [args[0].untyped_storage().nbytes()]


def _flash(args: tuple[Any, ...], _: int) -> list[int]:
    """Return the row sums, the accumulator of the queries' gradient, and gradients of repeated keys and values."""
    query, key = args[1], args[2]
    batch, heads, rows, head = query.shape
    padded = batch * heads * _rounded(rows, FLASH_ROWS)
    sizes = [padded * FLOAT, padded * _rounded(head, FLASH_COLUMNS) * FLOAT]
    if key.shape[1] != heads:
        sizes += 2 * [batch * key.shape[2] * heads * head * key.itemsize]
    return sizes


def _efficient(args: tuple[Any, ...], major: int) -> list[int]:
    """Return the row sums, and accumulators where the kernel does not keep them in registers."""
    query, key, value = args[1], args[2], args[3]
    batch, heads, rows, head = query.shape
    sizes = [batch * heads * rows * FLOAT]
    if query.itemsize < FLOAT:
        block = 128 if major >= AMPERE and head > 64 else 64
        width = 128 if head > 64 else 64
        numbers = _rounded(rows, block) * _rounded(head, width)
        if head > block:
            numbers += _rounded(key.shape[2], block) * (_rounded(head, block) + _rounded(value.shape[3], block))
        sizes.append(batch * heads * numbers * FLOAT)
    return sizes


_SIZES: dict[Any, Callable[[tuple[Any, ...], int], list[int]]] = {
    aten._softmax_backward_data.default: _softmax,
    aten._scaled_dot_product_flash_attention_backward.default: _flash,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient,
}


def temporaries_of(func: Any, args: tuple[Any, ...], capability: str) -> list[int]:
    """Return the bytes of each buffer that the operation holds besides its inputs and results.

    ``capability``: compute capability of the GPU; a recent one is assumed if it is empty."""
    sizes = _SIZES.get(func)
    major = capability.partition(".")[0]
    return sizes(args, int(major) if major.isdecimal() else AMPERE) if sizes is not None else []

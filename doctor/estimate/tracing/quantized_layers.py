"""Linear layers as bitsandbytes stores and runs them, on fake tensors.

What exists, and what a call allocates, follows bitsandbytes 0.50: ``functional.py`` (``quantize_4bit``,
``dequantize_4bit``), ``nn/modules.py`` (``Linear4bit``, ``Linear8bitLt``), ``autograd/_functions.py`` (``MatMul4Bit``,
``MatMul8bitLt``) and ``backends/cuda/ops.py`` (``_dequant_linear_fallback``, which runs for the many rows of a training
batch). Which columns LLM.int8() treats as outliers depends on data: none is counted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.nn import Module, Parameter

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import Quantization

BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale, and scales that share a scale of theirs (double quantization)."""
CODE_VALUES = 16
"""Values of a 4-bit number, which each layer keeps in float32."""
WORD = torch.int32
"""Stands for float32 scales: like them, it has 4 bytes; unlike them, it keeps its dtype if the precision is 16 bits."""


def element_count(parameter: torch.Tensor) -> int:
    """Return the number of weights: of a packed parameter, more than its elements."""
    return int(getattr(parameter, "weight_count", parameter.numel()))


class QuantizedLinear(Module):
    """Base of both kinds. ``dtype``: of the original weight. ``compute_dtype``: of products."""

    def __init__(self, original: Module, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = linear_shape(original)
        self._dtype, self._compute_dtype = dtype, compute_dtype
        bias: Any = original.bias
        self.bias = None if bias is None else Parameter(torch.empty(bias.shape, dtype=dtype), requires_grad=False)

    def _packed(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parameter:
        packed: Any = Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        packed.weight_count = self.out_features * self.in_features
        return packed  # type: ignore[no-any-return]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in ``dtype``."""
        raise NotImplementedError


class Linear4bit(QuantizedLinear):
    """Two weights in a byte, a float32 scale for 64 of them; with ``double``, 8-bit scales with scales of theirs."""

    def __init__(self, original: Module, dtype: torch.dtype, compute_dtype: torch.dtype, *, double: bool) -> None:
        super().__init__(original, dtype, compute_dtype)
        count = self.out_features * self.in_features
        self._double = double
        self._blocks = -(-count // BLOCK)
        self.weight = self._packed((-(-count // 2), 1), torch.uint8)
        self.register_buffer("code", torch.empty(CODE_VALUES, dtype=WORD))
        self.register_buffer("absmax", torch.empty(self._blocks, dtype=torch.uint8 if double else WORD))
        if double:
            self.register_buffer("absmax_scales", torch.empty(-(-self._blocks // SCALE_BLOCK), dtype=WORD))
            self.register_buffer("offset", torch.empty((), dtype=WORD))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in ``dtype``; the scales in float32 are a temporary."""
        scales = self.weight.new_empty(self._blocks, dtype=torch.float32) if self._double else None
        weight = self.weight.new_empty((self.out_features, self.in_features), dtype=dtype)
        del scales
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply in ``compute_dtype``, and return the dtype of the input."""
        bias = None if self.bias is None else self.bias.to(self._compute_dtype)
        return _Product4bit.apply(x.to(self._compute_dtype), self, bias).to(x.dtype)  # type: ignore[no-any-return, no-untyped-call]


class _Product4bit(torch.autograd.Function):
    """Keeps the packed weight alone, and dequantizes it again for the gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, layer: Linear4bit, bias: torch.Tensor | None) -> torch.Tensor:
        context.layer = layer
        return F.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        layer = context.layer
        return torch.matmul(gradient, layer.dequantized(layer._dtype).to(gradient.dtype)), None, None


class Linear8bit(QuantizedLinear):
    """An 8-bit weight with a float32 scale for each row."""

    def __init__(self, original: Module, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        super().__init__(original, dtype, compute_dtype)
        self.weight = self._packed((self.out_features, self.in_features), torch.int8)
        self.register_buffer("row_scales", torch.empty(self.out_features, dtype=WORD))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in ``dtype``."""
        return self.weight.to(dtype, copy=True).mul_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply 8-bit integers."""
        return _Product8bit.apply(x, self, self.bias)  # type: ignore[no-any-return, no-untyped-call]


class _Product8bit(torch.autograd.Function):
    """Quantizes the input by rows, and keeps it as it was."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, layer: Linear8bit, bias: torch.Tensor | None) -> torch.Tensor:
        context.layer, context.x = layer, x
        rows = math.prod(x.shape[:-1])
        half = x.reshape(rows, layer.in_features).to(torch.float16)
        scales = half.new_empty(rows, dtype=torch.float32)
        quantized = torch.empty_like(half, dtype=torch.int8)
        outliers = half.abs() >= 1.0
        del outliers, half
        product = x.new_empty((rows, layer.out_features), dtype=torch.int32)
        del quantized, scales
        result = torch.empty_like(product, dtype=torch.float16)
        del product
        result = result.to(x.dtype)
        return (result if bias is None else result.add_(bias)).reshape(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, layer = context.x, context.layer
        return torch.matmul(gradient.to(x.dtype), layer.dequantized(x.dtype)), None, None


def is_linear(module: Module) -> bool:
    """Whether the module is a linear layer of torch, or the ``Conv1D`` of GPT-2, which is one."""
    return isinstance(module, (torch.nn.Linear, QuantizedLinear)) or type(module).__name__ == "Conv1D"


def linear_shape(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs of a linear layer."""
    if isinstance(layer, QuantizedLinear):
        return layer.out_features, layer.in_features
    rows, columns = layer.weight.shape
    return (columns, rows) if type(layer).__name__ == "Conv1D" else (rows, columns)


MOST_LEFT = 0.2
"""Share of quantized weights below which there must be others than embeddings: stacked weights of experts."""


def quantize(
    model: Any, kind: Quantization, dtype: torch.dtype, compute_dtype: torch.dtype, *, double: bool
) -> tuple[str, ...]:
    """Replace the linear layers of a model of Transformers, and return notes.

    The output layer and the last module keep their weights, as ``get_keys_to_not_convert`` of Transformers has it.

    Raises:
        UnusableError: the model has no other linear layer.
    """
    kept = {id(model.get_output_embeddings()), id(_last_module(model))}
    whole = sum(map(element_count, model.parameters()))
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not is_linear(child) or id(child) in kept:
                continue
            if kind == "4bit":
                new: QuantizedLinear = Linear4bit(child, dtype, compute_dtype, double=double)
            else:
                new = Linear8bit(child, dtype, compute_dtype)
            setattr(parent, name, new)
            replaced += new.out_features * new.in_features
    if not replaced:
        raise UnusableError("no linear layer of the model can be quantized")
    share = replaced / max(1, whole)
    how = "NF4 with double quantization" if double else "NF4"
    words = how if kind == "4bit" else "LLM.int8() without outliers"
    left = "experts that are one tensor, embeddings" if share < MOST_LEFT else "embeddings"
    return (f"bitsandbytes stores {share:.0%} of the weights as {words}; it leaves {left} and the output layer",)


def _last_module(model: Module) -> Module:
    *path, _ = list(model.named_parameters())[-1][0].split(".")
    return model.get_submodule(".".join(path))

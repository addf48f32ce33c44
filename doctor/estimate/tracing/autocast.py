"""Autocast's rules for CUDA, on fake tensors (:mod:`doctor.estimate.tracing.fake_mode`).

Autocast's own kernels for CUDA don't cast fake tensors, which C++ does not see on a GPU. These kernels replace them,
in a process that does nothing else. The lists are those of ``aten/src/ATen/autocast_mode.h``, as documented under "CUDA
Ops that can autocast" (docs.pytorch.org/docs/stable/amp.html); names that a release lacks are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from doctor.estimate.tracing.kernel_choice import half_to_float
from doctor.estimate.tracing.pytree import tensors_in

_LOWER = """
_convolution _convolution.deprecated conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention
"""
_SINGLE = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
"""
_RESULT_SINGLE = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add vdot cat stack
"""

_SOFTMAX = {
    torch.ops.aten.softmax.int: torch.ops.aten._softmax.default,
    torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax.default,
}
_KEY = "AutocastCUDA"
_LOW = (torch.float16, torch.bfloat16)
_cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
_kept: list[object] = []


def install() -> None:
    """Register the kernels, once per process."""
    if _kept:
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _kept.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the override, which is intended
        for names, rule in (
            (_LOWER, partial(_called_in, None)),
            (_SINGLE, partial(_called_in, torch.float32)),
            (_RESULT_SINGLE, _result_single),
            (_WIDEST, _widest),
        ):
            for operation in filter(None, map(_operation, names.split())):
                library.impl(operation, partial(_outside, partial(rule, operation)), _KEY)  # type: ignore[no-untyped-call]
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _cache.clear()
        clear()

    # As torch does, keep casts of weights until the outermost autocast ends.
    torch.clear_autocast_cache = clear_both


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _outside(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))):
        return rule(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(each, dtype) for each in value])
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not (is_weight and dtype in _LOW and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if id(value) not in _cache:
        _cache[id(value)] = (value, value.to(dtype))
    return _cache[id(value)][1]


def _called_in(dtype: torch.dtype | None, operation: Any, *args: Any, **kwargs: Any) -> Any:
    kind = dtype or torch.get_autocast_dtype("cuda")
    return operation(*_cast(args, kind), **{name: _cast(each, kind) for name, each in kwargs.items()})


def _result_single(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(args[0], torch.Tensor) and args[0].dtype in _LOW and kwargs.get("dtype") is None:
        names = [argument.name for argument in operation._schema.arguments]
        given = args[: names.index("dtype")] if "dtype" in names else args
        if operation in _SOFTMAX and half_to_float(args[0], torch.float32):
            return _SOFTMAX[operation](args[0], args[1], True)
        return operation(*given, **{**kwargs, "dtype": torch.float32})
    return operation(*args, **kwargs)


def _widest(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if any(tensor.dtype == torch.float32 for tensor in tensors_in(args)):
        return _called_in(torch.float32, operation, *args, **kwargs)
    return operation(*args, **kwargs)

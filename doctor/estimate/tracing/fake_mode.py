"""A mode in which the user's code runs on fake tensors of a GPU that need not exist.

torch's private names, which change between releases, are used only here and in
:mod:`doctor.estimate.tracing.storage_recorder`.

Fake tensors of a GPU have its dispatch keys, so that autocast and autograd dispatch as on a GPU. But C++ code that
reads such a tensor's device then asks for the device's streams, which fails without a GPU or in a build without CUDA.
So C++ sees ``meta``, Python the GPU, and tensors that C++ creates on ``meta`` are mapped back to the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Module, Parameter

from doctor.estimate.tracing.fake_ops import FakeOps
from doctor.estimate.tracing.storage_recorder import StorageRecorder

GPU = torch.device("cuda", 0)
TensorT = TypeVar("TensorT", bound=torch.Tensor)
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry`` (c10/core/impl/DeviceGuardImplInterface.h), an exported array of
pointers."""
_CUDA_SLOT = 1
"""``c10::DeviceType::CUDA``."""
_kept: list[object] = []

_ANSWERS: dict[str, object] = {
    "is_available": True,
    "device_count": 8,
    "current_device": 0,
    "is_bf16_supported": True,
    "get_device_capability": (9, 0),
    "get_device_name": "a GPU without data",
    **dict.fromkeys(("max_memory_allocated", "memory_allocated", "memory_reserved"), 0),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all"), None),
    **dict.fromkeys(("reset_peak_memory_stats", "_lazy_init"), None),
}
"""Return values of ``torch.cuda``: a Trainer for eight GPUs can be constructed on a laptop without one."""


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Maps the ``meta`` device, on which C++ sees tensors of the GPU, to the GPU."""

    avoid_device_init = True  # whatever torch.cuda says

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = (kwargs or {}).get("device")
        if asked is not None:
            if torch.device(asked).type == "meta":
                kwargs = {**kwargs, "device": GPU}
            if func is torch.ops.aten._to_copy.default and _is_there(args[0], kwargs):
                func, args, kwargs = torch.ops.aten.alias.default, args[:1], {}
        return super().dispatch(func, types, args, kwargs or {})


def _is_there(tensor: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a copy to the GPU is of a tensor that is on it already, which C++ does not see."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.fake_device.type == GPU.type == torch.device(kwargs["device"]).type
        and kwargs.get("dtype") in (None, tensor.dtype)
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )


class FakeDeviceMode:
    """A fake-tensor mode on a GPU that need not exist. ``note``: why ``device`` is the CPU, if torch can't do that."""

    def __init__(self) -> None:
        # Code that builds a model may use real tensors, too: constants of Python, arrays.
        self.mode = _Mode(allow_non_fake_inputs=True)
        self.device, self.note = GPU, ""
        _place_guard()
        try:
            with self.active(), StorageRecorder(self.device, FakeOps()):
                _try_out(self.device)
        except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
            self.device = torch.device("cpu")
            line = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            self.note = f"this torch {torch.__version__} needs a GPU for fake GPU tensors ({line}): traced as on a CPU"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Create all tensors as fake ones, and patch what needs a GPU."""
        from torch.cuda.amp import common

        patches: tuple[tuple[Any, str, object], ...] = (
            (torch.Tensor, "_make_subclass", staticmethod(_shown_as_meta(torch.Tensor._make_subclass))),
            (torch.Tensor, "__deepcopy__", _copying(torch.Tensor.__deepcopy__)),
            (Module, "_apply", _apply_anew),
            # autocast disables itself without a GPU
            (common, "amp_definitely_not_available", lambda: False),
            *((torch.cuda, name, lambda *_, answer=answer, **__: answer) for name, answer in _ANSWERS.items()),
        )
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(_patched(*patch))
            stack.enter_context(self.mode)
            yield

    def on_device(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of the same shape and strides with its own storage on the device."""
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.layout != torch.strided or tensor.is_quantized:
            return torch.empty(tensor.shape, dtype=kind, device=self.device)
        strides = torch.empty_like(tensor, device="meta").stride() if 0 in tensor.stride() else tensor.stride()
        return torch.empty_strided(tensor.shape, strides, dtype=kind, device=self.device)


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is None else setattr(owner, name, before)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data."""
    return isinstance(tensor, FakeTensor)


def _shown_as_meta(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_subclass(cls: Any, data: torch.Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:
        keys = kwargs.get("device_for_backend_keys")
        if cls is FakeTensor and keys is not None and torch.device(keys).type == GPU.type:
            kwargs["dispatch_device"] = False
        return make(cls, data, requires_grad, **kwargs)

    return make_subclass


def _copying(copy: Callable[[torch.Tensor, dict[int, Any]], Any]) -> Callable[[torch.Tensor, dict[int, Any]], Any]:
    """``Tensor.__deepcopy__`` that clones a fake tensor: torch copies the storage, which is on another device for C++.

    Lightning's ``save_hyperparameters`` and averages of weights copy modules, and so their buffers."""

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not is_fake(self) or not self.is_leaf:
            return copy(self, memo)
        if id(self) not in memo:
            new = self.detach().clone()
            is_parameter = isinstance(self, Parameter)
            new = Parameter(new, self.requires_grad) if is_parameter else new.requires_grad_(self.requires_grad)
            memo[id(self)] = with_attributes(new, self)
        return memo[id(self)]

    return deepcopy


def _place_guard() -> None:
    """Let torch install its no-op device guard for CUDA, which ``.cuda()`` needs.

    ``_ensureCUDADeviceGuardSet`` installs it in builds with CUDA without a device, replacing a guard that counts none.
    A build without CUDA has no guard; it gets one whose methods all return 0, to be replaced.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    if ensure is None or not library.exists():
        return
    try:
        slots = (ctypes.c_void_p * (_CUDA_SLOT + 1)).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
    except (OSError, ValueError):
        return
    if not slots[_CUDA_SLOT]:
        none = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
        methods = (ctypes.c_void_p * 64)(*[ctypes.cast(none, ctypes.c_void_p).value] * 64)
        guard = ctypes.c_void_p(ctypes.addressof(methods))
        _kept.extend((none, methods, guard))
        slots[_CUDA_SLOT] = ctypes.addressof(guard)
    ensure()


def _try_out(device: torch.device) -> None:
    """Run a step on the device, with the errors that torch raises if that is not possible."""
    weight = torch.empty(4, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        (weight @ torch.empty(4, 4).to(device)).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


_moved: dict[int, tuple[object, Any]] = {}
"""While a module is moved: the new parameter by the id of the old one, because modules may share parameters."""
_depth = 0


def _apply_anew(self: Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Module:
    """``Module._apply`` that creates new parameters: torch swaps fake ones in place, which fails while weak references
    to them exist, as in the fake-tensor mode."""
    global _depth
    _depth += 1
    try:
        for module in self.modules() if recurse else (self,):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _once(parameter, fn)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
            refresh(module)
    finally:
        _depth -= 1
        if not _depth:
            _moved.clear()
    return self


def _once(parameter: Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> Parameter:
    _, new = _moved.get(id(parameter), (None, None))
    if new is None:
        with torch.no_grad():
            new = with_attributes(Parameter(fn(parameter), parameter.requires_grad), parameter)
        _moved[id(parameter)] = (parameter, new)
    return new  # type: ignore[no-any-return]


def with_attributes(new: TensorT, parameter: torch.Tensor) -> TensorT:
    """Return ``new`` with the attributes that code of a model has set on ``parameter``."""
    for name, value in vars(parameter).items():
        if not name.startswith("_") and name not in vars(new):
            setattr(new, name, value)
    return new


def refresh(module: Module) -> None:
    """Update the list of parameters that recurrent layers keep."""
    names = getattr(module, "_flat_weights_names", None)
    if names is not None and isinstance(module, torch.nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in names]

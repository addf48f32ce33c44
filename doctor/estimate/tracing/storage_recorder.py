"""Records in a ledger when operations of a step allocate and free storages on the device.

``torch.distributed._tools.MemTracker`` counts the same storages in the same way; but it walks its whole state after
every operation and does not keep the order of events, which the allocator's simulation needs. Tests compare the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from doctor.estimate.data_model import StepPhase
from doctor.estimate.tracing.fake_ops import FakeOps
from doctor.estimate.tracing.kernel_temporaries import temporaries_of
from doctor.estimate.tracing.ledger import AllocationLedger

aten = torch.ops.aten

_PRODUCTS = {getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")}
"""Operations of cuBLAS, whose workspace comes from torch's allocator."""
_FILL_OPS = "normal_ uniform_ fill_ zero_ random_ exponential_ geometric_ log_normal_ cauchy_ erfinv_ clamp_ mul_ add_"
_FILLS = {getattr(aten, name) for name in _FILL_OPS.split()}
"""Operations that only change values, skipped while a model is built, because fake tensors have none."""


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records inside a fake-tensor mode. ``device``: whose storages count. ``workspace``: bytes of cuBLAS's workspace,
    which the threads of the forward and of the backward pass each allocate once. ``capability``: of the GPU."""

    def __init__(self, device: torch.device, substitutes: FakeOps, workspace: int = 0, capability: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.ledger = AllocationLedger()
        self.is_building = False
        self.convolves = False
        """Whether there was a convolution, for which cuDNN may allocate a workspace of unknown size."""
        self._substitutes = substitutes
        self._workspace, self._capability = workspace, capability
        self._has_workspace: set[StepPhase] = set()
        self._keys: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and record its results."""
        kwargs = kwargs or {}
        if (
            self.is_building
            and func.overloadpacket in _FILLS
            and isinstance(args[0], FakeTensor)
            and args[0].constant is None
        ):
            return args[0]
        moment = self.ledger.moment
        if func in _PRODUCTS and moment in ("forward", "backward") and moment not in self._has_workspace:
            self._has_workspace.add(moment)
            self.ledger.allocate(self._workspace, "temporary")
        self.convolves = self.convolves or func is aten.convolution.default
        out = self._substitutes.run(func, args, kwargs)
        self._note(out)
        if func is aten.convolution_backward.default:
            self._pass_a_copy(out[1])
        if self.device.type != "cpu":
            self._pass(temporaries_of(func, args, self._capability))
        return out

    def _pass(self, sizes: Iterable[int]) -> None:
        """Record buffers that the operation allocates after its results, and frees when it ends."""
        for key in [self.ledger.allocate(size, "temporary") for size in sizes]:
            self.ledger.free(key)

    def _pass_a_copy(self, gradient: torch.Tensor | None) -> None:
        """Record the copy that a convolution's backward pass makes of the weight's gradient, to change its layout
        (oneDNN; cuDNN has a workspace of about that size)."""
        if gradient is not None and gradient.untyped_storage()._cdata in self._keys:
            self.ledger.free(self.ledger.allocate(gradient.untyped_storage().nbytes(), "temporary"))

    def _note(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self.key_of(out)
        elif isinstance(out, (tuple, list)):
            for each in out:
                self._note(each)

    def key_of(self, tensor: torch.Tensor, kind: str | None = None) -> int | None:
        """Return the number of the tensor's storage, recorded if new; ``None`` for one on another device."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != self.device.type:
            return None
        storage = tensor.untyped_storage()
        name = storage._cdata
        key = self._keys.get(name)
        if key is None:
            default = "activations" if self.ledger.moment == "forward" else "temporary"
            key = self.ledger.allocate(storage.nbytes(), kind or default)
            self._keys[name] = key
            self._ends[name] = weakref.ref(storage, self._end_of(name, key))
        return key

    def _end_of(self, name: int, key: int) -> Callable[[object], None]:
        def end(_: object) -> None:
            self._keys.pop(name, None)
            self._ends.pop(name, None)
            self.ledger.free(key)

        return end

    def mark(self, tensors: Iterable[object], kind: str) -> None:
        """Set the kind of the storages of these tensors; other objects are skipped."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                key = self.key_of(tensor, kind)
                if key is not None:
                    self.ledger.kinds[key] = kind

    def move(self, tensors: Iterable[torch.Tensor], stream: int) -> None:
        """Set the stream on which the storages of these tensors are allocated."""
        for tensor in tensors:
            key = self.key_of(tensor)
            if key is not None and stream:
                self.ledger.streams[key] = stream

    def forget(self, tensor: torch.Tensor) -> None:
        """Count no memory for the tensor, because something else is counted instead."""
        key = self.key_of(tensor)
        if key is not None:
            self.ledger.sizes[key] = 0

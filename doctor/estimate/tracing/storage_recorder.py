"""Notes every storage on the device as operations make it, and its end: the ledger of a step on tensors without data.

``torch.distributed._tools.MemTracker`` counts the same storages in the same way; it walks its whole state after every
operation and keeps no order of events, which the simulation of the allocator needs. Tests hold both against each other.
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
from doctor.estimate.tracing.ledger import AllocationLedger

aten = torch.ops.aten

_KIND_BY_MOMENT = {"forward": "activations"}
_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_mm.default,
}
"""Operations that cuBLAS does, with a workspace from torch's allocator."""
_FILLS = {
    aten.normal_,
    aten.uniform_,
    aten.fill_,
    aten.zero_,
    aten.random_,
    aten.exponential_,
    aten.geometric_,
    aten.log_normal_,
    aten.cauchy_,
    aten.erfinv_,
    aten.clamp_,
    aten.mul_,
    aten.add_,
}
"""They change values alone, which these tensors lack; passed over while a model is made, where they are most of the
work."""


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active inside a fake-tensor mode. ``device``: whose storages count. ``workspace``: bytes that cuBLAS takes once
    for the thread of the forward pass and once for that of the backward pass."""

    def __init__(self, device: torch.device, substitutes: FakeOps, workspace: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.ledger = AllocationLedger()
        self.is_building = False
        self.convolves = False
        """Whether there was a convolution, for which cuDNN may take a workspace that nobody knows before."""
        self._substitutes = substitutes
        self._workspace = workspace
        self._has_workspace: set[StepPhase] = set()
        self._keys: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note what it made."""
        kwargs = kwargs or {}
        if (
            self.is_building
            and func.overloadpacket in _FILLS
            and isinstance(args[0], FakeTensor)
            and args[0].constant is None
        ):
            return args[0]
        if func in _PRODUCTS:
            self._take_workspace()
        self.convolves = self.convolves or func is aten.convolution.default
        out = self._substitutes.run(func, args, kwargs)
        self._note(out)
        if func is aten.convolution_backward.default:
            self._pass_a_copy(out[1])
        return out

    def _pass_a_copy(self, gradient: torch.Tensor | None) -> None:
        """A convolution's backward pass makes the weight's gradient in a layout of its own and copies it (oneDNN does;
        cuDNN takes a workspace of about that size): both are there for a moment."""
        if gradient is not None and gradient.untyped_storage()._cdata in self._keys:
            self.ledger.free(self.ledger.allocate(gradient.untyped_storage().nbytes(), "temporary"))

    def _take_workspace(self) -> None:
        moment = self.ledger.moment
        if self._workspace and moment in ("forward", "backward") and moment not in self._has_workspace:
            self._has_workspace.add(moment)
            self.ledger.allocate(self._workspace, "temporary")

    def _note(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self.key_of(out)
        elif isinstance(out, (tuple, list)):
            for each in out:
                self._note(each)

    def key_of(self, tensor: torch.Tensor, kind: str | None = None) -> int | None:
        """The number of the tensor's storage, noted now if it is new; ``None`` for one on another device."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != self.device.type:
            return None
        storage = tensor.untyped_storage()
        name = storage._cdata
        key = self._keys.get(name)
        if key is None:
            key = self.ledger.allocate(storage.nbytes(), kind or _KIND_BY_MOMENT.get(self.ledger.moment, "temporary"))
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
        """The storages of these tensors are of this kind; what is no tensor is passed over."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                key = self.key_of(tensor, kind)
                if key is not None:
                    self.ledger.mark(key, kind)

    def forget(self, tensor: torch.Tensor) -> None:
        """It takes no memory: something else is counted in its place."""
        key = self.key_of(tensor)
        if key is not None:
            self.ledger.sizes[key] = 0

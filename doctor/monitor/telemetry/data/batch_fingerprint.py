"""Fingerprints of the first batches of an epoch: values copied in place and hashed later.

A batch may be on a device that is busy for another second. So the copy stays there (an enqueued copy of some
kilobytes), with an event behind it; the thread that requests facts reads it once the event has passed, on a stream of
its own, so that neither waits for the other's kernels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

MOST_PARTS = 4
"""Tensors, arrays or strings of a batch that are sampled."""
MOST_VALUES = 256
"""Values of each that are copied, spread evenly over it."""
MOST_NODES = 64
MOST_DEPTH = 4
_NUMBERS = (int, float, bool)
"""A batch that is a single number counts steps and holds no data."""
_PLAIN = (str, bytes, *_NUMBERS)


class BatchFingerprint:
    """A few values of a batch, copied on the step path."""

    __slots__ = ("_digest", "_event", "_parts")

    def __init__(self, batch: object) -> None:
        self._digest: str | None = None
        self._event: Any = None
        self._parts: list[tuple[str, Any]] = []
        for leaf in _leaves(batch) if type(batch) not in _NUMBERS else ():
            if not is_tensor(leaf):
                self._parts.append((type(leaf).__name__, leaf))
            elif leaf.is_cpu or (leaf.is_cuda and not sys.modules["torch"].cuda.is_current_stream_capturing()):
                self._parts.append((f"{leaf.dtype}{tuple(leaf.shape)}", _spread(leaf)))
                self._event = _event_behind(leaf, self._event)
            if len(self._parts) == MOST_PARTS:
                break

    def digest(self) -> str | None:
        """Return a hash of each part, joined by ``-``. Not for the step path.

        ``None`` if nothing could be sampled, or while a device has not reached the copy.
        """
        if self._parts and (self._event is None or self._event.query()):
            self._digest = "-".join(_hash(head, values) for head, values in self._parts)
            self._parts = []
        return self._digest


def _event_behind(tensor: Any, event: Any) -> Any:
    """Return an event that passes once all work enqueued for the tensor's device is done."""
    if not tensor.is_cuda:
        return event
    cuda = sys.modules["torch"].cuda
    event = cuda.Event() if event is None else event
    event.record(cuda.current_stream(tensor.device))
    return event


def is_tensor(thing: Any) -> bool:
    """Return whether it is a dense torch tensor, and not of a subclass (such as DTensor)."""
    torch = sys.modules.get("torch")
    return torch is not None and type(thing) is torch.Tensor and thing.layout is torch.strided


def _leaves(batch: object) -> Iterator[Any]:
    """Yield tensors and lists of plain values in a batch, in a fixed order."""
    stack: list[tuple[Any, int]] = [(batch, 0)]
    for _ in range(MOST_NODES):
        if not stack:
            return
        node, depth = stack.pop()
        if is_tensor(node) or type(node) in _PLAIN:
            yield _shortened(node)
            continue
        children = _children(node)
        if children and all(type(child) in _PLAIN for child in children):
            yield [_shortened(child) for child in children]
        elif depth < MOST_DEPTH:
            stack.extend((child, depth + 1) for child in reversed(children))


def _shortened(value: Any) -> Any:
    return value[:MOST_VALUES] if type(value) in (str, bytes) else value


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return [node[key] for key in list(node)[:MOST_NODES]]
    if isinstance(node, (list, tuple)):
        return list(node[:MOST_NODES])
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name, None) for field in dataclasses.fields(node)[:MOST_NODES]]
    if type(node).__module__ != "numpy" or getattr(node, "dtype", None) is None or node.dtype.kind not in "biufSU":
        return []
    return list(node.flat[:: _step(node.size)][:MOST_VALUES].tolist()) if getattr(node, "size", 0) else []


def _spread(tensor: Any) -> Any:
    """Return values spread over a tensor: a copy enqueued on its device.

    Tensors with gaps (slices, expanded ones) are sampled at their beginning, because copying them whole may take as
    much memory again.
    """
    tensor = tensor.detach()
    while tensor.dim() > 1 and not _is_dense(tensor):
        tensor = tensor.select(0, 0)
    step = _step(tensor.numel())
    if not _is_dense(tensor):
        return tensor[::step][:MOST_VALUES].clone()
    count = min(MOST_VALUES, -(-tensor.numel() // step))
    return tensor.as_strided((count,), (step,), tensor.storage_offset()).clone()


def _is_dense(tensor: Any) -> bool:
    """Return whether the values fill a contiguous range of memory, in any order (channels last)."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel() == 0 or reach + 1 == tensor.numel())


def _step(size: int) -> int:
    """Return an odd step, to leave a tensor's column: widths are mostly powers of two."""
    return max(1, -(-size // MOST_VALUES)) | 1


def _hash(head: str, values: Any) -> str:
    if is_tensor(values) and values.is_cuda:
        cuda = sys.modules["torch"].cuda
        with cuda.stream(cuda.Stream(values.device)):
            values = values.tolist()
    elif is_tensor(values):
        values = values.tolist()
    hasher = hashlib.blake2b(head.encode("utf-8", "replace"), digest_size=4)
    hasher.update(repr(values).encode("utf-8", "replace"))
    return hasher.hexdigest()

"""Copies values from a CUDA device to the host without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from doctor.core.clock import monotonic, sleep
from doctor.monitor.telemetry.cuda_events import CudaEvent, EventFactory

if TYPE_CHECKING:
    import torch

SLOTS, WIDTH = 4, 64
"""Transfers in progress at once, and values in each."""
PAUSE = 0.005
"""Seconds between two polls of a device that is waited for."""

Reader = Callable[[list[Any]], None]


class Readback:
    """Pages of pinned memory that a device writes to. For the training thread only.

    They are allocated once, because pinning memory can block the device. ``pinned=False`` for tests on a CPU.
    """

    def __init__(self, events: EventFactory, *, pinned: bool = True) -> None:
        import torch

        self._events = events
        pages = torch.zeros((SLOTS, WIDTH), dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._free = [(page, events.make()) for page in pages]
        self._under_way: deque[tuple[torch.Tensor, int, torch.dtype, CudaEvent, Reader]] = deque()

    def is_open(self) -> bool:
        """Return whether a transfer can start: a page is free and no CUDA graph is being captured."""
        return bool(self._free) and not self._events.capturing()

    def send(self, values: torch.Tensor, reader: Reader) -> None:
        """Have ``reader`` called once ``values`` are on the host; only while :meth:`is_open`.

        ``values``: one dimension, at most :data:`WIDTH` values of eight bytes.
        """
        page, event = self._free.pop()
        page[: len(values)].view(values.dtype).copy_(values, non_blocking=True)
        self._events.record(event)
        self._under_way.append((page, len(values), values.dtype, event, reader))

    def collect(self) -> None:
        """Deliver what has arrived, oldest first."""
        while self._under_way and not self._events.capturing() and self._under_way[0][3].query():
            page, length, kind, event, reader = self._under_way.popleft()
            self._free.append((page, event))
            reader(page[:length].view(kind).tolist())

    def drain(self, seconds: float) -> None:
        """Deliver what arrives within ``seconds``; a device that never answers costs all of them.

        Not for the step path.
        """
        until = monotonic() + seconds
        self.collect()
        while self._under_way and monotonic() < until:
            sleep(PAUSE)
            self.collect()

"""Events of a CUDA device: marks in its work that tell when it has come so far, without anybody waiting for it.

All of it belongs to the training thread. A query from another thread ends a capture of a CUDA graph that is under way
there (``cudaStreamCaptureModeGlobal``), and so does one of the capturing thread: nothing is recorded or asked then.
"""

from __future__ import annotations

from typing import Any, Protocol


class CudaEvent(Protocol):
    """What is used of :class:`torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to ``end``; both were passed."""


class EventFactory(Protocol):
    """Where events come from."""

    def make(self) -> CudaEvent:
        """A new event, not recorded yet."""

    def record(self, event: CudaEvent) -> None:
        """Put it behind all work that the device was given so far."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, so that nothing may be recorded or asked."""


class CudaEventFactory:
    """Those of ``device``. Loads torch; makes no context, for an event does nothing before it is recorded."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device

    def make(self) -> CudaEvent:
        """A new event that can tell the time."""
        event: CudaEvent = self._cuda.Event(enable_timing=True)
        return event

    def record(self, event: Any) -> None:
        """On the stream that this thread uses on the device now. The stream is named: by default an event is recorded
        on the current device, which may be another one and would get a context by it."""
        event.record(self._cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Whether this thread captures a CUDA graph."""
        return bool(self._cuda.is_current_stream_capturing())


def event_factory(device: Any) -> EventFactory | None:
    """The events of a device, ``None`` where it has none that can be used so: a CPU, another accelerator."""
    return CudaEventFactory(device) if device is not None and device.type == "cuda" else None

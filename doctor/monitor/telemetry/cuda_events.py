"""CUDA events: marks in a device's work that report progress without waiting for it.

For the training thread only. A query from another thread ends the capture of a CUDA graph in this one
(``cudaStreamCaptureModeGlobal``), as does one from the capturing thread: nothing is recorded or queried during a
capture.
"""

from __future__ import annotations

from typing import Any, Protocol


class CudaEvent(Protocol):
    """The part of :class:`torch.cuda.Event` that is used."""

    def query(self) -> bool:
        """Return whether the device has passed the event."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to ``end``; both must have been passed."""


class EventFactory:
    """Creates and records events of a CUDA ``device``; an unrecorded event creates no context."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device

    def make(self) -> CudaEvent:
        """Return a new event with timing, not recorded yet."""
        event: CudaEvent = self._cuda.Event(enable_timing=True)
        return event

    def record(self, event: Any) -> None:
        """Record the event behind all work enqueued on this thread's current stream of the device.

        The stream is named because the default is the current device, which may be another one and would get a context.
        """
        event.record(self._cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Return whether this thread captures a CUDA graph: then nothing may be recorded or queried."""
        return bool(self._cuda.is_current_stream_capturing())


def event_factory(device: Any) -> EventFactory | None:
    """Return the events of a CUDA device, ``None`` for any other device."""
    return EventFactory(device) if device is not None and device.type == "cuda" else None

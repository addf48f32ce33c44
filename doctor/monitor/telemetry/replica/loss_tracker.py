"""The losses of a run: which one was the first that is no number or infinite."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from doctor.core.facts import NonFinite
from doctor.monitor.telemetry.replica.readback import WIDTH, Readback

if TYPE_CHECKING:
    import torch

TOGETHER = 8
"""Losses that are looked at in one go."""
LARGE = 4096
"""Bytes of a device's memory that a loss may keep alive until then; one that is a view of more is copied."""
LAST = 0.2
"""Seconds that the last ones may take to arrive: their batches are done, or never will be."""


class LossTracker:
    """Looks at the loss of every batch: at :data:`TOGETHER` of them at a time, at the last few by :meth:`finish`, and
    at once at one that holds on to a graph or a larger tensor. Those on a CUDA device are left there and fetched; none
    is without a ``readback``. Only single numbers are looked at."""

    def __init__(self) -> None:
        self.seen = 0
        self.first: NonFinite | None = None
        self.readback: Readback | None = None
        self._kept: list[tuple[int, torch.Tensor]] = []
        self._reused = False

    def see(self, batch: int, loss: Any) -> bool:
        """Note a loss: a number, or a tensor with one. Returns whether :meth:`fetch` has something to do, or it is
        known not to be finite. (step path)"""
        if getattr(loss, "is_cpu", False):
            if loss.requires_grad or loss._is_view():
                return loss.numel() == 1 and self._judge(batch, loss.item())
            self._kept.append((batch, loss))
            return len(self._kept) >= TOGETHER
        if isinstance(loss, (int, float)):
            return self._judge(batch, float(loss))
        if self.readback is None or not getattr(loss, "is_cuda", False):
            return False
        if loss.numel() == 1:
            self._keep(batch, loss)
        return True  # something may have arrived

    def fetch(self) -> None:
        """Look at what was kept, or send for it, once there is enough of it; what can't be sent for long is given
        up."""
        if len(self._kept) < TOGETHER:
            return
        if self.readback is None:
            self._look()
        elif self.readback.is_open():
            self._send(self.readback)
        else:
            del self._kept[: -(WIDTH - 1)]

    def _look(self) -> None:
        for batch, loss in self._kept:
            if loss.numel() == 1:
                self._judge(batch, loss.item())
        self._kept.clear()

    def finish(self, seconds: float = LAST) -> None:
        """The run is over, or an exception ends it: fetch what was kept, and take what arrives within ``seconds``. For
        the training thread. Nothing here waits for the device, which may stand still or have failed: it is asked."""
        if self.readback is None:
            self._look()
            return
        with contextlib.suppress(RuntimeError):  # torch's, of a device that has failed
            self.readback.collect()
            if self._kept and self.readback.is_open():
                self._send(self.readback)
            self.readback.drain(seconds)

    def _send(self, readback: Readback) -> None:
        batches = [batch for batch, _ in self._kept]
        values = stacked([loss for _, loss in self._kept])
        readback.send(values, lambda arrived: self._judge_all(batches, arrived))
        self._kept.clear()

    def _keep(self, batch: int, loss: torch.Tensor) -> None:
        """A captured CUDA graph writes every loss to one place: an address that comes again while it is kept."""
        kept = loss.detach()
        self._reused |= bool(self._kept) and self._kept[-1][1].data_ptr() == kept.data_ptr()
        if self._reused or kept.untyped_storage().nbytes() > LARGE:
            kept = kept.clone()
        self._kept.append((batch, kept))

    def _judge_all(self, batches: list[int], values: list[float]) -> None:
        for batch, value in zip(batches, values, strict=True):
            self._judge(batch, value)

    def _judge(self, batch: int, value: float) -> bool:
        self.seen += 1
        if math.isfinite(value):
            return False
        if self.first is None or batch < self.first.step:
            self.first = NonFinite(batch, "loss", value=str(value))
        return True


def stacked(losses: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one number each, of any type and shape, as one row of float64 on their device."""
    import torch

    with torch.no_grad():
        return torch.stack([loss.reshape(()) for loss in losses]).to(torch.float64)

"""Finds the first loss of a run that is NaN or infinite."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from doctor.core.facts import NonFinite
from doctor.monitor.telemetry.replica.readback import WIDTH, Readback

if TYPE_CHECKING:
    import torch

TOGETHER = 8
"""Losses that are checked together."""
LARGE = 4096
"""Bytes of device memory that a loss may keep alive until then; a view of more is copied."""
LAST = 0.2
"""Seconds for the last losses to arrive: their batches are done, or never will be."""


class LossTracker:
    """Checks the loss of every batch, :data:`TOGETHER` at a time, the rest in :meth:`finish`.

    A loss that keeps a graph or a larger tensor alive is checked at once. CUDA losses stay on the device and are
    fetched through ``readback``; without one, they are not checked. Only scalar losses are checked. ``in_a_row``: how
    many of the newest were not finite.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.in_a_row = 0
        self._newest_finite = -1
        self.first: NonFinite | None = None
        self.readback: Readback | None = None
        self._kept: list[tuple[int, torch.Tensor]] = []
        self._reused = False

    def record(self, batch: int, loss: Any) -> bool:
        """Record a loss: a number, or a tensor with one. (step path)

        Returns whether :meth:`fetch` has something to do, or the loss is known not to be finite.
        """
        if getattr(loss, "is_cpu", False):
            if loss.requires_grad or loss._is_view():
                return loss.numel() == 1 and self._check(batch, loss.item())
            self._kept.append((batch, loss))
            return len(self._kept) >= TOGETHER
        if isinstance(loss, (int, float)):
            return self._check(batch, float(loss))
        if self.readback is None or not getattr(loss, "is_cuda", False):
            return False
        if loss.numel() == 1:
            self._keep(batch, loss)
        return True  # something may have arrived

    def fetch(self) -> None:
        """Check or send the pending losses once there are enough; drop those that cannot be sent."""
        if len(self._kept) < TOGETHER:
            return
        if self.readback is None:
            self._check_kept()
        elif self.readback.is_open():
            self._send(self.readback)
        else:
            del self._kept[: -(WIDTH - 1)]

    def _check_kept(self) -> None:
        values = [(batch, loss.item()) for batch, loss in self._kept if loss.numel() == 1]
        self._kept.clear()
        if values and math.isfinite(sum([value for _, value in values])):  # then each of them is
            self.seen += len(values) - 1
            values = values[-1:]
        for batch, value in values:
            self._check(batch, value)

    def finish(self, seconds: float = LAST) -> None:
        """Check the pending losses at the end of the run, in the training thread; wait ``seconds``.

        Never blocks on the device, which may be stalled or failed: it is only polled.
        """
        if self.readback is None:
            self._check_kept()
            return
        with contextlib.suppress(RuntimeError):  # raised by torch for a failed device
            self.readback.collect()
            if self._kept and self.readback.is_open():
                self._send(self.readback)
            self.readback.drain(seconds)

    def _send(self, readback: Readback) -> None:
        import torch

        batches = [batch for batch, _ in self._kept]
        with torch.no_grad():
            values = torch.stack([loss.reshape(()) for _, loss in self._kept]).to(torch.float64)

        def check(arrived: list[float]) -> None:
            for batch, value in zip(batches, arrived, strict=True):
                self._check(batch, value)

        readback.send(values, check)
        self._kept.clear()

    def _keep(self, batch: int, loss: torch.Tensor) -> None:
        """Keep a loss, cloned if its address recurs: a CUDA graph writes every loss to one place."""
        kept = loss.detach()
        self._reused |= bool(self._kept) and self._kept[-1][1].data_ptr() == kept.data_ptr()
        if self._reused or kept.untyped_storage().nbytes() > LARGE:
            kept = kept.clone()
        self._kept.append((batch, kept))

    def _check(self, batch: int, value: float) -> bool:
        self.seen += 1
        if math.isfinite(value):
            if batch > self._newest_finite:
                self._newest_finite, self.in_a_row = batch, 0
            return False
        self.in_a_row += batch > self._newest_finite
        if self.first is None or batch < self.first.step:
            self.first = NonFinite(batch, "loss", value=str(value))
        return True

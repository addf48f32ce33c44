"""A memory snapshot of torch's allocator: what holds the memory of a rank's devices."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from doctor.core.facts.telemetry import Frame, WatchedSection


class Holder(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Memory that one line of user code allocated: ``size`` bytes in ``blocks`` blocks. ``frame`` is the innermost
    frame of the user, ``None`` if no stack was recorded or it has no user frame. ``part``: the part of a step that
    most of it belongs to (:data:`PARTS`), by the stack. ``spread``: the share of ten equal intervals of the snapshot's
    trace in which it was allocated: 1.0 if it grew throughout, 0.1 if it was allocated at once."""

    size: int
    blocks: int
    frame: Frame | None = None
    part: str | None = None
    spread: float | None = None


PARTS = ("optimizer", "backward", "communication", "load", "forward", "build")
"""``load``: a checkpoint; ``build``: modules and their parameters."""


class RefusedAllocation(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A failed allocation: bytes requested, and bytes that the driver reported as free; ``at``: as in an event."""

    size: int
    device: int
    device_free: int | None = None
    frame: Frame | None = None
    at: float | None = None


class SnapshotDevice(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A device as the allocator of one process sees it, in bytes.

    ``reserved`` from the driver, ``allocated`` to tensors, ``active``: also memory that a stream has yet to release.
    ``split``: free, but in segments that also hold something else, so that it can't be returned to the driver.
    """

    index: int
    reserved: int = 0
    allocated: int = 0
    active: int = 0
    split: int = 0
    segments: int = 0

    @property
    def unallocated(self) -> int:
        """Bytes that are reserved but free for tensors."""
        return max(0, self.reserved - self.active)


class MemorySnapshotFacts(WatchedSection, frozen=True, kw_only=True):
    """A snapshot of torch's allocator (``torch.cuda.memory._dump_snapshot``).

    ``holders``: of memory in use at the end, largest first. ``growth``: of memory allocated during the trace and not
    freed. ``parts``: bytes in use by part of a step. ``refused``: failed allocations, oldest first. ``traced``: number
    of trace entries; ``seconds``: duration of the trace. ``settings``: of the allocator, as they were configured.
    """

    key: ClassVar[str] = "memory-snapshot"

    path: str = ""
    devices: tuple[SnapshotDevice, ...] = ()
    holders: tuple[Holder, ...] = ()
    growth: tuple[Holder, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    refused: tuple[RefusedAllocation, ...] = ()
    traced: int = 0
    seconds: float | None = None
    settings: str = ""

    @property
    def reserved(self) -> int:
        """Bytes that are reserved on all devices."""
        return sum(device.reserved for device in self.devices)

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold on all devices."""
        return sum(device.allocated for device in self.devices)

"""What a memory snapshot of torch's allocator shows: who holds the memory of a rank's devices."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from doctor.core.facts.telemetry import Frame, WatchedSection


class Holder(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Memory that was allocated at one line of the user: ``size`` bytes in ``blocks`` pieces. ``frame`` is the user's
    innermost one, ``None`` where no stack was recorded or nobody of the user is on it. ``part`` of a step that the most
    of it is for (:data:`PARTS`), as the stack tells. ``spread``: of what was allocated while the snapshot's trace ran,
    in which share of ten equal stretches of it: 1.0 where it grew all the time, 0.1 where it came at once."""

    size: int
    blocks: int
    frame: Frame | None = None
    part: str | None = None
    spread: float | None = None


PARTS = ("optimizer", "backward", "communication", "load", "forward", "build")
"""``load``: a checkpoint; ``build``: modules and their parameters."""


class RefusedAllocation(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An allocation that failed: bytes wanted, and bytes that the driver said were free; ``at`` as an event's."""

    size: int
    device: int
    device_free: int | None = None
    frame: Frame | None = None
    at: float | None = None


class SnapshotDevice(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A device as the allocator of one process has it, in bytes.

    ``reserved`` from the driver, ``allocated`` to tensors, ``active``: also what a stream has yet to let go of.
    ``split``: free, and in segments that hold something else, so that it can't be given back.
    """

    index: int
    reserved: int = 0
    allocated: int = 0
    active: int = 0
    split: int = 0
    segments: int = 0

    @property
    def unallocated(self) -> int:
        """Bytes that are reserved, and free for tensors."""
        return max(0, self.reserved - self.active)


class MemorySnapshotFacts(WatchedSection, frozen=True, kw_only=True):
    """A snapshot that torch wrote of its allocator (``torch.cuda.memory._dump_snapshot``).

    ``holders``: of what is in use at the end, largest first. ``growth``: of what was allocated while the trace ran and
    was not freed. ``parts``: bytes in use by part of a step. ``refused``: allocations that failed, oldest first.
    ``traced``: entries of the trace; ``seconds`` that it spans. ``settings``: of the allocator, as they were given.
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

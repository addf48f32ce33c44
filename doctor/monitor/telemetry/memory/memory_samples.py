"""Memory of a rank during training: device, process, workers and host."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from doctor.collectors.base import Machine, parse_int, read_text
from doctor.collectors.host.cgroup import CgroupReader
from doctor.core.clock import monotonic, time
from doctor.core.facts import ChildProcess, MemorySample, RunMemoryFacts
from doctor.monitor.telemetry.child_processes import child_processes, resident_bytes
from doctor.monitor.telemetry.memory.cuda_device import CudaDeviceMemory, PeakTracker

MOST = 256
"""Maximum number of samples; beyond that, neighboring samples are merged in pairs."""
UNREAD = 1024
"""Maximum number of samples that wait for a reader; later ones displace the oldest."""
REUSED = 1.0
"""Seconds for which children that were just looked at are not looked at again: their memory takes long to add up."""
LOOK_SHARE, LOOK_MOST = 1 / 8, 5.0
"""Seconds between two looks, as a share of the time since the first one and at most: reading /proc takes a millisecond,
and a sample of every half second is no better than one of every five when only :data:`MOST` are kept."""


class MemorySampler:
    """Memory samples of a run.

    :meth:`sample` is for the training thread and touches no file; :meth:`facts` is for other threads and adds to the
    newest sample what has to be read. A sample without values of its own is merged with the next one (on a CPU, all but
    those present when the facts were requested). ``peak`` is only known if torch's counter, which is never reset here,
    changed. ``workers`` counts private memory of the children; what they share with this process is in ``resident``.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._cgroup = CgroupReader(self._machine, ("memory",))
        self._device: CudaDeviceMemory | None = None
        self._name: str | None = None
        self.lower_bound: int | None = None
        """Lower bound in bytes of the device memory (:mod:`.lower_bound`)."""
        self._peaks = PeakTracker()
        self._pending: deque[MemorySample] = deque(maxlen=UNREAD)
        self._samples = MemorySamples()
        self._reading = threading.Lock()
        self._first_look: float | None = None
        self._look_due = 0.0
        self._children: tuple[ChildProcess, ...] = ()
        self._children_at = -math.inf

    def use_device(self, device: Any) -> None:
        """Sample this :class:`torch.device`, too, if it is a CUDA device; ``None`` for none."""
        self._name = None if device is None else str(device)
        self._device = CudaDeviceMemory(device) if device is not None and device.type == "cuda" else None

    def sample(self, step: int, units: int | None) -> None:
        """Sample memory after batch ``step``. ``units``: of the largest batch since the last call."""
        device = self._device
        if device is None:
            self._pending.append(MemorySample(step, time(), units=units))
            return
        now = device.allocator()
        peak = self._peaks.next(now.peak_allocated)
        self._pending.append(
            MemorySample(step, time(), allocated=now.allocated, reserved=now.reserved, peak=peak, units=units)
        )

    def look(self, now: float) -> None:
        """Complete the newest sample, if there is a new one and a look is due. May be called from any thread."""
        if self._pending and now >= self._look_due:
            if self._first_look is None:
                self._first_look = now
            self._look_due = now + min(LOOK_MOST, LOOK_SHARE * (now - self._first_look))
            self._children, self._children_at = child_processes(), now
            self._read(self._children, None)

    def facts(self) -> RunMemoryFacts:
        """Return all samples and the current state, read from /proc and the runtime with a deadline."""
        is_fresh = monotonic() - self._children_at < REUSED
        children = self._children if is_fresh else child_processes()
        device = self._device
        size = device.free_and_total() if device else None
        rest, samples = self._read(children, size)
        facts = RunMemoryFacts(
            device=self._name,
            resident=rest.resident,
            children=children,
            samples=samples,
            estimated_floor=self.lower_bound,
        )
        if device is None:
            return facts
        now, error = device.allocator(), None
        if facts.estimated_floor is not None and samples and now.peak_allocated:  # steps were measured
            error = round(facts.estimated_floor / now.peak_allocated - 1, 3)
        return msgspec.structs.replace(
            facts,
            device_id=device.identity(),
            allocator=device.backend(),
            total=size[1] if size else None,
            device_free=size[0] if size else None,
            foreign=max(0, size[1] - size[0] - (now.reserved or 0)) if size else None,
            processes=device.processes(),
            utilization=device.utilization(samples[0].at or 0.0) if samples else (),
            estimate_error=error,
            **msgspec.structs.asdict(now),
        )

    def _read(
        self, children: tuple[ChildProcess, ...], size: tuple[int, int] | None
    ) -> tuple[MemorySample, tuple[MemorySample, ...]]:
        """Return the values read now, and all samples with the newest one completed by them."""
        rest = MemorySample(
            0,
            device_used=size[1] - size[0] if size else None,
            resident=resident_bytes(self._machine.proc / "self"),
            workers=sum(child.private if child.private is not None else child.memory or 0 for child in children),
            host_available=host_available(self._machine, self._cgroup),
        )
        with self._reading:
            # The training thread may add more meanwhile.
            self._samples.add([self._pending.popleft() for _ in range(len(self._pending))])
            self._samples.complete(rest)
            return rest, self._samples.kept


class MemorySamples:
    """Samples evenly spread over the steps of a run, at most :data:`MOST`.

    The newest one is open: it is merged with the next until it is as far from the one before it as the others are from
    each other.
    """

    def __init__(self, most: int = MOST) -> None:
        self.kept: tuple[MemorySample, ...] = ()
        self._most = most
        self._spacing = 0.0
        self._is_incomplete = False

    def add(self, samples: Iterable[MemorySample]) -> None:
        """Add samples, oldest first."""
        for sample in samples:
            self._is_incomplete = True
            if self._is_open():
                self.kept = (*self.kept[:-1], merge_samples(self.kept[-1], sample))
                continue
            if len(self.kept) >= self._most:
                pairs = zip(self.kept[::2], self.kept[1::2], strict=False)
                self.kept = tuple(merge_samples(first, second) for first, second in pairs)
                self._spacing = (self.kept[-1].step - self.kept[0].step) / (len(self.kept) - 1)
            self.kept = (*self.kept, sample)

    def complete(self, rest: MemorySample) -> None:
        """Complete the newest sample, once, with the values of ``rest`` that have to be read."""
        if self._is_incomplete:
            read = {name: getattr(rest, name) for name in ("device_used", "resident", "workers", "host_available")}
            self.kept = (*self.kept[:-1], msgspec.structs.replace(self.kept[-1], **read))
            self._is_incomplete = False

    def _is_open(self) -> bool:
        if not self.kept:
            return False
        newest, before = self.kept[-1], self.kept[-2:-1]
        is_near = bool(before) and abs(newest.step - before[0].step) < self._spacing
        return is_near or (newest.allocated is None and newest.resident is None)


def merge_samples(first: MemorySample, second: MemorySample) -> MemorySample:
    """Merge two intervals: the end of ``second``, and the larger peak and batch of both."""
    known = {name: value for name in MemorySample.__struct_fields__ if (value := getattr(second, name)) is not None}
    known["peak"] = _largest(first.peak, second.peak)
    known["units"] = _largest(first.units, second.units)
    return msgspec.structs.replace(first, **known)


def host_available(machine: Machine, cgroup: CgroupReader | None = None) -> int | None:
    """Return the bytes available to the host and to the cgroup of this process. ``cgroup``: reads its memory."""
    group = (cgroup or CgroupReader(machine, ("memory",))).read()
    sizes = []
    if group.memory_limit is not None and group.memory_used is not None:
        sizes.append(group.memory_limit - group.memory_used)
    rows = (line.split() for line in (read_text(machine.proc / "meminfo") or "").splitlines())
    available = next((parse_int(row[1]) for row in rows if len(row) == 3 and row[0] == "MemAvailable:"), None)
    if available is not None:
        sizes.append(available * 1024)
    return max(0, min(sizes)) if sizes else None


def _largest(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)

"""Memory of a rank while it trains: of its device, of its process and workers, and what its host has left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from doctor.collectors.base import Machine, parse_int, read_text
from doctor.collectors.host.cgroup import read_cgroup
from doctor.core.facts import ChildProcess, MemorySample, RunMemoryFacts
from doctor.monitor.telemetry.child_processes import child_processes, resident_bytes
from doctor.monitor.telemetry.memory.cuda_device import AllocatorStats, CudaDeviceMemory, PeakTracker

MOST = 256
"""Samples that are kept; of more, every two neighbours become one."""
UNREAD = 1024
"""Samples that may wait for somebody to ask for the facts; later ones push the oldest out."""


class MemorySampler:
    """Samples along the run. :meth:`sample` belongs to the training thread and touches no file; :meth:`facts` is for
    other threads and adds to the newest sample what has to be read.

    A sample is joined to the next one where it has no number of its own (on a CPU all but those that were there when
    the facts were asked for). ``peak`` is known only where torch's counter, which is never reset here, moved.
    ``workers`` counts what the children share with nobody, for what they share with this process is in ``resident``.
    """

    def __init__(self, surroundings: Machine | None = None) -> None:
        self._surroundings = surroundings or Machine()
        self._device: CudaDeviceMemory | None = None
        self._name: str | None = None
        self._floor: int | None = None
        self._peaks = PeakTracker()
        self._fresh: deque[MemorySample] = deque(maxlen=UNREAD)
        self._samples = MemorySamples()
        self._reading = threading.Lock()

    def use_device(self, device: Any) -> None:
        """Look at this :class:`torch.device` too, where it is a CUDA device; ``None`` for none."""
        self._name = None if device is None else str(device)
        self._device = CudaDeviceMemory(device) if device is not None and device.type == "cuda" else None

    def expect(self, floor: int | None) -> None:
        """Bytes that training will hold at least on the device (:mod:`doctor.monitor.telemetry.memory.lower_bound`)."""
        self._floor = floor

    def sample(self, step: int, units: int | None) -> None:
        """Remember the memory after batch ``step``; ``units`` of the largest batch since the call before."""
        device = self._device
        if device is None:
            self._fresh.append(MemorySample(step, time.time(), units=units))
            return
        now = device.allocator()
        peak = self._peaks.next(now.peak_allocated)
        self._fresh.append(
            MemorySample(step, time.time(), allocated=now.allocated, reserved=now.reserved, peak=peak, units=units)
        )

    def look(self) -> None:
        """Read what belongs to the newest sample, where there is one since the last look. For other threads, too."""
        if self._fresh:
            self._read(child_processes(), None)

    def facts(self) -> RunMemoryFacts:
        """All samples, and the state now. Reads /proc and asks the runtime, each with a limit."""
        children = child_processes()
        device = self._device
        size = device.free_and_total() if device else None
        rest, samples = self._read(children, size)
        facts = RunMemoryFacts(
            device=self._name,
            resident=rest.resident,
            children=children,
            samples=samples,
            estimated_floor=self._floor,
        )
        return _with_device(facts, device, device.allocator(), size) if device else facts

    def _read(
        self, children: tuple[ChildProcess, ...], size: tuple[int, int] | None
    ) -> tuple[MemorySample, tuple[MemorySample, ...]]:
        """What is read now, and all samples, the newest one completed by it."""
        rest = MemorySample(
            0,
            device_used=size[1] - size[0] if size else None,
            resident=resident_bytes(self._surroundings.proc / "self"),
            workers=sum(_alone(child) for child in children),
            host_available=host_available(self._surroundings),
        )
        with self._reading:
            self._samples.add(_taken(self._fresh))
            self._samples.complete(rest)
            return rest, self._samples.kept


class MemorySamples:
    """Samples of a whole run, evenly spread over its steps, at most :data:`MOST`. The newest one is open: it is joined
    to the next until it is as far from the one before it as the others are from each other."""

    def __init__(self, most: int = MOST) -> None:
        self.kept: tuple[MemorySample, ...] = ()
        self._most = most
        self._spacing = 0.0
        self._fresh = False

    def add(self, samples: Iterable[MemorySample]) -> None:
        """Take up samples, oldest first."""
        for sample in samples:
            if self._is_open():
                self.kept = (*self.kept[:-1], merge_samples(self.kept[-1], sample))
            else:
                self._thin()
                self.kept = (*self.kept, sample)
            self._fresh = True

    def complete(self, rest: MemorySample) -> None:
        """Give the newest sample, unless it has them already, the numbers of ``rest`` that have to be read."""
        if self._fresh:
            read = {name: getattr(rest, name) for name in ("device_used", "resident", "workers", "host_available")}
            self.kept = (*self.kept[:-1], msgspec.structs.replace(self.kept[-1], **read))
            self._fresh = False

    def _is_open(self) -> bool:
        if not self.kept:
            return False
        newest, before = self.kept[-1], self.kept[-2:-1]
        is_near = bool(before) and abs(newest.step - before[0].step) < self._spacing
        return is_near or (newest.allocated is None and newest.resident is None)

    def _thin(self) -> None:
        if len(self.kept) >= self._most:
            pairs = zip(self.kept[::2], self.kept[1::2], strict=False)
            self.kept = tuple(merge_samples(first, second) for first, second in pairs)
            self._spacing = (self.kept[-1].step - self.kept[0].step) / (len(self.kept) - 1)


def merge_samples(first: MemorySample, second: MemorySample) -> MemorySample:
    """Both stretches as one: it ends as ``second`` does, and its peak and its largest batch are those of both."""
    known = {name: value for name in MemorySample.__struct_fields__ if (value := getattr(second, name)) is not None}
    known["peak"] = _largest(first.peak, second.peak)
    known["units"] = _largest(first.units, second.units)
    return msgspec.structs.replace(first, **known)


def host_available(surroundings: Machine) -> int | None:
    """Bytes that the host, and the control group of this process, have left."""
    group = read_cgroup(surroundings)
    left = None if group.memory_limit is None or group.memory_used is None else group.memory_limit - group.memory_used
    sizes = [size for size in (left, _available(surroundings)) if size is not None]
    return max(0, min(sizes)) if sizes else None


def _available(surroundings: Machine) -> int | None:
    rows = (line.split() for line in (read_text(surroundings.proc / "meminfo") or "").splitlines())
    size = next((parse_int(row[1]) for row in rows if len(row) == 3 and row[0] == "MemAvailable:"), None)
    return None if size is None else size * 1024


def _alone(child: ChildProcess) -> int:
    return child.private if child.private is not None else child.memory or 0


def _taken(fresh: deque[MemorySample]) -> list[MemorySample]:
    """What waits in ``fresh``, which the training thread goes on to fill."""
    return [fresh.popleft() for _ in range(len(fresh))]


def _largest(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def _with_device(
    facts: RunMemoryFacts, device: CudaDeviceMemory, now: AllocatorStats, size: tuple[int, int] | None
) -> RunMemoryFacts:
    return msgspec.structs.replace(
        facts,
        device_id=device.identity(),
        allocator=device.backend(),
        total=size[1] if size else None,
        device_free=size[0] if size else None,
        foreign=max(0, size[1] - size[0] - (now.reserved or 0)) if size else None,
        processes=device.processes(),
        utilization=device.utilization(facts.samples[0].at or 0.0) if facts.samples else (),
        estimate_error=_error(facts, now),
        **now._asdict(),
    )


def _error(facts: RunMemoryFacts, now: AllocatorStats) -> float | None:
    """Of the floor, once steps were measured."""
    if facts.estimated_floor is None or not facts.samples or not now.peak_allocated:
        return None
    return round(facts.estimated_floor / now.peak_allocated - 1, 3)

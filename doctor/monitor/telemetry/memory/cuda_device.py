"""Memory of the device of a rank: what torch's allocator, the CUDA runtime and the driver say.

Names of the allocator's statistics: torch.cuda.memory_stats. Its peaks are read and never reset: they are the user's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from doctor.collectors import collector_for
from doctor.collectors.base import Machine
from doctor.collectors.runner import run_collector
from doctor.core.background import start_thread
from doctor.core.facts import Gpu, GpuFacts, GpuProcess

PATIENCE = 1.0
"""Seconds for an answer of the CUDA runtime; it takes a fraction of a millisecond."""
LOOK_EVERY, LOOKS = 60.0, 16
"""Seconds between two questions to the driver, each of which starts an interpreter, and answers that are kept."""

T = TypeVar("T")


class AllocatorStats(NamedTuple):
    """What torch's allocator holds of a device, in bytes, and how often it ran short; ``None`` for what it does not
    count (``cudaMallocAsync`` knows no split blocks)."""

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    inactive: int | None = None
    retries: int | None = None
    failures: int | None = None


def parse_allocator_stats(statistics: Mapping[str, Any]) -> AllocatorStats:
    """From torch.cuda.memory_stats_as_nested_dict, which is empty before CUDA is used."""

    def size(name: str, which: str) -> int | None:
        count = statistics.get(name, {}).get("all", {}).get(which)
        return None if count is None else int(count)

    return AllocatorStats(
        allocated=size("allocated_bytes", "current"),
        reserved=size("reserved_bytes", "current"),
        peak_allocated=size("allocated_bytes", "peak"),
        peak_reserved=size("reserved_bytes", "peak"),
        inactive=size("inactive_split_bytes", "current"),
        retries=statistics.get("num_alloc_retries"),
        failures=statistics.get("num_ooms"),
    )


class PeakTracker:
    """The peak of each stretch between two looks, from a counter of the peak since the beginning that others may reset.

    It is known only where the counter rose, then it is the peak of that stretch, or fell, then it is that since the
    reset.
    """

    def __init__(self) -> None:
        self._counter: int | None = None

    def next(self, counter: int | None) -> int | None:
        """The peak since the look before, or ``None`` where it was no higher than one that came earlier."""
        before, self._counter = self._counter, counter
        return None if counter == before else counter


class CudaDeviceMemory:
    """A CUDA device that this process trains on. :meth:`allocator` is for any thread; the others may wait for the
    runtime or the driver, for :data:`PATIENCE` seconds at most, and are kept off the step path."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        if device.index is None and self._cuda.is_initialized():  # "the current one" is another one in other threads
            self._device = torch.device(device.type, self._cuda.current_device())
        self._identity: tuple[str | None, ...] | None = None
        self._driver = DriverMemory()

    def allocator(self) -> AllocatorStats:
        """What torch's allocator says; takes its lock for some microseconds and asks no device. Nothing before CUDA is
        used, or from an allocator that does not count (torch.cuda.memory.CUDAPluggableAllocator)."""
        try:
            return parse_allocator_stats(self._cuda.memory_stats_as_nested_dict(self._device))
        except RuntimeError:
            return AllocatorStats()

    def backend(self) -> str | None:
        """The allocator's name: ``native``, ``cudaMallocAsync``."""
        return str(self._cuda.get_allocator_backend())

    def free_and_total(self) -> tuple[int, int] | None:
        """Bytes of the whole device; ``None`` before this process uses it, for asking would make a context there."""
        if not self.allocator().peak_reserved:
            return None
        return call_with_timeout(PATIENCE, lambda: self._cuda.mem_get_info(self._device))

    def identity(self) -> str | None:
        """As the driver names it: the UUID, else the PCI bus id."""
        if self._identity is None and self._cuda.is_initialized():
            self._identity = device_ids(self._cuda.get_device_properties(self._device))
        return next((name for name in self._identity or () if name), None)

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Who holds memory of it, as of the last look; ``None`` where that can't be told, or not yet."""
        self.identity()
        return self._driver.processes(self._identity) if self._identity else None

    def utilization(self, since: float) -> tuple[int, ...]:
        """How busy it was at the looks since then (seconds since the epoch), in per cent of the time, oldest first."""
        return self._driver.utilization(self._identity, since) if self._identity else ()


def device_ids(properties: Any) -> tuple[str | None, str | None]:
    """UUID and PCI bus id of torch's properties of a device, as NVML and the kernel write them; ``None`` for what this
    torch does not tell."""
    uuid = getattr(properties, "uuid", None)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return (
        None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        None if domain is None or bus is None or slot is None else f"{domain:04x}:{bus:02x}:{slot:02x}.0",
    )


class DriverMemory:
    """What the driver says of the GPUs: asked in an interpreter of its own, in the background, at most every
    :data:`LOOK_EVERY` seconds. GPUs are named by UUID and PCI bus id; one name of theirs is enough."""

    def __init__(self, read: Callable[[], Any] | None = None) -> None:
        self._read = read or _read_gpus
        self._looks: deque[tuple[float, tuple[Gpu, ...]]] = deque(maxlen=LOOKS)
        self._asked = -LOOK_EVERY
        self._asking: threading.Thread | None = None

    def processes(self, names: tuple[str | None, ...]) -> tuple[GpuProcess, ...] | None:
        """Those that hold memory of a GPU, as of the last look. Has the driver asked again where it is time."""
        self._refresh()
        looks = list(self._looks)
        gpu = _named(names, looks[-1][1]) if looks else None
        return gpu.processes if gpu else None

    def utilization(self, names: tuple[str | None, ...], since: float) -> tuple[int, ...]:
        """Per cents of the time in which a GPU was busy, at the looks from then on, oldest first."""
        gpus = (_named(names, gpus) for at, gpus in list(self._looks) if at >= since)
        return tuple(gpu.utilization for gpu in gpus if gpu and gpu.utilization is not None)

    def _refresh(self) -> None:
        busy = self._asking is not None and self._asking.is_alive()
        if not busy and time.monotonic() - self._asked >= LOOK_EVERY:
            self._asked = time.monotonic()
            self._asking = start_thread("doctor-gpus", self._ask)

    def _ask(self) -> None:
        at, outcome = time.time(), self._read()
        if isinstance(outcome, GpuFacts):
            self._looks.append((at, outcome.gpus))


def _named(names: tuple[str | None, ...], gpus: tuple[Gpu, ...]) -> Gpu | None:
    known = {name for name in names if name}
    return next((gpu for gpu in gpus if {gpu.uuid, gpu.bus_id} & known), None)


def _read_gpus() -> Any:
    return run_collector(collector_for(GpuFacts.key), Machine())


def call_with_timeout(seconds: float, ask: Callable[[], T]) -> T | None:
    """The answer of ``ask``, or ``None`` where it has none in time or refuses: it runs in a thread that is left behind
    when a driver does not let it go."""
    answers: list[T] = []

    def work() -> None:
        try:
            answers.append(ask())
        except RuntimeError:  # torch's word for every error of CUDA
            return

    start_thread("doctor-device", work).join(seconds)
    return answers[0] if answers else None

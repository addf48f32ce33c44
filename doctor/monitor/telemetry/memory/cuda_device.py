"""Memory of a rank's device, from torch's allocator, the CUDA runtime and the driver.

Names of the allocator's statistics: torch.cuda.memory_stats. Its peaks are read and never reset, because they belong to
the user.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from doctor.collectors import collector_for
from doctor.collectors.base import Machine
from doctor.collectors.runner import run_collector
from doctor.core.background import start_thread
from doctor.core.clock import monotonic, time
from doctor.core.facts import Gpu, GpuFacts, GpuProcess

PATIENCE = 1.0
"""Seconds for an answer of the CUDA runtime; it takes a fraction of a millisecond."""
QUERY_EVERY, KEPT_QUERIES = 60.0, 16
"""Seconds between two queries of the driver, each of which starts an interpreter, and number of answers kept."""

T = TypeVar("T")


class AllocatorStats(msgspec.Struct, frozen=True):
    """Statistics of torch's allocator in bytes, ``None`` for what it does not count."""

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    inactive: int | None = None
    retries: int | None = None
    failures: int | None = None


def parse_allocator_stats(statistics: Mapping[str, Any]) -> AllocatorStats:
    """Parse torch.cuda.memory_stats_as_nested_dict, which is empty before CUDA is used."""

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
    """The peak of each interval, from a counter of the overall peak that others may reset.

    It is known if the counter rose, as the peak of the interval, or fell, as the peak since the reset.
    """

    def __init__(self) -> None:
        self._counter: int | None = None

    def next(self, counter: int | None) -> int | None:
        """Return the peak since the last call, or ``None`` if it was not higher than an earlier one."""
        before, self._counter = self._counter, counter
        return None if counter == before else counter


class CudaDeviceMemory:
    """A CUDA device that this process trains on.

    :meth:`allocator` may be called from any thread; the others may wait for the runtime or the driver, at most
    :data:`PATIENCE` seconds, and are not for the step path.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        if device.index is None and self._cuda.is_initialized():  # the current device differs between threads
            self._device = torch.device(device.type, self._cuda.current_device())
        self._identity: tuple[str | None, ...] | None = None
        self._driver = DriverMemory()

    def allocator(self) -> AllocatorStats:
        """Return the allocator's statistics; takes its lock for microseconds, queries no device.

        Empty before CUDA is used, or for an allocator that does not count (torch.cuda.memory.CUDAPluggableAllocator).
        """
        try:
            return parse_allocator_stats(self._cuda.memory_stats_as_nested_dict(self._device))
        except RuntimeError:
            return AllocatorStats()

    def backend(self) -> str | None:
        """Return the name of the allocator: ``native``, ``cudaMallocAsync``."""
        return str(self._cuda.get_allocator_backend())

    def free_and_total(self) -> tuple[int, int] | None:
        """Return free and total bytes; ``None`` before this process has a context there."""
        if not self.allocator().peak_reserved:
            return None
        return call_with_timeout(PATIENCE, lambda: self._cuda.mem_get_info(self._device))

    def identity(self) -> str | None:
        """Return the driver's name of the device: the UUID, else the PCI bus id."""
        if self._identity is None and self._cuda.is_initialized():
            self._identity = device_ids(self._cuda.get_device_properties(self._device))
        return next((name for name in self._identity or () if name), None)

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes that hold memory of the device, as of the last query, if known."""
        self.identity()
        return self._driver.processes(self._identity) if self._identity else None

    def utilization(self, since: float) -> tuple[int, ...]:
        """Return the utilization in percent at the queries since then (Unix time), oldest first."""
        return self._driver.utilization(self._identity, since) if self._identity else ()


def device_ids(properties: Any) -> tuple[str | None, str | None]:
    """Return UUID and PCI bus id in the form of NVML, as far as this torch provides them."""
    uuid = getattr(properties, "uuid", None)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return (
        None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        None if domain is None or bus is None or slot is None else f"{domain:04x}:{bus:02x}:{slot:02x}.0",
    )


class DriverMemory:
    """The driver's view of the GPUs, queried in the background every :data:`QUERY_EVERY` s.

    GPUs are named by UUID and PCI bus id; one of them is enough.
    """

    def __init__(self, read: Callable[[], Any] | None = None) -> None:
        self._read = read or (lambda: run_collector(collector_for(GpuFacts.key), Machine()))
        self._readings: deque[tuple[float, tuple[Gpu, ...]]] = deque(maxlen=KEPT_QUERIES)
        self._queried_at = -QUERY_EVERY
        self._query_thread: threading.Thread | None = None

    def processes(self, names: tuple[str | None, ...]) -> tuple[GpuProcess, ...] | None:
        """Return the processes that hold memory of a GPU, by the last query; start one if it is due."""
        busy = self._query_thread is not None and self._query_thread.is_alive()
        if not busy and monotonic() - self._queried_at >= QUERY_EVERY:
            self._queried_at = monotonic()
            self._query_thread = start_thread("doctor-gpus", self._query)
        readings = list(self._readings)
        gpu = _named(names, readings[-1][1]) if readings else None
        return gpu.processes if gpu else None

    def utilization(self, names: tuple[str | None, ...], since: float) -> tuple[int, ...]:
        """Return the utilization of a GPU in percent at the queries from then on, oldest first."""
        gpus = (_named(names, gpus) for at, gpus in list(self._readings) if at >= since)
        return tuple(gpu.utilization for gpu in gpus if gpu and gpu.utilization is not None)

    def _query(self) -> None:
        at, outcome = time(), self._read()
        if isinstance(outcome, GpuFacts):
            self._readings.append((at, outcome.gpus))


def _named(names: tuple[str | None, ...], gpus: tuple[Gpu, ...]) -> Gpu | None:
    known = {name for name in names if name}
    return next((gpu for gpu in gpus if {gpu.uuid, gpu.bus_id} & known), None)


def call_with_timeout(seconds: float, query: Callable[[], T]) -> T | None:
    """Return the result of ``query``, or ``None`` if it raises or exceeds the time limit.

    It runs in a thread that is abandoned if a driver blocks it.
    """
    answers: list[T] = []

    def work() -> None:
        try:
            answers.append(query())
        except RuntimeError:  # torch raises it for every CUDA error
            return

    start_thread("doctor-device", work).join(seconds)
    return answers[0] if answers else None

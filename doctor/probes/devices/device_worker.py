"""Time matrix products on the device of one rank, and copies to and from it, inside the child that has torch.

On a CPU wall time of one thread counts: a rank that shares its processor is slow there, and its processor time says
why. On a GPU the clock of the device counts (torch.cuda.Event), so that a busy host does not make it look slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from doctor.core.clock import monotonic, sleep, thread_time
from doctor.core.decoding import prepared
from doctor.core.facts import DeviceSpeed
from doctor.core.message_bounds import Number
from doctor.probes.devices.gpu_context import context_bytes
from doctor.probes.runtime.torch_child import WorkRefused

if TYPE_CHECKING:
    import torch

WARM_UP = 0.3
"""Seconds of products before the timing: clocks rise, and libraries choose their kernels."""
WINDOWS = 9
WINDOW = 0.1
"""Seconds of one window: some ten turns of the scheduler if four threads share a processor. Four of nine windows may be
disturbed without moving the median."""
MOST_SECONDS = 3.0
"""For all windows, each of which lasts until its last product is done."""
CPU_SIZE = 256
"""0.5 to 1 ms per product and thread: a window holds many even at a tenth of a processor."""
GPU_SIZES = (8192, 4096)
"""The largest that fits: 1.1e12 operations take 1.5 ms on an H100, 17 ms on a T4."""
GPU_WINDOWS = 5
MOST_PRODUCTS = 1000
COPY_BYTES = 64 << 20
"""1.3 ms over PCIe 5.0 x16, 70 ms over a link that came up with one lane of PCIe 3.0."""
COPIES = 5
MOST_WAIT = 10.0


class DeviceTask(msgspec.Struct, frozen=True):
    """The device to measure: that of ``local_rank`` among the visible ones, ``None`` if unknown.

    ``processor``: the CPU in any case. ``pause``: seconds before all; ``wait``: before the copies, so that ranks of a
    host take turns.
    """

    local_rank: Number | None = None
    processor: bool = False
    confirms: bool = False
    pause: Annotated[float, Meta(ge=0.0, le=MOST_WAIT)] = 0.0
    wait: Annotated[float, Meta(ge=0.0, le=MOST_WAIT)] = 0.0


def work(argument: bytes) -> DeviceSpeed:
    """Measure the :class:`DeviceTask` in ``argument``; about 1 s.

    Raises:
        WorkRefused: the device of this rank is unknown.
    """
    import torch

    task = msgspec.json.decode(argument, type=prepared(DeviceTask))
    sleep(task.pause)
    if task.processor or not torch.cuda.is_available():
        return _on_processor(task)
    return _on_gpu(torch.device("cuda", _index(task, torch.cuda.device_count())), task)


def _index(task: DeviceTask, count: int) -> int:
    if count == 1:
        return 0
    if task.local_rank is None or task.local_rank >= count:
        raise WorkRefused(f"cannot determine which of {count} devices this rank uses (local rank {task.local_rank})")
    return task.local_rank


def _on_processor(task: DeviceTask) -> DeviceSpeed:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product = _product(torch.device("cpu"), CPU_SIZE, torch.float32)
        _for_seconds(product, WARM_UP)
        began, used = monotonic(), thread_time()
        windows: list[tuple[int, float]] = []
        while len(windows) < WINDOWS and monotonic() - began < MOST_SECONDS:
            windows.append(_for_seconds(product, WINDOW))
        spent = monotonic() - began
        share = (thread_time() - used) / spent
    finally:
        torch.set_num_threads(threads)
    repeats = sum(count for count, _ in windows)
    return DeviceSpeed(
        "cpu",
        _processor_name(),
        "float32",
        CPU_SIZE,
        seconds=min(median(seconds / count for count, seconds in windows), spent / repeats),
        repeats=repeats,
        processor_share=min(1.0, share),
        pinned_to=_pinned_to(),
        confirms=task.confirms,
    )


def _product(device: torch.device, size: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return a product of two matrices, from a separate generator: the global one belongs to the user."""
    import torch

    source = torch.Generator(device=device).manual_seed(0)
    one, other = (torch.rand(size, size, generator=source, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(one)
    return lambda: torch.mm(one, other, out=result)


def _for_seconds(product: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Return the number of products in that wall time."""
    count, began = 0, monotonic()
    while (spent := monotonic() - began) < seconds:
        product()
        count += 1
    return count, spent


def _processor_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name from the kernel; the architecture if it gives none (most ARM machines)."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return name or os.uname().machine


def _pinned_to() -> tuple[int, ...]:
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    return allowed if len(allowed) < (os.cpu_count() or 1) else ()


def _on_gpu(device: torch.device, task: DeviceTask) -> DeviceSpeed:
    import torch

    # bfloat16 is only emulated before compute capability 8.0 (torch/cuda/__init__.py, is_bf16_supported).
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    with torch.cuda.device(device):
        free = torch.cuda.mem_get_info(device)[0]
        # Three matrices of two-byte numbers, and as much again for the library.
        size = next((size for size in GPU_SIZES if 12 * size * size <= free), None)
        if size is None:
            raise WorkRefused(f"only {free >> 20} MiB of the device's memory are free")
        product = _product(device, size, dtype)
        count = _warm_up(product)
        windows = [_timed(product, count) for _ in range(GPU_WINDOWS)]
        del product  # and its matrices
        sleep(task.wait)
        to_device, to_host = _copies(device)
        torch.cuda.empty_cache()
        context = _context(device)
    return DeviceSpeed(
        str(device),
        torch.cuda.get_device_name(device),
        str(dtype).removeprefix("torch."),
        size,
        seconds=min(windows),
        repeats=count * GPU_WINDOWS,
        to_device=to_device,
        to_host=to_host,
        context=context,
        pinned_to=_pinned_to(),
        confirms=task.confirms,
    )


def _context(device: torch.device) -> int | None:
    import torch

    # Since torch 2.4; without it nothing tells which of NVML's devices this is if some are hidden.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None or torch.version.cuda is None:
        return None
    return context_bytes(f"GPU-{str(uuid).removeprefix('GPU-')}", torch.cuda.memory_reserved(device))


def _warm_up(product: Callable[[], object]) -> int:
    """Compute for a while; return the number of products of a window."""
    import torch

    product()
    torch.cuda.synchronize()
    began, count = monotonic(), 0
    while monotonic() - began < WARM_UP:
        product()
        torch.cuda.synchronize()
        count += 1
    return max(1, min(MOST_PRODUCTS, int(count * WINDOW / WARM_UP)))


def _timed(act: Callable[[], object], count: int) -> float:
    """Return the seconds of one of ``count`` calls, by the clock of the device."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        act()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / count


def _copies(device: torch.device) -> tuple[float, float]:
    """Return bytes per second from pinned memory to the device, and back; medians of a few copies."""
    import torch

    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def rate(act: Callable[[], object]) -> float:
        act()
        return COPY_BYTES / median(_timed(act, 1) for _ in range(COPIES))

    return rate(lambda: there.copy_(here, non_blocking=True)), rate(lambda: here.copy_(there, non_blocking=True))

"""Utilization and power of a host's GPUs while its ranks are read, and which GPU each rank uses.

NVML is called in a child process, because a faulty driver can block inside a call. It reports PIDs of the initial PID
namespace; in a container, the GPU of a rank follows from CUDA_VISIBLE_DEVICES, if it shows one device or the launcher
numbers the ranks of the host.

Sources: nvml.h, nvmlDeviceGetUtilizationRates (share of the last 1/6 to 1 second in which a kernel ran),
nvmlDeviceGetPowerUsage, nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetComputeRunningProcesses.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from doctor.analysis.visible_devices import bus_key, visible_gpus
from doctor.collectors.base import Machine, NotPresent, NotVisible
from doctor.collectors.gpu.gpu_processes import read_processes
from doctor.collectors.gpu.nvml import DeviceLost, Nvml, require_library, start_nvml
from doctor.collectors.host.kernel_log import collect_kernel_log
from doctor.collectors.host.processes import INITIAL_PID_NAMESPACE, is_initial
from doctor.core.background import BackgroundCall
from doctor.core.decoding import prepared
from doctor.core.facts import (
    AttachedGpu,
    AttachedProcess,
    EnvironmentFacts,
    Gpu,
    GpuFacts,
    GpuProcess,
    GpuSample,
    KernelEvent,
    Variable,
)
from doctor.core.process import abandon_child, start_python
from doctor.knowledge.nvidia import kernel_bus_id

INTERVAL = 1.0
"""Seconds between samples: the longest period over which NVML averages."""
MOST_ROUNDS, LEAST_ROUNDS = 64, 2
MOST_XIDS = 8
BY_PROCESSES, BY_VISIBLE, BY_LOCAL_RANK = "processes of the GPU", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK"
_PROC = Path("/proc")


class GpuSampler:
    """Samples the GPUs of this host in a child process, from now on until :meth:`result`."""

    def __init__(self) -> None:
        self._starting = BackgroundCall(_start)

    def result(self, seconds: float) -> tuple[AttachedGpu, ...]:
        """Return the GPUs with their samples within ``seconds``; none without an NVIDIA driver that responds."""
        until = time.monotonic() + seconds
        try:
            child = self._starting.result(seconds)
        except (NotPresent, OSError, TimeoutError):
            return ()
        try:
            output, _ = child.communicate(timeout=max(0.0, until - time.monotonic()))  # it ends when its stdin closes
        except subprocess.TimeoutExpired as late:
            abandon_child(child)
            output = late.output or b""
        return _joined(output)


def _start() -> subprocess.Popen[bytes]:
    require_library(Machine())
    return start_python(__name__, [str(INTERVAL)], stdin=subprocess.PIPE)


def _joined(output: bytes) -> tuple[AttachedGpu, ...]:
    """Return each GPU as it was read last, with all samples; the last line may be incomplete."""
    found: dict[int, AttachedGpu] = {}
    for line in output.splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            for gpu in msgspec.json.decode(line, type=prepared(tuple[AttachedGpu, ...])):
                earlier = found[gpu.index].samples if gpu.index in found else ()
                found[gpu.index] = msgspec.structs.replace(gpu, samples=(*earlier, *gpu.samples))
    return tuple(found.values())


# In the child.


def main(interval: str) -> None:
    """Write one line of JSON for each round, until stdin is closed."""
    try:
        nvml = start_nvml()
    except (NotPresent, NotVisible):
        return
    count, _ = nvml.call("nvmlDeviceGetCount")
    handles = {index: nvml.call("nvmlDeviceGetHandleByIndex", index)[0] for index in range(count or 0)}
    known = {index: handle for index, handle in handles.items() if handle is not None}
    is_over = False
    for number in range(1, MOST_ROUNDS + 1):
        gpus = [gpu for index, handle in known.items() if (gpu := _read_gpu(nvml, index, handle)) is not None]
        sys.stdout.buffer.write(msgspec.json.encode(gpus) + b"\n")
        sys.stdout.buffer.flush()
        if is_over and number >= LEAST_ROUNDS:
            return
        if is_over:
            time.sleep(float(interval))
        else:
            is_over = bool(select.select([sys.stdin], [], [], float(interval))[0])


def _read_gpu(nvml: Nvml, index: int, handle: Any) -> AttachedGpu | None:
    """Return a GPU with one sample; ``None`` if the driver lost it."""
    try:
        at = time.time()
        rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
        power = nvml.ask("nvmlDeviceGetPowerUsage", handle)
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
        info = nvml.ask("nvmlDeviceGetPciInfo", handle)
        mode = nvml.ask("nvmlDeviceGetMigMode", handle)
        bus_id = info.busId if info else None
        return AttachedGpu(
            index,
            uuid=nvml.ask("nvmlDeviceGetUUID", handle) or "",
            name=nvml.ask("nvmlDeviceGetName", handle) or "",
            bus_id=kernel_bus_id(bus_id.decode() if isinstance(bus_id, bytes) else bus_id) if bus_id else "",
            mig=bool(mode and mode[0]),
            power_limit=nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle),
            processes=_processes(nvml, index, handle),
            samples=(GpuSample(at, rates.gpu if rates else None, power, memory.used if memory else None),),
        )
    except DeviceLost:
        return None


def _processes(nvml: Nvml, index: int, handle: Any) -> tuple[GpuProcess, ...] | None:
    """Return the processes that hold memory of a GPU; ``None`` where their PIDs would be those of other processes."""
    if not is_initial(_PROC, "pid", INITIAL_PID_NAMESPACE):
        return None
    return read_processes(nvml, (handle,), index, _PROC)


# Which GPU a rank uses.


def with_gpus(
    ranks: Sequence[AttachedProcess], gpus: Sequence[AttachedGpu], environs: Mapping[int, Mapping[str, str]]
) -> tuple[AttachedProcess, ...]:
    """Return ``ranks`` with the GPU that each uses, where that is known. ``environs``: their environments by PID."""
    if any(gpu.processes is not None for gpu in gpus):
        return tuple(_by_processes(rank, gpus) for rank in ranks)
    assumed = [_by_environment(rank, gpus, environs.get(rank.pid, {})) for rank in ranks]
    users = Counter(rank.gpu for rank in assumed)
    return tuple(one if users[one.gpu] == 1 else rank for one, rank in zip(assumed, ranks, strict=True))


def _by_processes(rank: AttachedProcess, gpus: Iterable[AttachedGpu]) -> AttachedProcess:
    """The rank with the GPU on which it holds memory; the one on which it holds most, as a context alone takes some."""
    held = [(one.memory or 0, gpu.index) for gpu in gpus for one in gpu.processes or () if one.pid == rank.pid]
    held.sort(reverse=True)
    if not held or (len(held) > 1 and held[0][0] == held[1][0]):
        return rank
    return msgspec.structs.replace(rank, gpu=held[0][1], gpu_from=BY_PROCESSES)


def _by_environment(rank: AttachedProcess, gpus: Iterable[AttachedGpu], environ: Mapping[str, str]) -> AttachedProcess:
    """The rank with its only visible GPU, or that of its local rank. A process in another PID namespace than this one
    may see other GPUs."""
    if not rank.uses_gpu or not environ:
        return rank
    variables = tuple(Variable(name, environ[name]) for name in (BY_VISIBLE, "CUDA_DEVICE_ORDER") if name in environ)
    known = GpuFacts(gpus=tuple(Gpu(gpu.index, uuid=gpu.uuid, name=gpu.name, mig=gpu.mig) for gpu in gpus))
    shown = visible_gpus(EnvironmentFacts(variables=variables), known).gpus or ()
    if len(shown) == 1:
        return msgspec.structs.replace(rank, gpu=shown[0].index, gpu_from=BY_VISIBLE)
    if rank.local_rank is None or rank.guessed or rank.local_rank >= len(shown):
        return rank
    return msgspec.structs.replace(rank, gpu=shown[rank.local_rank].index, gpu_from=BY_LOCAL_RANK)


def with_xids(gpus: Sequence[AttachedGpu], since: float) -> tuple[AttachedGpu, ...]:
    """Return ``gpus`` with the Xids that the kernel logged for them after ``since``, in seconds since boot; without any
    if this process may not read the log."""
    try:
        events = collect_kernel_log(Machine()).events
    except NotVisible:
        return tuple(gpus)
    return tuple(msgspec.structs.replace(gpu, xids=_xids(gpu, events, since)) for gpu in gpus)


def _xids(gpu: AttachedGpu, events: Iterable[KernelEvent], since: float) -> tuple[int, ...]:
    codes = [
        event.code
        for event in events
        if event.kind == "xid"
        and event.code is not None
        and (event.time or 0.0) >= since
        and event.device
        and bus_key(event.device) == bus_key(gpu.bus_id)
    ]
    return tuple(dict.fromkeys(codes))[-MOST_XIDS:]

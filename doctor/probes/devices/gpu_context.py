"""Bytes that this process holds on a GPU outside of torch's allocator, as the driver counts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from doctor.collectors.base import NotPresent, NotVisible
from doctor.collectors.gpu.gpu_processes import read_processes
from doctor.collectors.gpu.nvml import DeviceLost, Nvml, start_nvml
from doctor.collectors.host.processes import INITIAL_PID_NAMESPACE, is_initial


def context_bytes(uuid: str, reserved: int, proc: Path = Path("/proc")) -> int | None:
    """Return what this process holds of the GPU ``uuid`` beside the ``reserved`` bytes of torch.

    ``None`` if the driver does not tell: on a MIG slice, in a container that shares the GPU, and on some virtual GPUs.
    """
    try:
        nvml = start_nvml()
        handle = _handle_of(nvml, uuid)
        processes = None if handle is None else read_processes(nvml, (handle,), 0, proc)
    except (ImportError, NotPresent, NotVisible, DeviceLost):
        return None
    # The driver has pids of the host's namespace: in a container only a process that is alone can be this one.
    if is_initial(proc, "pid", INITIAL_PID_NAMESPACE):
        processes = tuple(process for process in processes or () if process.pid == os.getpid())
    if not processes or len(processes) > 1 or processes[0].memory is None:
        return None
    held = processes[0].memory - reserved
    return held if held > 0 else None


def _handle_of(nvml: Nvml, uuid: str) -> Any:
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        handle, code = nvml.call("nvmlDeviceGetHandleByIndex", index)
        if code == 0 and nvml.ask("nvmlDeviceGetUUID", handle, field="uuid", index=index) == uuid:
            return handle
    return None

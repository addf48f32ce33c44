"""Processes that hold memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from doctor.collectors.base import read_text
from doctor.collectors.gpu.nvml import Nvml
from doctor.collectors.host.processes import INITIAL_PID_NAMESPACE, is_initial, owner
from doctor.core.facts import GpuProcess

KINDS = (("compute", "Compute"), ("graphics", "Graphics"), ("mps", "MPSCompute"))
UNKNOWN_SIZE = 1 << 63
"""NVML returns all bits set if the memory of a process is unknown; no GPU has this many bytes."""


def read_processes(nvml: Nvml, handles: Iterable[Any], index: int, proc: Path) -> tuple[GpuProcess, ...] | None:
    """Return the processes of a GPU and of its MIG devices (``handles``), by pid.

    ``None`` if NVML refuses the list of compute processes, because the others alone would look like an idle GPU.
    """
    found: dict[int, GpuProcess] = {}
    answered = False
    for handle in handles:
        for kind, name in KINDS:
            listed = _running(nvml, handle, name, index)
            answered = answered or (kind == "compute" and listed is not None)
            for process in _named(listed or (), kind, proc):
                known = found.get(process.pid)
                if known is None or known.memory is None:
                    found[process.pid] = process
    return tuple(found[pid] for pid in sorted(found)) if answered else None


def _running(nvml: Nvml, handle: Any, name: str, index: int) -> Any:
    """Return the list of the newest interface that the driver has: v3 since driver 510, v2 since 450."""
    for version in ("_v3", "_v2"):
        function = f"nvmlDeviceGet{name}RunningProcesses{version}"
        listed = nvml.ask(function, handle, field="processes", index=index)
        if listed is not None:
            return listed
    return None


def _named(listed: Iterable[Any], kind: str, proc: Path) -> Iterator[GpuProcess]:
    # NVML reports pids of the PID namespace of the host; in a container they would name other processes.
    visible = is_initial(proc, "pid", INITIAL_PID_NAMESPACE)
    for process in listed:
        memory = process.usedGpuMemory
        folder = proc / str(process.pid)
        yield GpuProcess(
            pid=process.pid,
            memory=None if memory is None or memory >= UNKNOWN_SIZE else memory,
            name=read_text(folder / "comm") if visible else None,
            user_id=owner(folder) if visible else None,
            kind=kind,
        )

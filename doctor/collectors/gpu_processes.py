"""Processes that hold memory of a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from doctor.collectors.base import read_text
from doctor.collectors.namespaces import sees_host_processes
from doctor.collectors.nvml import Nvml
from doctor.facts import GpuProcess

KINDS = (("compute", "Compute"), ("graphics", "Graphics"), ("mps", "MPSCompute"))
UNKNOWN_SIZE = 1 << 63
"""NVML answers all bits set where it can't tell the memory of a process; no GPU has this many bytes."""


def read_processes(nvml: Nvml, handles: Iterable[Any], index: int, proc: Path) -> tuple[GpuProcess, ...] | None:
    """The processes of a GPU and of its MIG slices (``handles``), by pid; ``None`` where NVML lists none of a kind."""
    found: dict[int, GpuProcess] = {}
    answered = False
    for handle in handles:
        for kind, name in KINDS:
            listed = _running(nvml, handle, name, index)
            answered = answered or listed is not None
            for process in _named(listed or (), kind, proc):
                known = found.get(process.pid)
                if known is None or known.memory is None:
                    found[process.pid] = process
    return tuple(found[pid] for pid in sorted(found)) if answered else None


def _running(nvml: Nvml, handle: Any, name: str, index: int) -> Any:
    """The list of the newest interface that the driver has: v3 since driver 510, v2 since 450."""
    for version in ("_v3", "_v2"):
        function = f"nvmlDeviceGet{name}RunningProcesses{version}"
        listed = nvml.ask(function, handle, field="processes", index=index)
        if listed is not None:
            return listed
    return None


def _named(listed: Iterable[Any], kind: str, proc: Path) -> Iterator[GpuProcess]:
    # NVML gives numbers of the host's PID namespace; in a container they would name somebody else.
    visible = sees_host_processes(proc)
    for process in listed:
        memory = process.usedGpuMemory
        folder = proc / str(process.pid)
        yield GpuProcess(
            pid=process.pid,
            memory=None if memory is None or memory >= UNKNOWN_SIZE else memory,
            name=read_text(folder / "comm") if visible else None,
            user_id=_owner(folder) if visible else None,
            kind=kind,
        )


def _owner(folder: Path) -> int | None:
    try:
        return os.stat(folder).st_uid
    except OSError:
        return None

"""The device that a job must fit on: its memory, and what other processes hold of it; and its host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.text import counted
from doctor.estimate.memory.non_torch import LIBRARIES, MIB, ModuleLoading, loading_of

if TYPE_CHECKING:
    from doctor.core.facts import Gpu, HostFacts
    from doctor.core.job import Job
    from doctor.core.report_document import DeviceContext


class DeviceBudget(msgspec.Struct, frozen=True, kw_only=True):
    """``memory``: bytes of one device, ``None`` if unknown; ``name``: as the user named it; ``others``: bytes in use by
    other processes; ``capability``: compute capability, empty if unknown; ``loading``: when kernels are loaded;
    ``context``: bytes of a CUDA context, if they were measured; ``host``: the node, from a capture; ``notes``:
    caveats."""

    memory: int | None = None
    name: str = ""
    others: int = 0
    capability: str = ""
    loading: ModuleLoading = "lazy"
    context: int | None = None
    host: HostFacts | None = None
    notes: tuple[str, ...] = ()

    def for_one_of(self, ranks: int) -> int | None:
        """Return the bytes available to one of ``ranks`` on this device."""
        return None if self.memory is None else max(0, self.memory - self.others) // ranks


def device_budget_of(memory: str | None, device: str | None, like: Job | None, *, devices: int = 1) -> DeviceBudget:
    """Return the budget from a size (``80GiB``), the name of a device, or the GPUs and the host of a captured job.

    Raises:
        UnusableError: two of them contradict each other, or one of them is not valid.
    """
    if memory is not None and device is not None:
        raise UnusableError("--device-memory and --device both set the device memory: give only one")
    captured = _captured_budget(like, devices) if like is not None else DeviceBudget()
    if memory is not None:
        return DeviceBudget(memory=size_of(memory), name=memory, host=captured.host)
    if device is not None:
        return msgspec.structs.replace(_named_budget(device), host=captured.host)
    if like is not None and captured.memory is None:
        raise UnusableError("the capture contains no GPU with known memory; add --device or --device-memory")
    return captured


_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def size_of(text: str) -> int:
    """Return the bytes of ``80GiB``, ``80GB`` (powers of ten), ``80G`` (powers of two, as in nvidia-smi and SLURM).

    Raises:
        UnusableError: it is not a valid size, or not above 0.
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or not unit or float(match.group(1)) <= 0 or len(match.group(1)) > 12:
        raise UnusableError(f"{text!r} is not a valid memory size: use 80GiB, 40960MiB or 80GB")
    is_decimal = not match.group(3) and match.group(0).strip().lower().endswith("b")
    return int(float(match.group(1)) * (1000 if is_decimal else 1024) ** _UNITS[unit])


def _named_budget(name: str) -> DeviceBudget:
    from doctor.knowledge.device_memory import find_devices, known_devices, near_devices

    found = find_devices(name)
    if len(found) > 1:
        names = ", ".join(device.name for device in found)
        raise UnusableError(f"{name!r} may be one of {names}: give the full name, or --device-memory")
    if not found:
        near = ", ".join(near_devices(name) or known_devices())
        raise UnusableError(f"unknown device {name!r} (similar: {near}); give its memory with --device-memory")
    return DeviceBudget(memory=found[0].total, name=found[0].name, capability=found[0].capability)


def with_host_memory(budget: DeviceBudget, size: str) -> DeviceBudget:
    """Return the budget on nodes with this much memory, of which nothing is in use."""
    from doctor.core.facts import HostFacts

    total = size_of(size)
    return msgspec.structs.replace(budget, host=HostFacts(hostname="node", ram_total=total, ram_available=total))


def _captured_budget(job: Job, devices: int) -> DeviceBudget:
    from doctor.core.facts import GpuFacts, HostFacts

    host = next((facts for one in job.hosts if (facts := one.find(HostFacts))), None)
    # The first GPUs of every host, as many as the job has devices, whose size is known.
    per_host = [found for one in job.hosts if (found := one.find(GpuFacts))]
    gpus = [gpu for one in per_host for gpu in one.gpus[:devices] if gpu.memory_total]
    if not gpus:
        return DeviceBudget(host=host)
    tightest = min(gpus, key=lambda gpu: (gpu.memory_total or 0) - _held(gpu))
    notes: tuple[str, ...] = ()
    if len(gpus) < devices:
        notes += (f"the capture shows {counted(len(gpus), 'GPU')}, the job has {devices} a node",)
    if len(gpus) > 1 and len({(gpu.memory_total, _held(gpu) >> 28) for gpu in gpus}) > 1:
        notes += (f"the GPUs of the capture differ: GPU {tightest.index} has the least free memory and is used",)
    if tightest.mig and tightest.mig_devices:
        slices = [one.memory for one in tightest.mig_devices if one.memory]
        memory = min(slices, default=tightest.memory_total)
        return DeviceBudget(memory=memory, name=f"a MIG slice of {tightest.name}", host=host, notes=notes)
    return DeviceBudget(
        memory=tightest.memory_total,
        name=tightest.name,
        others=_held(tightest),
        capability=tightest.compute_capability or "",
        loading=_captured_loading(job),
        context=_captured_context(job),
        host=host,
        notes=notes,
    )


def _captured_loading(job: Job) -> ModuleLoading:
    from doctor.core.facts import SoftwareFacts

    builds = [found.torch for one in job.ranks if (found := one.find(SoftwareFacts)) and found.torch]
    return loading_of(builds[0].cuda or "" if builds else "")


def _captured_context(job: Job) -> int | None:
    """Return the context of a captured run as the driver reports it: what its only process holds beside torch.

    ``None`` with several ranks, which have NCCL's buffers, too."""
    from doctor.core.facts import RunMemoryFacts

    run = job.ranks[0].find(RunMemoryFacts) if len(job.ranks) == 1 else None
    processes = run.processes if run is not None else None
    if run is None or not processes or len(processes) > 1 or not processes[0].memory or not run.reserved:
        return None
    return max(0, processes[0].memory - run.reserved)


def with_measured_context(budget: DeviceBudget, contexts: tuple[DeviceContext, ...], source: str) -> DeviceBudget:
    """Return the budget with the largest of ``contexts``, as the full probes measured them; ``source``: their file.

    Raises:
        UnusableError: there is none, or none of the device of the budget.
    """
    if not contexts:
        raise UnusableError(f"{source} holds no CUDA context: doctor check --probe full measures it where a GPU is")
    fitting = [one for one in contexts if _may_be(one.device, budget.name)]
    if not fitting:
        devices = ", ".join(one.device for one in contexts)
        raise UnusableError(f"{source} holds a CUDA context of {devices}, not of {budget.name}")
    chosen = max(fitting, key=lambda one: one.bytes)
    size = chosen.bytes + (LIBRARIES if budget.loading == "lazy" else 0)
    note = f"the CUDA context is that measured on {chosen.device}: {chosen.bytes / MIB:.0f} MiB ({source})"
    return msgspec.structs.replace(budget, context=size, notes=(*budget.notes, note))


def _may_be(measured: str, asked: str) -> bool:
    """Return whether a GPU of this name may be the one asked for, which may be unknown or a size."""
    from doctor.knowledge.device_memory import find_devices

    names = {device.name for device in find_devices(asked)}
    return not names or measured == asked or bool(names & {device.name for device in find_devices(measured)})


def _held(gpu: Gpu) -> int:
    if gpu.memory_free is not None and gpu.memory_total is not None:
        return max(0, gpu.memory_total - gpu.memory_free)
    return gpu.memory_used or 0

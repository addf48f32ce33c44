"""GPUs as reported by NVML. Runs in a separate process: a faulty driver can block inside a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from doctor.collectors.base import Machine, NotPresent, NotVisible, collector
from doctor.collectors.gpu.drivers import nvidia_on_pci
from doctor.collectors.gpu.gpu_processes import read_processes
from doctor.collectors.gpu.interconnect import read_fabric, read_nvlinks, read_peer_links
from doctor.collectors.gpu.memory_state import read_memory, read_memory_errors, recovery_action
from doctor.collectors.gpu.nvml import LOST, UNKNOWN, DeviceLost, Nvml, require_library, start_nvml
from doctor.collectors.host.pci import numa_node
from doctor.core.facts import Gpu, GpuFacts, MigDevice
from doctor.knowledge.nvidia import kernel_bus_id, reason_names

CLOCK_SM = 1
SENSOR_GPU = 0
SCOPE_NODE = 0
CPU_WORDS = 64
"""64-bit words of a mask of processors or memory nodes: 4096, more than any host with GPUs has."""

COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
"""nvml.h nvmlComputeMode_t."""


@collector(GpuFacts, deadline=10.0, isolated=True, present=require_library)
def collect_gpus(machine: Machine) -> GpuFacts:
    """Collect every GPU of the driver. Raises ``NotPresent`` without a driver and ``NotVisible`` if NVML refuses."""
    nvml = _start(machine)
    count, code = nvml.call("nvmlDeviceGetCount")
    if code:
        raise NotVisible(f"NVML does not count the GPUs: {nvml.words(code)}")
    read = [_read_gpu(nvml, index, machine) for index in range(count)]
    handles = {gpu.index: handle for gpu, handle in read if not gpu.lost and handle is not None}
    return GpuFacts(
        driver_version=nvml.ask("nvmlSystemGetDriverVersion", field="driver_version"),
        cuda_version=cuda_release(nvml.ask("nvmlSystemGetCudaDriverVersion_v2", field="cuda_version")),
        nvml_version=nvml.ask("nvmlSystemGetNVMLVersion", field="nvml_version"),
        gpus=tuple(gpu for gpu, _ in read),
        links=tuple(read_peer_links(nvml, handles)),
        hidden=nvml.hidden(),
    )


def _start(machine: Machine) -> Nvml:
    """Start NVML; if the driver is installed but not loaded, GPUs on the PCI bus are not visible."""
    try:
        return start_nvml()
    except NotPresent:
        on_bus, _ = nvidia_on_pci(machine.sys)
        if not on_bus:
            raise
    count = "1 NVIDIA GPU is" if len(on_bus) == 1 else f"{len(on_bus)} NVIDIA GPUs are"
    raise NotVisible(
        f"{count} on the PCI bus, and the driver is not loaded",
        "sudo modprobe nvidia, then sudo dmesg | grep -i nvrm; in a container: give it the GPUs (--gpus all)",
    )


def cuda_release(number: int | None) -> str | None:
    """Return ``12.8`` for ``12080``, the number of CUDA."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _read_gpu(nvml: Nvml, index: int, machine: Machine) -> tuple[Gpu, Any]:
    handle, code = nvml.call("nvmlDeviceGetHandleByIndex", index)
    if code:
        # A GPU that fell off the bus is counted, and its handle is refused with "unknown error" by most drivers.
        return Gpu(index, lost=code in LOST or code == UNKNOWN, error=nvml.words(code)), None
    values: dict[str, Any] = {}
    try:
        for part in _parts(nvml, handle, index, machine):
            values.update(part)
    except DeviceLost as loss:
        values.update(lost=True, error=str(loss))
    return Gpu(index, **{name: value for name, value in values.items() if value is not None}), handle


def _parts(nvml: Nvml, handle: Any, index: int, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the values of one GPU part by part, so that a GPU that is lost meanwhile keeps those read before."""

    def ask(field: str, function: str, *arguments: Any) -> Any:
        return nvml.ask(function, handle, *arguments, field=field, index=index)

    info = ask("bus_id", "nvmlDeviceGetPciInfo")
    bus_id = kernel_bus_id(info.busId.decode() if isinstance(info.busId, bytes) else info.busId) if info else None
    yield {"uuid": ask("uuid", "nvmlDeviceGetUUID"), "name": ask("name", "nvmlDeviceGetName"), "bus_id": bus_id}
    capability = ask("compute_capability", "nvmlDeviceGetCudaComputeCapability")
    yield {
        "minor": ask("minor", "nvmlDeviceGetMinorNumber"),
        "compute_capability": ".".join(map(str, capability)) if capability else None,
    }
    mig_handles = _mig_handles(nvml, handle, ask)
    yield read_memory(nvml, handle, index)
    yield {"processes": read_processes(nvml, (handle, *mig_handles), index, machine.proc)}
    yield _activity(ask)
    yield _settings(ask)
    yield read_memory_errors(nvml, handle, index)
    yield {"recovery_action": recovery_action(nvml, handle, index)}
    yield {
        "pcie_generation": ask("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": ask("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": ask("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": ask("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
    }
    yield {"mig_devices": tuple(_mig_device(nvml, slice_, number) for number, slice_ in enumerate(mig_handles))}
    yield _locality(ask, machine.sys, bus_id)
    yield {"nvlinks": read_nvlinks(nvml, handle, index), "fabric": read_fabric(nvml, handle)}


Ask = Callable[..., Any]


def _activity(ask: Ask) -> dict[str, Any]:
    rates = ask("utilization", "nvmlDeviceGetUtilizationRates")
    reasons = ask("clock_reasons", "nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = ask("clock_reasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    temperature = ask("temperature", "nvmlDeviceGetTemperature", SENSOR_GPU)
    if temperature is None:  # its successor, since driver 575
        temperature = ask("temperature", "nvmlDeviceGetTemperatureV", SENSOR_GPU)
    return {
        "utilization": rates.gpu if rates else None,
        "temperature": temperature,
        "power": ask("power", "nvmlDeviceGetPowerUsage"),
        "power_limit": ask("power_limit", "nvmlDeviceGetEnforcedPowerLimit"),
        "clock": ask("clock", "nvmlDeviceGetClockInfo", CLOCK_SM),
        "clock_max": ask("clock_max", "nvmlDeviceGetMaxClockInfo", CLOCK_SM),
        "clock_reasons": None if reasons is None else reason_names(reasons),
    }


def _settings(ask: Ask) -> dict[str, Any]:
    mode = ask("compute_mode", "nvmlDeviceGetComputeMode")
    mig = ask("mig", "nvmlDeviceGetMigMode")
    persistence = ask("persistence", "nvmlDeviceGetPersistenceMode")
    return {
        "compute_mode": None if mode is None else COMPUTE_MODES.get(mode, f"mode-{mode}"),
        "persistence": None if persistence is None else bool(persistence),
        "mig": bool(mig[0]) if mig else None,
    }


def _mig_handles(nvml: Nvml, handle: Any, ask: Ask) -> tuple[Any, ...]:
    mode = ask("mig", "nvmlDeviceGetMigMode")
    if not mode or not mode[0]:
        return ()
    slots = ask("mig_devices", "nvmlDeviceGetMaxMigDeviceCount") or 0
    slices = (
        nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot, field="gpus.mig_devices") for slot in range(slots)
    )
    return tuple(slice_ for slice_ in slices if slice_ is not None)


def _mig_device(nvml: Nvml, handle: Any, number: int) -> MigDevice:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, field="gpus.mig_devices.memory")
    return MigDevice(
        uuid=nvml.ask("nvmlDeviceGetUUID", handle, field="gpus.mig_devices.uuid") or "",
        index=number,
        memory=memory.total if memory else None,
        name=nvml.ask("nvmlDeviceGetName", handle, field="gpus.mig_devices.name"),
    )


def _locality(ask: Ask, sys: Path, bus_id: str | None) -> dict[str, Any]:
    cpus = ask("cpus", "nvmlDeviceGetCpuAffinity", CPU_WORDS)
    nodes = set_bits(ask("numa_node", "nvmlDeviceGetMemoryAffinity", CPU_WORDS, SCOPE_NODE))
    node = nodes[0] if len(nodes) == 1 else None
    if node is None and bus_id:
        node = numa_node(sys / "bus/pci/devices" / bus_id)
    return {"cpus": set_bits(cpus) or None, "numa_node": node}


def set_bits(words: Any) -> tuple[int, ...]:
    """Return the indices of the bits that are set in a sequence of 64-bit words; none for ``None``."""
    return tuple(
        64 * position + bit for position, word in enumerate(words or ()) if word for bit in range(64) if word >> bit & 1
    )

"""GPUs as NVML reports them, and the driver's files, modules and services."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import msgspec

from doctor.core.facts.section import Level, Section


class GpuProcess(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A process that uses memory of a GPU: ``memory`` in bytes, ``None`` if NVML does not report it (MIG, containers).

    ``pid`` is the number in the host's PID namespace; ``name`` and ``user_id`` are ``None`` where they are hidden.
    """

    pid: int
    memory: int | None = None
    name: str | None = None
    user_id: int | None = None
    kind: str = "compute"


class MigDevice(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A MIG slice; ``memory`` in bytes."""

    uuid: str
    index: int
    memory: int | None = None
    name: str | None = None


class NvLink(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One NVLink of a GPU. ``errors``: sum of replay, recovery and CRC counters; ``fatal``: recovery errors alone."""

    index: int
    active: bool
    remote: str | None = None
    errors: int | None = None
    fatal: int | None = None


class Fabric(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """NVSwitch fabric state: ``not-supported``, ``not-started``, ``in-progress`` or ``completed``; ``status`` is an
    NVML code, 0 for success; ``clique`` and ``cluster`` identify the multi-node NVLink domain."""

    state: str
    status: int | None = None
    clique: int | None = None
    cluster: str | None = None
    health: int | None = None


class Gpu(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One GPU. Memory in bytes, power in milliwatts, clocks in MHz, temperature in Celsius. ``None``: not reported.

    ``clock_reasons``: names of the active throttle reasons (gpu-idle, application-clocks, software-power-cap,
    hardware-slowdown, sync-boost, software-thermal, hardware-thermal, hardware-power-brake, display-clocks).
    ``compute_mode``: default, exclusive-thread, prohibited or exclusive-process. ``lost``: the driver no longer
    reaches it. ``cpus``: local processors. ``pcie_generation_max`` is the highest that card and slot allow.
    ``bus_id`` is written as the kernel does: ``0000:3b:00.0``. ``recovery_action``: none, gpu-reset, node-reboot,
    drain-p2p, drain-and-reset, recover-imex-domain, bus-reset or system-reboot.
    """

    index: int
    uuid: str = ""
    name: str = ""
    bus_id: str = ""
    minor: int | None = None
    compute_capability: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    utilization: int | None = None
    temperature: int | None = None
    power: int | None = None
    power_limit: int | None = None
    clock: int | None = None
    clock_max: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    compute_mode: str | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    ecc_volatile_uncorrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    ecc_sram_uncorrected: int | None = None
    ecc_sram_threshold_exceeded: bool | None = None
    retired_pages_pending: bool | None = None
    remapped_correctable: int | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: str | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    mig: bool | None = None
    mig_devices: tuple[MigDevice, ...] = ()
    numa_node: int | None = None
    cpus: tuple[int, ...] | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    fabric: Fabric | None = None
    lost: bool = False
    error: str | None = None


class PeerLink(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The path between two GPUs, by index. ``path``: nvlink, internal, single-switch, multiple-switches, host-bridge,
    numa-node or system. ``read`` and ``write``: peer access as NVML reports it: ok, or the reason why not."""

    first: int
    second: int
    path: str | None = None
    read: str | None = None
    write: str | None = None


class GpuFacts(Section, frozen=True, kw_only=True):
    """All GPUs that the driver reports on this host, regardless of CUDA_VISIBLE_DEVICES. Missing without a driver. If
    device cgroups divide them, as SLURM does per task, each process has its own section, and the host has one with all
    GPUs.

    ``cuda_version``: the newest CUDA that the driver supports, as ``12.8``.
    """

    key: ClassVar[str] = "gpus"
    level: ClassVar[Level] = "host"

    driver_version: str | None = None
    cuda_version: str | None = None
    nvml_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[PeerLink, ...] = ()

    def part(self) -> Hashable:
        """The GPUs by UUID."""
        return frozenset(gpu.uuid for gpu in self.gpus)

    def joined(self, other: GpuFacts) -> GpuFacts:
        """The GPUs of both, in the order of the PCI bus, as the driver numbers them (nvml.h)."""
        known = {_identity(gpu): gpu for facts in (other, self) for gpu in facts.gpus}
        order = sorted(known, key=lambda name: (known[name].bus_id, name))
        number = {name: index for index, name in enumerate(order)}
        links: dict[tuple[int, int], PeerLink] = {}
        for facts in (other, self):
            at = {gpu.index: number[_identity(gpu)] for gpu in facts.gpus}
            for link in facts.links:
                if link.first in at and link.second in at:
                    ends = at[link.first], at[link.second]
                    links[ends] = msgspec.structs.replace(link, first=ends[0], second=ends[1])
        return msgspec.structs.replace(
            self,
            gpus=tuple(msgspec.structs.replace(known[name], index=number[name]) for name in order),
            links=tuple(links.values()),
            hidden=tuple(dict.fromkeys((*self.hidden, *other.hidden))),
        )


def _identity(gpu: Gpu) -> str:
    """The UUID; a lost GPU may have none."""
    return gpu.uuid or gpu.bus_id or str(gpu.index)


class Service(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A daemon of the driver: ``fabric-manager``, ``imex``, ``persistenced``. ``running`` is ``None`` if only the
    process list of a container is visible; ``version`` is that of its package or binary."""

    name: str
    running: bool | None = None
    version: str | None = None


class DriverFacts(Section, frozen=True, kw_only=True):
    """Files, modules and services around the driver, read without asking the driver.

    ``pci_gpus``: bus ids of NVIDIA display controllers on the PCI bus, whether or not the driver has them;
    ``forward_compatibility``: release of an installed CUDA compat libcuda that the loader would take;
    ``stub_libcuda``: path of a stub libcuda of a CUDA toolkit that the loader would take, which has no functions.
    ``device_files``: paths below /dev that belong to NVIDIA, InfiniBand or, with AMD GPUs, ROCm. ``amd_gpus``: GPUs
    that the kernel driver of ROCm lists, whether or not this container may open them.
    """

    key: ClassVar[str] = "drivers"
    level: ClassVar[Level] = "host"

    kernel_driver: str | None = None
    pci_gpus: tuple[str, ...] = ()
    nvswitches: int | None = None
    device_files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()
    imex_channels: int | None = None
    forward_compatibility: str | None = None
    stub_libcuda: str | None = None
    amd_gpus: int = 0

    def service(self, name: str) -> Service | None:
        """The service called ``name``."""
        return next((service for service in self.services if service.name == name), None)

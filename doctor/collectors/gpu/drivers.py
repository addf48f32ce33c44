"""Files, modules and daemons of the NVIDIA, AMD and InfiniBand drivers. The drivers themselves are not called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from doctor.collectors.base import Machine, NotPresent, collector, listed, read_rows, read_text
from doctor.collectors.host.pci import DISPLAY_CLASSES
from doctor.collectors.host.processes import INITIAL_PID_NAMESPACE, is_initial, process_folders
from doctor.collectors.software.dynamic_loader import DynamicLoader
from doctor.core.facts import DriverFacts, HiddenField, Service
from doctor.core.text import lazy_compile

NVIDIA = "0x10de"
BRIDGE_OTHER = "0x0680"
"""PCI class of an NVSwitch."""

MODULES = lazy_compile(
    r"nvidia\w*|nv_peer_mem|nvidia_peermem|gdrdrv|gdrcopy|nouveau|amdgpu|dmabuf\w*|efa|irdma|bnxt_re|rdma_\w+|ib_\w+|mlx[45]_\w+"
)
SPECIFIC = ("nvidia", "mlx4_ib", "mlx5_ib", "efa", "irdma", "bnxt_re")
"""Prefixes of modules that prove such a device; several of InfiniBand are loaded on every host."""
SERVICES = {
    "fabric-manager": ("nv-fabricmanager", "nvidia-fabricmanager"),
    "imex": ("nvidia-imex", "nvidia-imex"),
    "persistenced": ("nvidia-persistenced", "nvidia-persistenced"),
}
"""Process name of each service, truncated to 15 characters as in the kernel, and its Debian package."""

DEVICE_FOLDERS = ("nvidia-caps", "nvidia-caps-imex-channels", "infiniband")
COMPAT = lazy_compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)")
_STATUS_LIMIT = 64 << 20


@collector(DriverFacts)
def collect_drivers(machine: Machine) -> DriverFacts:
    """Collect the files of the drivers. Raises :class:`NotPresent` without any of NVIDIA, InfiniBand or ROCm."""
    gpus, switches = nvidia_on_pci(machine.sys)
    kernel_driver = read_kernel_driver(machine.proc)
    amd_gpus = _amd_gpus(machine.sys)
    files = (*_device_files(machine.dev), *(_amd_files(machine.dev) if amd_gpus else ()))
    modules = tuple(sorted(row[0] for row in read_rows(machine.proc / "modules") if row and MODULES.fullmatch(row[0])))
    if not (
        gpus or switches or kernel_driver or files or amd_gpus or any(module.startswith(SPECIFIC) for module in modules)
    ):
        raise NotPresent("no NVIDIA and no InfiniBand device, driver or device file is there")
    services = tuple(_services(machine))
    libcuda = DynamicLoader(machine.environ, machine.etc).find("libcuda.so.1")
    hidden: tuple[HiddenField, ...] = ()
    if any(service.running is None for service in services):
        reason = "the processes of the host are not visible from here: a container, or /proc mounted with hidepid"
        hidden = (HiddenField("services", reason, "run on the host, or in a container with the host's PID namespace"),)
    return DriverFacts(
        kernel_driver=kernel_driver,
        pci_gpus=tuple(gpus),
        nvswitches=len(switches) if (machine.sys / "bus/pci/devices").is_dir() else None,
        device_files=files,
        modules=modules,
        services=services,
        imex_channels=_imex_channels(machine),
        forward_compatibility=_forward_compatibility(libcuda),
        stub_libcuda=str(libcuda) if libcuda and "stubs" in libcuda.parent.parts else None,
        amd_gpus=amd_gpus,
        hidden=hidden,
    )


def read_kernel_driver(proc: Path) -> str | None:
    """Return the release of the loaded kernel driver (``570.124.06``), open or proprietary, ``None`` without one."""
    text = read_text(proc / "driver/nvidia/version") or ""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text + "\n", re.MULTILINE)
    return match[1] if match else None


def nvidia_on_pci(sys: Path) -> tuple[list[str], list[str]]:
    """Return the bus ids of display controllers of NVIDIA and of its NVSwitches."""
    gpus: list[str] = []
    switches: list[str] = []
    folder = sys / "bus/pci/devices"
    for name in listed(folder):
        if read_text(folder / name / "vendor") != NVIDIA:
            continue
        kind = (read_text(folder / name / "class") or "")[:6]
        if kind in DISPLAY_CLASSES:
            gpus.append(name)
        elif kind == BRIDGE_OTHER:
            switches.append(name)
    return gpus, switches


def _device_files(dev: Path) -> tuple[str, ...]:
    """Return paths as a process would use them, ``/dev/nvidia0``, whatever tree is read."""
    found = [name for name in listed(dev) if name.startswith("nvidia") and name not in DEVICE_FOLDERS]
    for folder in DEVICE_FOLDERS:
        found.extend(f"{folder}/{name}" for name in listed(dev / folder))
    return tuple(f"/dev/{name}" for name in found)


def _amd_gpus(sys: Path) -> int:
    """Return the number of GPUs in the topology of amdkfd (drivers/gpu/drm/amd/amdkfd/kfd_topology.c).

    A node of CPUs has the id 0. That of a GPU cannot be read where the cgroup forbids the device."""
    folder = sys / "class/kfd/kfd/topology/nodes"
    return sum(read_text(folder / name / "gpu_id") != "0" for name in listed(folder))


def _amd_files(dev: Path) -> tuple[str, ...]:
    render = tuple(f"/dev/dri/{name}" for name in listed(dev / "dri") if name.startswith("renderD"))
    return ("/dev/kfd", *render) if (dev / "kfd").exists() else render


def _services(machine: Machine) -> Iterator[Service]:
    names = {read_text(folder / "comm") for folder in process_folders(machine.proc)}
    # Only where process 1 can be read are the processes of other users visible at all (hidepid of proc(5)).
    complete = is_initial(machine.proc, "pid", INITIAL_PID_NAMESPACE) and bool(read_text(machine.proc / "1/comm"))
    # The upstream versions of the packages in the list of dpkg; other package managers have none.
    text = read_text(machine.etc.parent / "var/lib/dpkg/status", _STATUS_LIMIT) or ""
    pattern = r"^Package: (nvidia-(?:fabricmanager|imex|persistenced)\S*)\n(?:.+\n)*?Version: (?:\d+:)?([0-9.]+)"
    stanzas = re.finditer(pattern, text, re.MULTILINE)
    installed = {stanza[1]: stanza[2] for stanza in stanzas if "deinstall" not in stanza[0]}
    for service, (process, package) in SERVICES.items():
        running = True if process[:15] in names else False if complete else None
        versions = [version for name, version in installed.items() if name == package or name.startswith(package + "-")]
        yield Service(service, running, versions[0] if len(set(versions)) == 1 else None)


def _imex_channels(machine: Machine) -> int | None:
    """Return the number of channels that this process could open, ``None`` without a driver that has them."""
    folder = machine.dev / "nvidia-caps-imex-channels"
    if folder.is_dir():
        return sum(1 for name in listed(folder) if name.startswith("channel"))
    devices = read_text(machine.proc / "devices") or ""
    return 0 if "nvidia-caps-imex-channels" in devices else None


def _forward_compatibility(path: Path | None) -> str | None:
    """Return the release of the libcuda that the loader finds, if it is in a compat folder of a CUDA toolkit."""
    if path is None or "compat" not in path.resolve().parent.parts:
        return None
    match = COMPAT.fullmatch(path.resolve().name)
    return match[1] if match else None

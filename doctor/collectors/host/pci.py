"""PCIe isolation between devices: IOMMU groups and access control (ACS)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from doctor.collectors.base import Machine, link_target, read_int, read_text
from doctor.core.facts import HiddenField
from doctor.core.text import lazy_compile

# Registers by the PCI Express base specification; names as in Linux, include/uapi/linux/pci_regs.h.
_CAPABILITY_LIST = 0x34
_CAPABILITY_EXPRESS = 0x10
_EXTENDED_START = 0x100
_EXTENDED_ACS = 0x000D
_ACS_CONTROL = 6
_REDIRECT = 0x04 | 0x08
"""Request and completion redirect: traffic between devices below a switch goes up to the root complex."""

_SWITCH_PORTS = (5, 6)
_BRIDGE_CLASS = "0x0604"
_ADDRESS = lazy_compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
DISPLAY_CLASSES = ("0x0300", "0x0302")
"""VGA and 3D controllers, as sysfs writes their classes; data center GPUs are of the second."""
_IOMMU_WORDS = ("intel_iommu=", "amd_iommu=", "iommu=", "iommu.passthrough=", "iommu.strict=")


def count_iommu_groups(machine: Machine) -> int | None:
    """Return the number of IOMMU groups; 0 without an active IOMMU, ``None`` without sysfs."""
    try:
        return sum(1 for _ in (machine.sys / "kernel" / "iommu_groups").iterdir())
    except FileNotFoundError:
        return 0 if (machine.sys / "kernel").is_dir() else None
    except OSError:
        return None


def read_iommu_setting(machine: Machine) -> str | None:
    """Return the IOMMU options on the kernel command line."""
    words = (read_text(machine.proc / "cmdline") or "").split()
    return " ".join(word for word in words if word.startswith(_IOMMU_WORDS)) or None


def read_access_control(machine: Machine) -> tuple[bool | None, tuple[HiddenField, ...]]:
    """Return whether a PCIe switch redirects traffic between its devices; ``None`` and the reason if unreadable.

    Only root can read the extended configuration space with the control bits.
    """
    folder = machine.sys / "bus" / "pci" / "devices"
    try:
        devices = sorted(folder.iterdir())
    except OSError:
        return None, (HiddenField("pci_access_control", f"{folder} is not shown here"),)
    bridges = (device for device in devices if (read_text(device / "class") or "").startswith(_BRIDGE_CLASS))
    answers = [_redirects(device) for device in bridges]
    if any(answers):
        return True, ()
    if None in answers:
        reason = "the extended configuration space of PCIe switches is readable only by root"
        return None, (HiddenField("pci_access_control", reason, "sudo lspci -vvv | grep ACSCtl"),)
    return False, ()


def _redirects(device: Path) -> bool | None:
    """Return whether this bridge is a switch port that redirects; ``None`` if its configuration is unreadable."""
    try:
        data = (device / "config").read_bytes()
        size = (device / "config").stat().st_size
    except OSError:
        return None
    if len(data) >= 256 and _port_type(data) not in _SWITCH_PORTS:
        return False
    if len(data) < min(size, 4096) or len(data) <= 64:
        return None
    control = next((_word(data, at + _ACS_CONTROL) for at in _extended(data) if _word(data, at) == _EXTENDED_ACS), 0)
    return bool(control & _REDIRECT)


def _port_type(data: bytes) -> int | None:
    """Return the port type of the PCI Express capability: 4 root port, 5 and 6 switch ports; ``None`` without one."""
    at, steps = data[_CAPABILITY_LIST] & 0xFC, 0
    while 0x40 <= at < 0xFC and steps < 48:
        if data[at] == _CAPABILITY_EXPRESS:
            return (_word(data, at + 2) >> 4) & 0xF
        at, steps = data[at + 1] & 0xFC, steps + 1
    return None


def _extended(data: bytes) -> Iterator[int]:
    at, seen = _EXTENDED_START, set[int]()
    while _EXTENDED_START <= at <= len(data) - 8 and at not in seen and _word(data, at) not in (0, 0xFFFF):
        seen.add(at)
        yield at
        at = (_word(data, at + 2) >> 4) & 0xFFC


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little")


def pci_address(folder: Path) -> str | None:
    """Return the PCI bus id of a device link such as /sys/class/net/eth0/device, through virtio and the like."""
    try:
        parts = folder.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return None
    return next((part for part in reversed(parts) if _ADDRESS.fullmatch(part)), None)


def numa_node(folder: Path) -> int | None:
    """Return the NUMA node of a device folder; ``None`` if the firmware names none (-1)."""
    node = read_int(folder / "numa_node")
    return node if node is not None and node >= 0 else None


def driver_name(folder: Path) -> str | None:
    """Return the name of the driver bound to a device folder."""
    target = link_target(folder / "driver")
    return None if target is None else Path(target).name

"""Network interfaces, their kinds and addresses, and the routes."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path

import msgspec

from doctor.collectors.base import Machine, NotVisible, collector, link_target, listed, parse_int, read_int, read_text
from doctor.collectors.host.pci import driver_name, numa_node, pci_address
from doctor.collectors.network.interface_addresses import ListedAddress, listed_addresses
from doctor.collectors.network.interface_kinds import CARRIERS, kind_of, lower_interfaces
from doctor.collectors.network.routes import read_routes, read_segments
from doctor.core.facts import Address, Family, HiddenField, Interface, InterfaceFacts

# Flags of include/uapi/linux/if.h.
_IFF_UP = 0x1
_IFF_RUNNING = 0x40

# Requests of include/uapi/linux/sockios.h and ethtool.h.
_SIOCGIFFLAGS = 0x8913
_SIOCGIFMTU = 0x8921
_SIOCETHTOOL = 0x8946
_ETHTOOL_GSET = 0x1
_ETHTOOL_GDRVINFO = 0x3


class KernelInterface(msgspec.Struct, frozen=True):
    """An interface as reported by system calls of this process; ``None`` for what was not requested.

    System calls report the network namespace of this process; /sys may have been mounted in another one, which a
    differing ``index`` shows.
    """

    addresses: tuple[Address, ...] = ()
    flags: int | None = None
    mtu: int | None = None
    speed: int | None = None
    driver: str | None = None
    index: int | None = None


@collector(InterfaceFacts)
def collect_interfaces(machine: Machine) -> InterfaceFacts:
    """Collect the interfaces of this network namespace; :class:`NotVisible` if the kernel lists none."""
    try:
        seen = seen_interfaces()
    except OSError as error:
        raise NotVisible(f"the interfaces cannot be listed: {error.strerror}", "ip -br address") from error
    return read_interfaces(machine, seen)


def read_interfaces(machine: Machine, seen: Mapping[str, KernelInterface]) -> InterfaceFacts:
    """Return the interfaces ``seen``, in that order, then those without an address, with details from ``machine``."""
    folder = machine.sys / "class" / "net"
    # "bonding_masters" and the like are files.
    indices = {name: read_int(folder / name / "ifindex") for name in listed(folder) if (folder / name).is_dir()}
    # The names in /proc/net/dev are those of the namespace of this process.
    lines = (read_text(machine.proc / "net" / "dev") or "").splitlines()
    devices = [line.partition(":")[0].strip() for line in lines if ":" in line]
    devices = devices or sorted(indices, key=lambda name: (indices[name] or 0, name))
    names = list(dict.fromkeys([*seen, *devices]))
    # With another index, /sys shows an interface of the same name in another namespace.
    foreign = {
        name
        for name, index in indices.items()
        if name in seen and None not in (seen[name].index, index) and seen[name].index != index
    }
    folders = {name: folder / name for name in indices if name not in foreign}
    notes = []
    if unknown := [name for name in names if name not in folders]:
        reason = f"{machine.sys}/class/net does not describe {', '.join(unknown)}: their kind is guessed by name"
        notes.append(HiddenField("interfaces", reason, "mount sysfs inside the network namespace"))
    if read_text(machine.proc / "net" / "route") is None:
        notes.append(HiddenField("routes", f"{machine.proc}/net/route cannot be read"))
    sent, again = read_segments(machine)
    return InterfaceFacts(
        interfaces=tuple(_interface(folders, name, seen.get(name, KernelInterface())) for name in names),
        routes=read_routes(machine),
        segments_sent=sent,
        segments_retransmitted=again,
        hidden=tuple(notes),
    )


def _interface(folders: Mapping[str, Path], name: str, seen: KernelInterface) -> Interface:
    """Return one interface; what neither ``seen`` nor its folder shows is ``None``, or guessed by name (its kind)."""
    described = name in folders
    folder = folders.get(name, Path(os.devnull))
    if seen.flags is not None:
        up, running = bool(seen.flags & _IFF_UP), bool(seen.flags & _IFF_RUNNING)
    else:
        # The flags of sysfs lack IFF_RUNNING, and "carrier" is an error while the device is down.
        up = bool((_hexadecimal(folder / "flags") or 0) & _IFF_UP)
        running = up and read_text(folder / "carrier") == "1"
    driver = seen.driver or driver_name(folder / "device")
    kind = kind_of(folder if described else None, name, driver)
    # Drivers without a speed report -1, and some 4294967295 (unsigned SPEED_UNKNOWN) or 65535.
    speeds = (speed for speed in (read_int(folder / "speed"), seen.speed) if speed not in (None, 0xFFFF, 0xFFFFFFFF))
    parent = link_target(folder / "master")
    if parent is None and kind == "vlan":
        parent = next(iter(lower_interfaces(folder)), None)
    return Interface(
        name=name,
        kind=kind,
        up=up,
        running=running,
        mtu=seen.mtu if seen.mtu is not None else read_int(folder / "mtu"),
        speed=next((speed for speed in speeds if speed > 0), None),
        addresses=seen.addresses,
        physical=_is_physical(folders, name, kind) if described else kind in ("ethernet", "infiniband", "wireless"),
        driver=driver,
        pci=pci_address(folder / "device"),
        numa_node=numa_node(folder / "device"),
        parent=None if parent is None else Path(parent).name,
        carrier_changes=read_int(folder / "carrier_changes"),
    )


def _hexadecimal(path: Path) -> int | None:
    try:
        return int(read_text(path) or "", 16)
    except ValueError:
        return None


def _is_physical(folders: Mapping[str, Path], name: str, kind: str, depth: int = 4) -> bool:
    """Return whether it is a device, or a bond, VLAN or ordinary bridge above one."""
    folder = folders[name]
    if (folder / "device").exists():
        return True
    if kind not in CARRIERS or depth == 0:
        return False
    lower = [below for below in lower_interfaces(folder) if below in folders]
    return any(_is_physical(folders, below, kind_of(folders[below], below, None), depth - 1) for below in lower)


def seen_interfaces() -> dict[str, KernelInterface]:
    """Return what system calls report, in the order in which getifaddrs yields their first addresses.

    Interfaces with IPv4 come first, then those with IPv6 alone. NCCL finds them in that order (src/os/linux.cc).
    ``OSError`` if the kernel returns no list.
    """
    indices = {name: index for index, name in socket.if_nameindex()}
    addresses: dict[str, list[ListedAddress]] = {}
    for entry in listed_addresses():
        addresses.setdefault(entry.interface, []).append(entry)
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        for name in dict.fromkeys([*addresses, *indices]):
            found[name] = KernelInterface(
                addresses=_addresses(addresses.get(name, ())),
                flags=_asked(ask, name, _SIOCGIFFLAGS, "H"),
                mtu=_asked(ask, name, _SIOCGIFMTU, "i"),
                speed=_speed(ask, name),
                driver=_driver(ask, name),
                index=indices.get(name),
            )
    return found


def _addresses(entries: Iterable[ListedAddress]) -> tuple[Address, ...]:
    families: dict[int, Family] = {socket.AF_INET: "inet", socket.AF_INET6: "inet6"}
    return tuple(
        Address(families[one.family], one.address, prefix_length(one.netmask))
        for one in entries
        if one.family in families
    )


def prefix_length(mask: str | None) -> int | None:
    """Return the leading ones of a mask such as ``255.255.255.0`` or ``ffff:ffff::``; ``None`` if it has gaps."""
    if mask is None:
        return None
    if (length := parse_int(mask)) is not None:
        return length
    try:
        bits = "".join(f"{byte:08b}" for byte in ip_address(mask).packed)
    except ValueError:
        return None
    return None if "01" in bits else bits.count("1")


def _asked(ask: socket.socket, name: str, request: int, kind: str) -> int | None:
    """Return the number that an ioctl puts into the union of ``struct ifreq`` (netdevice(7))."""
    try:
        answer = fcntl.ioctl(ask.fileno(), request, struct.pack("16s24x", os.fsencode(name)[:15]))
    except OSError:
        return None
    number: int = struct.unpack_from(kind, answer, 16)[0]
    return number


def _speed(ask: socket.socket, name: str) -> int | None:
    """Return the Mbit/s in ``struct ethtool_cmd``; 0xFFFF or 0xFFFFFFFF if the driver does not know them."""
    answer = _ethtool(ask, name, _ETHTOOL_GSET, 44)
    if answer is None:
        return None
    low, high = (struct.unpack_from("H", answer, place)[0] for place in (12, 28))
    speed: int = high << 16 | low
    return speed


def _driver(ask: socket.socket, name: str) -> str | None:
    """Return the driver, the only sign of a veth or dummy."""
    answer = _ethtool(ask, name, _ETHTOOL_GDRVINFO, 196)
    return answer[4:36].partition(b"\0")[0].decode("ascii", "replace") or None if answer is not None else None


def _ethtool(ask: socket.socket, name: str, command: int, size: int) -> bytes | None:
    """Return the answer of the ioctl of ethtool, which needs no privilege for these commands."""
    answer = array.array("B", struct.pack(f"I{size - 4}x", command))
    request = struct.pack("16sP8x", os.fsencode(name)[:15], answer.buffer_info()[0])
    try:
        fcntl.ioctl(ask.fileno(), _SIOCETHTOOL, request)
    except OSError:
        return None
    return answer.tobytes()

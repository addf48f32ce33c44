"""Kind of a network interface in /sys/class/net."""

from __future__ import annotations

from pathlib import Path

from doctor.collectors.base import listed, read_int, read_pairs
from doctor.core.text import lazy_compile

CARRIERS = frozenset({"bond", "vlan", "bridge", "other"})
"""Kinds that may carry the traffic of a physical device under their own name (``other``: macvlan and ipvlan)."""

_CONTAINER_BRIDGE = lazy_compile(
    r"docker(\d|_gwbridge)|br-[0-9a-f]{12}$|cni|cbr|lxdbr|lxcbr|podman|nerdctl|kube-bridge|weave"
)
_TUNNEL_NAME = lazy_compile(r"tun|tap|wg|tailscale|zt|flannel|vxlan|gre|ipip|sit|tunl|cali|ppp|cilium_vxlan|genev")

# Hardware types of include/uapi/linux/if_arp.h.
_HARDWARE = {772: "loopback", 32: "infiniband", 801: "wireless", 802: "wireless", 803: "wireless"}
_TUNNELS = frozenset({512, 768, 769, 776, 778, 823, 0xFFFE})
_ETHERNET = 1

_DEVICE_TYPES = {
    "bridge": "bridge",
    "bond": "bond",
    "vlan": "vlan",
    "wlan": "wireless",
    "vxlan": "tunnel",
    "geneve": "tunnel",
    "wireguard": "tunnel",
    "gre": "tunnel",
    "ppp": "tunnel",
    "wwan": "other",
    "macvlan": "other",
    "hsr": "other",
}
"""DEVTYPE in the uevent of an interface, as drivers set it with SET_NETDEV_DEVTYPE."""

_DRIVERS = {
    "veth": "veth",
    "dummy": "dummy",
    "tun": "tunnel",
    "bridge": "bridge",
    "openvswitch": "bridge",
    "bonding": "bond",
    "team": "bond",
    "802.1Q VLAN Support": "vlan",
    "vxlan": "tunnel",
    "geneve": "tunnel",
    "wireguard": "tunnel",
    "macvlan": "other",
    "ipvlan": "other",
}
"""Drivers of virtual interfaces, as the ioctl of ethtool names them."""


def kind_of(folder: Path | None, name: str, driver: str | None) -> str:
    """Return the kind of the interface ``name``; ``folder`` is ``None`` if sysfs does not describe it."""
    kind = _DRIVERS.get(driver or "") or (_by_name(name) if folder is None else _by_folder(folder, name))
    return _named_bridge(name) if kind == "bridge" else kind


def _named_bridge(name: str) -> str:
    if _CONTAINER_BRIDGE.match(name):
        return "container-bridge"
    return "virtual-bridge" if name.startswith("virbr") else "bridge"


def _by_name(name: str) -> str:
    bridge = _named_bridge(name)
    if bridge != "bridge":
        return bridge
    if name == "lo":
        return "loopback"
    if _TUNNEL_NAME.match(name):
        return "tunnel"
    return next((kind for start, kind in _BY_START if name.startswith(start)), "ethernet")


_BY_START = (
    ("veth", "veth"),
    ("ib", "infiniband"),
    ("bond", "bond"),
    ("wl", "wireless"),
    ("dummy", "dummy"),
    ("br", "bridge"),
)


def _by_folder(folder: Path, name: str) -> str:
    if (folder / "bonding").is_dir():
        return "bond"
    if (folder / "bridge").is_dir():
        return "bridge"
    if (folder / "wireless").is_dir() or (folder / "phy80211").exists():
        return "wireless"
    kind = _DEVICE_TYPES.get(read_pairs(folder / "uevent", "=").get("DEVTYPE", ""))
    if kind:
        return kind
    hardware = read_int(folder / "type")
    if (folder / "tun_flags").exists() or hardware in _TUNNELS:
        return "tunnel"
    if hardware == _ETHERNET:
        return _ethernet(folder, name)
    return "other" if hardware is None else _HARDWARE.get(hardware, "other")


def _ethernet(folder: Path, name: str) -> str:
    """Return the kind of an Ethernet interface: a device, or a virtual kind that sysfs does not name.

    The two ends of a veth name the index of each other in ``iflink`` and have no interface below them.
    """
    if (folder / "device").exists():
        return "ethernet"
    if name.startswith("dummy"):
        return "dummy"
    index, link = read_int(folder / "ifindex"), read_int(folder / "iflink")
    if name.startswith("veth") or (index is not None and link not in (None, 0, index) and not lower_interfaces(folder)):
        return "veth"
    return "other"


def lower_interfaces(folder: Path) -> list[str]:
    """Return the interfaces directly below the one of ``folder``."""
    return [name[len("lower_") :] for name in listed(folder) if name.startswith("lower_")]

"""Network interfaces, routes and RDMA devices."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from doctor.core.facts.section import Level, Section, harmless

Family = Literal["inet", "inet6"]


class Address(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An address of an interface; IPv6 without its zone."""

    family: Family
    address: str
    prefix_length: int | None = None


class Interface(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A network interface.

    ``kind``: loopback, ethernet, infiniband (IPoIB), bond, vlan, bridge, container-bridge (docker0, br-…, cni0),
    virtual-bridge (virbr), veth, tunnel, wireless, dummy or other. ``up`` is IFF_UP, ``running`` IFF_RUNNING
    (carrier). ``speed`` in Mb/s as the driver says, ``None`` where it says nothing. ``physical``: a device stands
    behind it, directly or through a bond, VLAN, macvlan or an ordinary bridge.
    """

    name: str
    kind: str = "ethernet"
    up: bool = True
    running: bool = True
    mtu: int | None = None
    speed: int | None = None
    addresses: tuple[Address, ...] = ()
    physical: bool = True
    driver: str | None = None
    pci: str | None = None
    numa_node: int | None = None
    parent: str | None = None
    carrier_changes: int | None = None

    def __post_init__(self) -> None:
        """Remove characters with a meaning to a shell from the name."""
        msgspec.structs.force_setattr(self, "name", harmless(self.name))


class Route(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A route of the main table: ``destination`` in CIDR form (0.0.0.0/0 is the default)."""

    destination: str
    interface: str
    gateway: str | None = None
    metric: int = 0


class InterfaceFacts(Section, frozen=True, kw_only=True):
    """All interfaces in the kernel's order (that of getifaddrs, as in NCCL), routes, and TCP counters since boot."""

    key: ClassVar[str] = "interfaces"
    level: ClassVar[Level] = "host"

    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    segments_sent: int | None = None
    segments_retransmitted: int | None = None

    def named(self, name: str) -> Interface | None:
        """The interface called ``name``."""
        return next((interface for interface in self.interfaces if interface.name == name), None)


class Gid(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One entry of a port's GID table. ``kind``: ``IB``, ``RoCE v1`` or ``RoCE v2``."""

    index: int
    gid: str
    kind: str | None = None
    interface: str | None = None


class Counter(msgspec.Struct, frozen=True, gc=False):
    """A counter of a port, by its name in sysfs."""

    name: str
    value: int


class RdmaPort(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A port. ``state``: ACTIVE, INIT, ARMED, DOWN; ``rate`` in Gb/s; ``link_layer``: InfiniBand or Ethernet."""

    number: int = 1
    state: str = "ACTIVE"
    physical_state: str | None = None
    rate: float | None = None
    link_layer: str | None = None
    lid: int | None = None
    gids: tuple[Gid, ...] = ()
    counters: tuple[Counter, ...] = ()


class RdmaDevice(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An RDMA device as /sys/class/infiniband shows it. ``has_uverbs``: its character device can be opened."""

    name: str
    ports: tuple[RdmaPort, ...] = ()
    board: str | None = None
    firmware: str | None = None
    driver: str | None = None
    pci: str | None = None
    numa_node: int | None = None
    interfaces: tuple[str, ...] = ()
    has_uverbs: bool | None = None

    def __post_init__(self) -> None:
        """Remove characters with a meaning to a shell from the name."""
        msgspec.structs.force_setattr(self, "name", harmless(self.name))


class RdmaFacts(Section, frozen=True, kw_only=True):
    """RDMA devices of the host; missing (absent) if there are none.

    ``peer_memory``: loaded modules that give network cards access to GPU memory; ``dma_buf``: the kernel can export it
    (5.12 and later). ``verbs_library``: the loader finds libibverbs.
    """

    key: ClassVar[str] = "rdma"
    level: ClassVar[Level] = "host"

    devices: tuple[RdmaDevice, ...] = ()
    peer_memory: tuple[str, ...] = ()
    dma_buf: bool | None = None
    verbs_library: bool | None = None

    def named(self, name: str) -> RdmaDevice | None:
        """The device called ``name``."""
        return next((device for device in self.devices if device.name == name), None)

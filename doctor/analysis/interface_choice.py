"""The interface, port and address that NCCL and Gloo would use, from the facts of one rank and its host.

Sources: NCCL ``src/misc/socket.cc`` (ncclFindInterfaces), ``src/os/linux.cc`` (ncclOsFindInterfaces),
``src/transport/net_ib/init.cc`` and ``connect.cc`` (ports, GID index), ``src/plugin/net.cc`` (order of networks); torch
``torch/csrc/distributed/c10d/ProcessGroupGloo.cpp`` (createDefaultDevice).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

import msgspec

from doctor.analysis.logs.event_timeline import events_of_kinds
from doctor.analysis.visible_devices import uses_nccl
from doctor.core.facts import (
    Address,
    EnvironmentFacts,
    Event,
    Gid,
    GpuFacts,
    HostFacts,
    Interface,
    InterfaceFacts,
    MissingReason,
    NcclFacts,
    NcclPlugin,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    Setting,
    SoftwareFacts,
    TrainerFacts,
)
from doctor.core.job import Job, Rank
from doctor.core.section_table import IdenticalRanks, once_per_rank
from doctor.core.text import lazy_compile
from doctor.knowledge import releases
from doctor.knowledge.interface_syntax import (
    MAX_INTERFACES,
    MAX_RDMA_DEVICES,
    gloo_names,
    nccl_device_list,
    nccl_interface_list,
    nccl_socket_family,
    parse_nccl_integer,
    parse_nccl_list,
)

RUNNING_SINCE = (2, 28, 3)
"""The first NCCL release that requires IFF_RUNNING and tries virbr* last."""

GID_AUTOMATIC_SINCE = (2, 21)
"""The first NCCL release that chooses the RoCE GID index itself; before, it was 0 unless set."""

AUTOMATIC = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
AUTOMATIC_BEFORE = ("ib", "^docker,lo", "docker", "lo")
"""Classes of interfaces that NCCL tries in turn; NCCL_COMM_ID's subnet comes after the first."""

CHOICE_SECTIONS = (SoftwareFacts, EnvironmentFacts, HostFacts, GpuFacts, TrainerFacts)
"""The sections that :func:`choice_of` reads besides NcclFacts and InterfaceFacts; the ``also`` of :meth:`Job.each`."""

CARRIES_NOTHING = frozenset({"loopback", "container-bridge", "virtual-bridge"})
"""Kinds of interfaces that never lead to another host."""


class InterfaceEndpoint(msgspec.Struct, frozen=True):
    """An interface and its address that would be used."""

    interface: Interface
    address: Address

    @property
    def text(self) -> str:
        """``eth0 (10.0.0.1)``."""
        return f"{self.interface.name} ({self.address.address})"


class NetworkChoice(msgspec.Struct, frozen=True):
    """The interfaces that a library would use; other ranks receive the ``first`` endpoint.

    ``variable``: the setting that selects them; ``value``: its value, ``None`` in automatic mode."""

    library: str
    variable: str
    value: str | None
    endpoints: tuple[InterfaceEndpoint, ...]
    setting: Setting | None = None

    @property
    def first(self) -> InterfaceEndpoint | None:
        """The endpoint that other ranks receive."""
        return self.endpoints[0] if self.endpoints else None


class RdmaChoice(NamedTuple):
    """A port of an RDMA device."""

    device: RdmaDevice
    port: RdmaPort

    @property
    def name(self) -> str:
        """As NCCL writes it: ``mlx5_0:1``."""
        return f"{self.device.name}:{self.port.number}"


def release_of(text: str | None) -> tuple[int, ...] | None:
    """``2.27.3`` or ``2.27.3+cuda12`` as numbers; ``None`` without a release."""
    return releases.release(text or "") or None


def _is_since(release: str | None, first: tuple[int, ...]) -> bool:
    """Whether the release is ``first`` or later; an unknown one counts as the newest."""
    known = release_of(release)
    return known is None or known >= first


@lru_cache(maxsize=1 << 17)
def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """An IP address without its zone; ``None`` if the text is not a valid one."""
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


@lru_cache(maxsize=1 << 17)
def network_of(address: Address) -> IPv4Network | IPv6Network | None:
    """The subnet of an interface's address; without a prefix length the address alone."""
    length = address.prefix_length
    return _network(address.address if length is None else f"{address.address}/{length}")


@lru_cache(maxsize=1 << 14)
def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def is_loopback(text: str) -> bool:
    """Whether the address never leaves the host."""
    address = parse_address(text)
    return address is not None and address.is_loopback


def _endpoints(interfaces: InterfaceFacts) -> Iterator[InterfaceEndpoint]:
    """Every address in the order of getifaddrs: IPv4 of all interfaces first, then IPv6 (RTM_GETADDR is answered family
    by family), within a family in the kernel's order of interfaces."""
    for family in ("inet", "inet6"):
        for interface in interfaces.interfaces:
            for address in interface.addresses:
                if address.family == family:
                    yield InterfaceEndpoint(interface, address)


def nccl_endpoints(
    nccl: NcclFacts, interfaces: InterfaceFacts, release: str | None = None
) -> tuple[InterfaceEndpoint, ...]:
    """The interfaces that NCCL of that ``release`` would choose, in its order, each with the address that it uses.

    The first one is used for the bootstrap; NET/Socket uses all. Empty if NCCL would fail. A host name in NCCL_COMM_ID
    is not resolved here and has no effect."""
    family, wants_carrier = nccl_socket_family(nccl.get("NCCL_SOCKET_FAMILY")), _is_since(release, RUNNING_SINCE)
    seen = [endpoint for endpoint in _endpoints(interfaces) if _nccl_sees(endpoint, family, wants_carrier)]
    chosen = nccl_interface_list(nccl.get("NCCL_SOCKET_IFNAME"))
    if chosen is not None:
        return _one_a_name(endpoint for endpoint in seen if chosen.selects(endpoint.interface.name))
    classes = AUTOMATIC if wants_carrier else AUTOMATIC_BEFORE
    for position, names in enumerate(classes):
        wanted = parse_nccl_list(names)
        found = _one_a_name(endpoint for endpoint in seen if wanted.selects(endpoint.interface.name))
        if not found and position == 0:
            found = _near_comm_id(nccl, interfaces)
        if found:
            return found
    return ()


def _nccl_sees(endpoint: InterfaceEndpoint, family: str | None, wants_carrier: bool) -> bool:
    if family is not None and endpoint.address.family != family:
        return False
    if endpoint.address.family == "inet6" and is_loopback(endpoint.address.address):
        return False
    return endpoint.interface.running or not wants_carrier


def _one_a_name(endpoints: Iterable[InterfaceEndpoint]) -> tuple[InterfaceEndpoint, ...]:
    first: dict[str, InterfaceEndpoint] = {}
    for endpoint in endpoints:
        first.setdefault(endpoint.interface.name, endpoint)
    return tuple(first.values())[:MAX_INTERFACES]


def _near_comm_id(nccl: NcclFacts, interfaces: InterfaceFacts) -> tuple[InterfaceEndpoint, ...]:
    """The first interface in the subnet of NCCL_COMM_ID (ncclFindInterfaceMatchSubnet has no other condition)."""
    text = nccl.get("NCCL_COMM_ID") or ""
    target = parse_address(text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0])
    if target is None:
        return ()
    near = (endpoint for endpoint in _endpoints(interfaces) if _contains(network_of(endpoint.address), target))
    return tuple(endpoint for endpoint, _ in zip(near, range(1), strict=False))


def _contains(network: IPv4Network | IPv6Network | None, address: IPv4Address | IPv6Address) -> bool:
    return network is not None and network.version == address.version and address in network


def gloo_endpoints(
    environment: EnvironmentFacts, interfaces: InterfaceFacts, host: HostFacts | None
) -> tuple[InterfaceEndpoint, ...]:
    """The addresses that Gloo would bind to.

    Those of GLOO_SOCKET_IFNAME (a missing interface is left out, though Gloo fails), else the first address of the
    host's own name that is local, else loopback."""
    names = gloo_names(environment.get("GLOO_SOCKET_IFNAME"))
    everything = tuple(_endpoints(interfaces))
    if names:
        by_name = {endpoint.interface.name: endpoint for endpoint in reversed(everything)}
        return tuple(by_name[name] for name in names if name in by_name)
    own = {endpoint.address.address: endpoint for endpoint in everything}
    named = next((name for name in host.names if name.role == "hostname"), None) if host else None
    for address in named.addresses if named else ():
        if address in own:
            return (own[address],)
        if is_loopback(address):
            break
    return tuple(endpoint for endpoint in everything if endpoint.address.address == "127.0.0.1")


@once_per_rank
def nccl_endpoints_of(member: Rank | IdenticalRanks) -> tuple[InterfaceEndpoint, ...]:
    """The interfaces that NCCL would choose on these ranks (see :func:`nccl_endpoints`); empty if they are unknown."""
    nccl, interfaces = member.find(NcclFacts), member.find(InterfaceFacts)
    return () if nccl is None or interfaces is None else nccl_endpoints(nccl, interfaces, nccl_release(member))


def nccl_release(member: Rank | IdenticalRanks) -> str | None:
    """The release of NCCL that torch would load on these ranks."""
    software = member.find(SoftwareFacts)
    return software.nccl if software else None


@once_per_rank
def nccl_matters(member: Rank | IdenticalRanks) -> bool:
    """Whether NCCL (or RCCL) may run: the ranks use GPUs, and GPUs exist or could not be detected."""
    if not uses_nccl(member):
        return False
    software = member.find(SoftwareFacts)
    if software is not None and software.torch is not None and software.torch.hip:
        return True
    missing = member.missing(GpuFacts)
    return missing is None or missing.lack is not MissingReason.ABSENT


@once_per_rank
def choice_of(member: Rank | IdenticalRanks) -> NetworkChoice | None:
    """The network of the training traffic: NCCL's if NCCL may run or has an interface setting, else Gloo's.

    ``None`` if interfaces or settings are unknown."""
    interfaces, nccl = member.find(InterfaceFacts), member.find(NcclFacts)
    environment = member.find(EnvironmentFacts)
    if interfaces is None:
        return None
    if nccl is not None and (nccl_matters(member) or nccl_interface_list(nccl.get("NCCL_SOCKET_IFNAME"))):
        setting = nccl.setting("NCCL_SOCKET_IFNAME")
        value = setting.value if setting and len(setting.value) > 1 else None
        found = nccl_endpoints_of(member)
        return NetworkChoice("NCCL", "NCCL_SOCKET_IFNAME", value, found, setting)
    if environment is None:
        return None
    value = environment.get("GLOO_SOCKET_IFNAME")
    found = gloo_endpoints(environment, interfaces, member.find(HostFacts))
    return NetworkChoice("Gloo", "GLOO_SOCKET_IFNAME", value if gloo_names(value) else None, found)


def is_usable(interface: Interface, family: str | None = None) -> bool:
    """Whether the interface is up, has a carrier and an address (of ``family``)."""
    wanted = any(family is None or address.family == family for address in interface.addresses)
    return interface.up and interface.running and wanted


def good_interfaces(interfaces: InterfaceFacts) -> tuple[Interface, ...]:
    """The interfaces to recommend: usable, with an address that other hosts can reach.

    Real devices come before virtual ones, then the one of the default route, then the fastest."""
    default = {route.interface for route in interfaces.routes if route.destination in ("0.0.0.0/0", "::/0")}
    usable = [
        one
        for one in interfaces.interfaces
        if is_usable(one) and one.kind not in CARRIES_NOTHING and one.kind != "dummy"
        if any(not (is_loopback(address.address) or needs_zone(address)) for address in one.addresses)
    ]
    real = [one for one in usable if one.physical] or usable
    return tuple(sorted(real, key=lambda one: (one.name not in default, -(one.speed or 0))))


def needs_zone(address: Address) -> bool:
    """Whether the address is link-local IPv6, which only works with an interface of the connecting host.

    Link-local IPv4 works between hosts on one cable or switch."""
    parsed = parse_address(address.address)
    return parsed is not None and parsed.version == 6 and parsed.is_link_local


def routed_ranges(interfaces: InterfaceFacts, version: int, *, default: bool = True) -> tuple[tuple[int, int], ...]:
    """The address ranges to which the host has a route: sorted, inclusive numbers that do not overlap.

    Its own subnets count, and with ``default`` the default route. ``version``: 4 or 6."""
    networks = [_network(route.destination) for route in interfaces.routes]
    networks = [network for network in networks if default or network is None or network.prefixlen]
    networks += [network_of(endpoint.address) for endpoint in _endpoints(interfaces) if endpoint.interface.up]
    spans = sorted(
        (int(network.network_address), int(network.broadcast_address))
        for network in networks
        if network is not None and network.version == version
    )
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def active_rdma_ports(rdma: RdmaFacts) -> tuple[RdmaChoice, ...]:
    """The ports that NCCL could use whatever the settings are: ACTIVE, InfiniBand or Ethernet, and accessible."""
    return tuple(
        RdmaChoice(device, port)
        for device in rdma.devices
        for port in device.ports
        if device.has_uverbs is not False
        and port.state == "ACTIVE"
        and port.link_layer in (None, "InfiniBand", "Ethernet")
    )


def nccl_rdma_ports(nccl: NcclFacts, rdma: RdmaFacts) -> tuple[RdmaChoice, ...]:
    """The ports that NCCL's own network IB would use with NCCL_IB_HCA; NCCL_IB_DISABLE is ignored here."""
    wanted = nccl_device_list(nccl.get("NCCL_IB_HCA"))
    chosen = (one for one in active_rdma_ports(rdma) if wanted.selects(one.device.name, one.port.number))
    return tuple(chosen)[:MAX_RDMA_DEVICES]


@once_per_rank
def rdma_ports_of(member: Rank | IdenticalRanks) -> tuple[RdmaChoice, ...]:
    """The ports that NCCL's own network IB would use on these ranks (see :func:`nccl_rdma_ports`)."""
    nccl, rdma = member.find(NcclFacts), member.find(RdmaFacts)
    return () if nccl is None or rdma is None else nccl_rdma_ports(nccl, rdma)


def loaded_net_plugin(nccl: NcclFacts) -> NcclPlugin | None:
    """The network plugin that would be tried before NCCL's own networks: it exists and has an interface."""
    return next((one for one in nccl.plugins if one.kind == "net" and one.path and not one.error), None)


def what_forces_sockets(nccl: NcclFacts) -> Setting | None:
    """The setting that makes NCCL's own networks use sockets.

    NCCL_NET=Socket, or NCCL_IB_DISABLE read as a number other than 0 (so ``true`` disables nothing). ``None`` if there
    is none, or a plugin replaces them."""
    network = nccl.setting("NCCL_NET")
    if network is not None and network.value.lower() == "socket":
        return network
    disable = nccl.setting("NCCL_IB_DISABLE")
    if disable is None or parse_nccl_integer(disable.value, 0) == 0 or loaded_net_plugin(nccl) is not None:
        return None
    return disable


def data_goes_by_sockets(nccl: NcclFacts, rdma: RdmaFacts | None) -> bool:
    """Whether NCCL would carry data between hosts over plain sockets, as far as known."""
    if what_forces_sockets(nccl) is not None:
        return True
    if loaded_net_plugin(nccl) is not None:
        return False
    return rdma is None or rdma.verbs_library is False or not nccl_rdma_ports(nccl, rdma)


@once_per_rank
def sends_data_by_sockets(member: Rank | IdenticalRanks) -> bool:
    """Whether NCCL would carry data between hosts over plain sockets there; false if its settings are unknown."""
    nccl = member.find(NcclFacts)
    return nccl is not None and data_goes_by_sockets(nccl, member.find(RdmaFacts))


def gid_index(nccl: NcclFacts, port: RdmaPort, release: str | None = None) -> int:
    """The index in the port's GID table that NCCL of that ``release`` would use on a RoCE port."""
    fixed = parse_nccl_integer(nccl.get("NCCL_IB_GID_INDEX"), -1)
    if fixed >= 0:
        return fixed
    if not _is_since(release, GID_AUTOMATIC_SINCE):
        return 0
    index = 0
    table = {gid.index: gid for gid in port.gids}
    for candidate in sorted(table):
        if candidate > 0 and _is_better_gid(nccl, table.get(index), table[candidate]):
            index = candidate
    return index


def _is_better_gid(nccl: NcclFacts, current: Gid | None, candidate: Gid) -> bool:
    """Whether NCCL prefers ``candidate`` (ncclUpdateGidIndex): the requested family, then the RoCE version."""
    family = 6 if nccl.get("NCCL_IB_ADDR_FAMILY") == "AF_INET6" else 4
    if gid_family(candidate) != family or not _in_range(nccl.get("NCCL_IB_ADDR_RANGE"), family, candidate):
        return False
    if current is None or gid_family(current) != family:
        return True
    wanted = f"RoCE v{parse_nccl_integer(nccl.get('NCCL_IB_ROCE_VERSION_NUM'), 2)}"
    moves = current.kind != candidate.kind or not is_routable_gid(current)
    return is_routable_gid(candidate) and moves and candidate.kind == wanted


def _in_range(text: str | None, family: int, gid: Gid) -> bool:
    network = _network(text) if text and "/" in text else None
    address = gid_address(gid)
    return network is None or network.version != family or (address is not None and address in network)


def gid_address(gid: Gid) -> IPv4Address | IPv6Address | None:
    """The IP address of a GID; IPv4 if it is a mapped one."""
    address = parse_address(gid.gid)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def gid_family(gid: Gid) -> int:
    """4 for a GID made from an IPv4 address, else 6."""
    address = gid_address(gid)
    return address.version if address else 6


def is_routable_gid(gid: Gid) -> bool:
    """Whether the GID is set and more than link-local (validGid)."""
    address = gid_address(gid)
    return address is not None and not address.is_unspecified and not address.is_link_local


def setting_text(setting: Setting) -> str:
    """A setting as in reports: ``NCCL_IB_DISABLE=1 (environment)`` or ``… (/etc/nccl.conf:3)``."""
    line = f":{setting.line}" if setting.line is not None else ""
    # ``NCCL_IB_HCA==mlx5_0`` reads as a slip.
    value = repr(setting.value) if " " in setting.value or setting.value.startswith("=") else setting.value
    return f"{setting.name}={value} ({setting.source}{line})"


def link_command(device: str) -> str:
    """The command that shows the cable and the link of an RDMA device. ``ibstat`` shows only the state and the rate of
    the local port; mlxlink (NVIDIA firmware tools) also shows the module (``-m``) and error counters (``-c``)."""
    return f"sudo mlxlink -d {device} -m -c" if device.startswith("mlx5") else f"ibstat {device}"


_OF_ITSELF = (
    (lazy_compile(r"lo\d*"), ("127.0.0.0/8", "::1/128"), "loopback"),
    (
        lazy_compile(r"docker\d*|podman\d*|br-[0-9a-f]{12}|veth\w*|cni\w*|cali\w*"),
        ("172.17.0.0/16",),
        "a container bridge",
    ),
    (lazy_compile(r"virbr\d*(?:-nic)?|vmnet\d*|vboxnet\d*|lxcbr\d*"), ("192.168.122.0/24",), "a virtual bridge"),
    (lazy_compile(r"usb\d*|idrac\w*"), ("169.254.0.0/16",), "a link local to this host"),
    (lazy_compile(r"(?:ip6tnl|tunl|sit|gre|gretap|erspan|ip_vti|ip6_vti)0"), (), "an unconnected tunnel"),
)
"""Names of interfaces and address ranges that every host has for itself: defaults of Docker and libvirt, the link-local
range of a service processor, and the tunnels of kernel modules."""


def leads_nowhere(interface: str | None, address: str | None) -> str | None:
    """The kind of an interface or address in a log if it can't carry traffic to another host, as text."""
    parsed = parse_address(address or "")
    for names, ranges, words in _OF_ITSELF:
        if interface and names.fullmatch(interface):
            return words
        if parsed is not None and any(_contains(_network(text), parsed) for text in ranges) and not interface:
            return words
    return None


_UNKNOWN_NAMES = ("host.name_unknown", "torch.host_not_found", "nccl.name_unknown", "net.name.pdsh", "net.name.windows")
_OWN_NAME = lazy_compile(r"^\s*hostname: |unable to resolve host (?P<name>[^\s:]+)")
"""Messages of `hostname -i` and sudo if the host can't resolve its own name."""
_OTHER_NAME = lazy_compile(r"[Cc]ould not resolve hostname (?P<name>[^\s:]+)|^pdsh@[^:\s]+: (?P<target>[\w.-]+): ")
"""Messages of ssh and pdsh, which name the host that they connect to."""
_OF_THE_WEB = lazy_compile(
    r"gai error|https?://|\b(?:curl|wget|git|pip|conda|apt(?:-get)?|fatal)\b|"
    r"\b(?:huggingface|github|gitlab|pypi|pythonhosted|wandb|comet|mlflow|neptune|googleapis|amazonaws|azure|docker|nvidia|"
    r"openai|modelscope|aliyuncs|ubuntu|debian|anaconda)\.\w"
)
"""Messages of torch's store, of programs that download something, and of the sites from which they do."""


class UnknownName(msgspec.Struct, frozen=True):
    """A name that a program could not resolve; ``own``: it is the host's own."""

    event: Event
    name: str | None
    error: str
    own: bool


def names_unknown(job: Job) -> tuple[UnknownName, ...]:
    """Names in logs that do not resolve, except those that torch's store reports itself, and those of web sites."""
    web = bool(events_of_kinds(job, "host.web_unreachable"))
    found = []
    for event in events_of_kinds(job, *_UNKNOWN_NAMES):
        if _OF_THE_WEB.search(event.text) or (web and "gaierror" in event.text):
            continue
        own = _OWN_NAME.search(event.text)
        stated = own or _OTHER_NAME.search(event.text)
        named = stated.groups() if stated else (event.value(field) for field in ("name", "host", "host2"))
        name = next((value for value in named if value), None)
        found.append(UnknownName(event, name, event.value("err") or "unknown name", own is not None))
    return tuple(found)


_GLOO_NAME = lazy_compile(r"Unable to find address for: (?P<name>\S+)")


def gloo_name_refused(event: Event) -> str | None:
    """The interface for which Gloo found no address, from its message; ``None`` if it is not named."""
    found = _GLOO_NAME.search(event.text)
    return found["name"] if found else None

"""NET008: the selected interfaces are down or have no address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from doctor.analysis.interface_choice import (
    CHOICE_SECTIONS,
    nccl_endpoints_of,
    nccl_matters,
    needs_zone,
    release_of,
    setting_text,
)
from doctor.analysis.logs.event_timeline import events_after
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    merge,
    source_of,
)
from doctor.core.text import HERE, lazy_compile
from doctor.facts import (
    Address,
    EnvironmentFacts,
    Interface,
    InterfaceFacts,
    MasterFacts,
    NcclFacts,
    Setting,
    SoftwareFacts,
)
from doctor.knowledge.interface_syntax import gloo_names, nccl_interface_list, nccl_socket_family
from doctor.testing import Fails, Passes, healthy, logged
from doctor_checks.network.interfaces._export_line import export_line, selecting_fix

_UP = Interface("eth1", addresses=(Address("inet", "10.1.0.1", 24),))
_LINK_LOCAL = Interface("eth0", addresses=(Address("inet6", "fe80::5054:ff:fe12:3456", 64),))
_DOWN = Interface("eth1", up=False, running=False, addresses=(Address("inet", "10.1.0.1", 24),))
_NO_CARRIER = Interface("eth1", running=False, addresses=(Address("inet", "10.1.0.1", 24),))


class _Terms(msgspec.Struct, frozen=True):
    family: str | None
    carrier: bool
    multi_host: bool


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "host.link_down", by=("if",)):
        last, name = group.events[-1], group.value("if")
        interface = found["name"] if (found := _LINK.search(group.first.text)) else name
        came_back = any(one.kind == "host.link_up" and one.value("if") == name for one in events_after(job, last))
        lost = next((one for one in events_after(job, group.first) if one.kind in _LOST), None)
        if came_back or lost is None:
            continue
        yield finding_from_logs(
            EventGroup(group.kind, (*group.events[:3], lost)),
            f"The link of {interface or 'an interface'}{group.on_hosts} went down, and "
            + (
                f"{lost.host} lost connections afterwards"
                if lost.host and not group.hosts
                else "connections were lost afterwards"
            ),
            ranks=(),
            fix=f"Check the cable and the switch port of {interface} with `sudo ethtool {interface}`"
            f"{group.on_hosts or ' on the host of this kernel log'}."
            if interface
            else "",
            confidence=0.7,
            explains=("NET013", "NET006", "NET020"),
        )
    for group in event_groups(job, "net.peer.connect_failed", by=("err",)):
        if group.value("err") == "Network is down":
            yield finding_from_logs(
                group, f"The interface that NCCL uses{group.on_hosts} is down", confidence=0.9, explains=("NET013",)
            )


_LINK = lazy_compile(r"\b(?P<name>[\w.-]{2,20}): (?:NIC )?[Ll]ink (?:is )?(?:[Dd]own|DOWN)")
"""The interface in a line of its driver, which is named first (``mlx5_core 0000:3b:00.0 eth2: Link down``)."""
_LOST = (
    "net.peer.connect_failed",
    "nccl.peer_closed",
    "nccl.peer_closed.old",
    "torch.nccl.watchdog_timeout",
    "torch.store.recv0",
    "torch.store.op_failed",
    "torch.store.connect_timeout",
    "gloo.closed",
    "gloo.timeout",
    "nccl.ib_wc",
)


@check(
    id="NET008",
    severity=Severity.ERROR,
    when="PM",
    needs=(InterfaceFacts,),
    from_logs=_from_logs,
    impacts={
        r"went down": "Ranks that use the link fail, or block until the timeout.",
        r"^No interface of": (
            "These ranks cannot connect to other hosts, whose ranks wait for them in init_process_group() until the "
            "timeout."
        ),
        r"is down|no carrier": (
            "NCCL fails with `no socket interface found`, or its connections get no response until the timeout."
        ),
        r"has no IPv\d address": (
            "NCCL fails with `no socket interface found`, and any other ranks wait for these ranks until the timeout."
        ),
        r"could not create a socket": (
            "NCCL fails on the rank when it starts, and the other ranks wait for it until the timeout."
        ),
        r"[Nn]o interface of .* is up": (
            "NCCL fails with `no socket interface found`, and any other ranks wait for these ranks until the timeout."
        ),
    },
    cases=lambda: (
        Passes("an idle interface is down", healthy(2, 2).alter(InterfaceFacts, interfaces=lambda old: (*old, _DOWN))),
        Passes(
            "one of two selected ones is up",
            healthy(2, 2)
            .alter(InterfaceFacts, interfaces=lambda old: (*old, _DOWN))
            .environ(NCCL_SOCKET_IFNAME="eth0,eth1"),
        ),
        Passes(
            "NCCL before 2.28.3 takes an interface without carrier on one host",
            healthy(1, 2)
            .alter(InterfaceFacts, interfaces=lambda old: (*old, _NO_CARRIER))
            .environ(NCCL_SOCKET_IFNAME="eth1"),
        ),
        Fails(
            "the selected interface is down on one host",
            healthy(2, 2)
            .alter(InterfaceFacts, hosts=("node0",), interfaces=lambda old: (*old, _UP))
            .alter(InterfaceFacts, hosts=("node1",), interfaces=lambda old: (*old, _DOWN))
            .environ(NCCL_SOCKET_IFNAME="=eth1"),
            ranks=(2, 3),
        ),
        Fails(
            "the cable is out",
            healthy(2, 1)
            .alter(InterfaceFacts, hosts=("node0",), interfaces=lambda old: (*old, _UP))
            .alter(InterfaceFacts, hosts=("node1",), interfaces=lambda old: (*old, _NO_CARRIER))
            .environ(NCCL_SOCKET_IFNAME="eth1"),
            ranks=(1,),
        ),
        Fails(
            "IPv6 is requested and no host has it",
            healthy(2, 1).environ(NCCL_SOCKET_FAMILY="AF_INET6", NCCL_SOCKET_IFNAME="eth0"),
            ranks=(0, 1),
        ),
        Fails(
            "IPv6 is asked for and no interface is named",
            healthy(1, 2).environ(NCCL_SOCKET_FAMILY="AF_INET6"),
            ranks=(0, 1),
        ),
        Fails(
            "IPv6 is requested and one host has only link-local addresses",
            healthy(1, 2).alter(InterfaceFacts, interfaces=(_LINK_LOCAL,)).environ(NCCL_SOCKET_FAMILY="AF_INET6"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "a link-local address that nothing asked for, on one host",
            healthy(1, 2).alter(InterfaceFacts, interfaces=(_LINK_LOCAL,)),
        ),
        Fails(
            "the DHCP lease is gone and IPv6 kept its link-local address",
            healthy(2, 2).alter(InterfaceFacts, hosts=("node1",), interfaces=(_LINK_LOCAL,)),
            ranks=(2, 3),
        ),
        Fails(
            "Gloo's interface has no address",
            healthy(2, 1)
            .alter(InterfaceFacts, interfaces=lambda old: (*old, Interface("eth1")))
            .environ(GLOO_SOCKET_IFNAME="eth1"),
            ranks=(0, 1),
        ),
        Passes(
            "no GPU and no setting: the host has another interface",
            healthy(2, 1, gpus=0).alter(InterfaceFacts, interfaces=lambda old: (*old, _DOWN)),
        ),
        Fails(
            "no GPU and no setting: the host is cut off",
            healthy(3, 1, gpus=0).alter(InterfaceFacts, hosts=("node2",), interfaces=lambda old: (old[0], _NO_CARRIER)),
            ranks=(2,),
        ),
        Passes(
            "a link that flaps while a host starts",
            logged(
                "[ 12.1] mlx5_core 0000:3b:00.0 eth2: Link down",
                "[ 15.1] mlx5_core 0000:3b:00.0 eth2: Link up",
                "node1:41:77 [0] NCCL INFO Bootstrap: Using eth2:10.0.0.1<0>",
            ),
        ),
        Passes("a port that nothing uses", logged("[ 12.1] ixgbe 0000:03:00.1 enp3s0f1: NIC Link is Down")),
        Fails(
            "a link that went down, and ranks that lost each other",
            logged(
                "[ 8812.1] mlx5_core 0000:3b:00.0 eth2: Link down",
                "node1:41:77 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer "
                "node2<41234>",
            ),
        ),
    ),
)
def interface_down(job: Job) -> Iterator[Verdict]:
    """Ask whether a selected interface is up and has an address of the family in use.

    Why it hurts: the library finds no address to listen on (`no socket interface found`, `Unable to find address for:
    eth1`), or it listens on an address that receives no packets, and the ranks block until the timeout.
    Fix: Bring the interface up and give it an address, or select one that `ip -br address` shows as UP.
    """
    found: list[Finding] = []
    for interfaces, identical in job.each(InterfaceFacts, also=(NcclFacts, MasterFacts, *CHOICE_SECTIONS)):
        named = [*_nccl(interfaces, identical, job.is_multi_host), *_gloo(interfaces, identical, job.is_multi_host)]
        if not named and job.is_multi_host and _is_cut_off(interfaces):
            named = [_nothing(interfaces, None, identical)]
        found += named
    yield from merge(found, job.place_of)


def _nccl(interfaces: InterfaceFacts, identical: IdenticalRanks, multi_host: bool) -> Iterator[Finding]:
    nccl = identical.find(NcclFacts)
    if nccl is None:
        return
    setting = nccl.setting("NCCL_SOCKET_IFNAME")
    family = nccl_socket_family(nccl.get("NCCL_SOCKET_FAMILY"))
    wanted = nccl_interface_list(setting.value) if setting else None
    if setting is None or wanted is None:
        found = nccl_endpoints_of(identical)
        usable = [one for one in found if not (multi_host and needs_zone(one.address))]
        if nccl_matters(identical) and interfaces.interfaces and not usable:
            yield _nothing(interfaces, family, identical)
        elif nccl_matters(identical):
            yield from _only_local(family, identical)
        return
    terms = _Terms(family, multi_host or _wants_carrier(identical), multi_host)
    chosen = [one for one in interfaces.interfaces if wanted.selects(one.name)]
    if chosen and not any(_why_unusable(one, terms) is None for one in chosen):
        yield Finding(
            _claim(setting, chosen, terms),
            ranks=identical.ranks,
            evidence={"interfaces": [one.name for one in interfaces.interfaces]},
            fix=_fix(chosen[0], "NCCL_SOCKET_IFNAME", interfaces, family),
            source=source_of(setting),
            explains=_consequences(chosen, identical),
        )
    else:
        yield from _only_local(family, identical)


def _claim(setting: Setting, chosen: list[Interface], terms: _Terms) -> str:
    reasons = _reasons(chosen, terms)
    if terms.family and "IPv" in reasons:
        return f"{_FAMILIES[terms.family]}: {reasons} ({setting.name})"
    return f"{setting_text(setting)}: {reasons}"


_FAMILIES = {"inet": "NCCL_SOCKET_FAMILY=AF_INET", "inet6": "NCCL_SOCKET_FAMILY=AF_INET6"}


def _only_local(family: str | None, identical: IdenticalRanks) -> Iterator[Finding]:
    """Report a forced address family with only link-local addresses, which work only within one host."""
    used = nccl_endpoints_of(identical)
    if family == "inet6" and used and all(needs_zone(one.address) for one in used):
        names = " and ".join(one.interface.name for one in used[:4])
        has = "has only a link-local IPv6 address" if len(used) == 1 else "have only link-local IPv6 addresses"
        yield Finding(
            f"NCCL_SOCKET_FAMILY=AF_INET6: {names} on {HERE} {has}",
            ranks=identical.ranks,
            evidence={"addresses": [one.text for one in used[:8]]},
            effect="NCCL works within each host, but cannot connect to other hosts.",
            fix="unset NCCL_SOCKET_FAMILY",
            severity=Severity.INFO,
        )


def _wants_carrier(identical: IdenticalRanks) -> bool:
    """Whether NCCL requires IFF_RUNNING: since 2.28.3 (src/os/linux.cc); an unknown release counts as older."""
    software = identical.find(SoftwareFacts)
    release = release_of(software.nccl if software else None)
    return release is not None and release >= (2, 28, 3)


def _nothing(interfaces: InterfaceFacts, family: str | None, identical: IdenticalRanks) -> Finding:
    others = [one for one in interfaces.interfaces if one.kind != "loopback"]
    reasons = _reasons(others[:2], _Terms(None, carrier=True, multi_host=True), place="")
    if family:
        kind = {"inet": "IPv4", "inet6": "IPv6"}[family]
        claim = f"{_FAMILIES[family]}, but no interface of {HERE} is up with an {kind} address"
    elif others and "None" not in reasons:
        claim = f"No interface of {HERE} can reach other hosts: {reasons}"
    else:
        claim = f"No interface of {HERE} is up with an address"
    return Finding(
        claim,
        ranks=identical.ranks,
        evidence={"interfaces": [one.name for one in interfaces.interfaces]},
        fix="unset NCCL_SOCKET_FAMILY" if family else _fix_of_all(interfaces),
        explains=_consequences(interfaces.interfaces, identical),
    )


def _fix_of_all(interfaces: InterfaceFacts) -> str:
    first = next((one for one in interfaces.interfaces if one.kind != "loopback"), None)
    if first is None:
        return f"Give {HERE} a network interface besides lo, for example with `docker run --network host`."
    if not first.up:
        return f"On {HERE}, bring up {first.name}:\nsudo ip link set {first.name} up"
    if not first.running:
        return f"Check the cable and the switch port of {first.name} on {HERE} with `sudo ethtool {first.name}`."
    return f"Give {first.name} on {HERE} an address that other hosts can reach."


def _is_cut_off(interfaces: InterfaceFacts) -> bool:
    terms = _Terms(None, carrier=True, multi_host=True)
    others = [one for one in interfaces.interfaces if one.kind != "loopback"]
    return bool(interfaces.interfaces) and all(_why_unusable(one, terms) is not None for one in others)


def _consequences(bad: Sequence[Interface], identical: IdenticalRanks) -> tuple[str, ...]:
    """Peers are unreachable over interfaces that are down, and so is the master if its route uses one of them."""
    master = identical.find(MasterFacts)
    way = master.interface if master is not None else None
    cut_off = way is None or way in {one.name for one in bad}
    return ("NET006", "NET013", "NET027") if cut_off else ("NET013", "NET027")


def _gloo(interfaces: InterfaceFacts, identical: IdenticalRanks, multi_host: bool) -> Iterator[Finding]:
    """Report unusable interfaces; Gloo binds to every name in the list, so one without an address is enough."""
    environment = identical.find(EnvironmentFacts)
    value = environment.get("GLOO_SOCKET_IFNAME") if environment else None
    if not value:
        return
    chosen = [one for name in gloo_names(value) if (one := interfaces.named(name)) is not None]
    terms = _Terms(None, multi_host, multi_host)
    bad = [one for one in chosen if _why_unusable(one, terms) is not None]
    if bad:
        yield Finding(
            f"GLOO_SOCKET_IFNAME={value}: {_reasons(bad, terms)}",
            ranks=identical.ranks,
            evidence={"interfaces": [one.name for one in interfaces.interfaces]},
            effect=f"Gloo fails with `Unable to find address for: {bad[0].name}`, and any other ranks block until the "
            "timeout."
            if bad[0].up and not bad[0].addresses
            else f"Gloo's connections over {bad[0].name} get no response until the timeout.",
            fix=_fix(bad[0], "GLOO_SOCKET_IFNAME", interfaces),
            explains=_consequences(bad, identical),
        )


def _why_unusable(interface: Interface, terms: _Terms) -> str | None:
    if not interface.up:
        return "is down"
    if terms.carrier and not interface.running:
        return "has no carrier"
    fitting = [address for address in interface.addresses if terms.family in (None, address.family)]
    if any(not (terms.multi_host and needs_zone(address)) for address in fitting):
        return None
    if fitting:
        return "has only a link-local address"
    return {"inet": "has no IPv4 address", "inet6": "has no IPv6 address"}.get(terms.family or "", "has no address")


def _reasons(chosen: list[Interface], terms: _Terms, place: str = f" on {HERE}") -> str:
    return ", ".join(f"{one.name}{place} {_why_unusable(one, terms)}" for one in chosen[:4])


def _fix(interface: Interface, variable: str, interfaces: InterfaceFacts, family: str | None = None) -> str:
    if interface.up and family and interface.addresses and not any(one.family == family for one in interface.addresses):
        kind = {"inet": "IPv4", "inet6": "IPv6"}[family]
        return f"Give {interface.name} on {HERE} an {kind} address, or run `unset NCCL_SOCKET_FAMILY`."
    other = export_line(variable, interfaces)
    if interface.up and not interface.running:
        check = (
            f"Check the cable and the switch port of {interface.name} on {HERE} with `sudo ethtool {interface.name}`"
        )
        return f"{check}, or select another interface with `{other}`." if other else f"{check}."
    if interface.up:
        return selecting_fix(variable, interfaces)
    up = f"sudo ip link set {interface.name} up"
    return (
        f"Run `{up}` on {HERE}, or select another interface with `{other}`."
        if other
        else f"On {HERE}, bring up {interface.name}:\n{up}"
    )

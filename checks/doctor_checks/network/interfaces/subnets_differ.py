"""NET010: interfaces in subnets without a route between them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_network

import msgspec

from doctor.analysis.interface_choice import (
    CARRIES_NOTHING,
    CHOICE_SECTIONS,
    InterfaceEndpoint,
    choice_of,
    network_of,
    parse_address,
    routed_ranges,
)
from doctor.analysis.logs.event_timeline import set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    check,
    conjunction,
    event_groups,
    finding_from_logs,
    hosts_text,
)
from doctor.facts import Address, Interface, InterfaceFacts, NcclFacts, Route
from doctor.testing import Fails, Passes, healthy, logged

_EAST = Interface("eth1", addresses=(Address("inet", "192.168.1.5", 24),))
_WEST = Interface("eth1", addresses=(Address("inet", "192.168.2.5", 24),))


def _isolated(number: int) -> InterfaceFacts:
    return InterfaceFacts(
        interfaces=(Interface("eth0", addresses=(Address("inet", f"10.{number}.0.1", 16),)),),
        routes=(Route(f"10.{number}.0.0/16", "eth0"),),
    )


def _joined(number: int) -> InterfaceFacts:
    gateway = Route("10.0.0.0/8", "eth0", f"10.{number}.255.254")
    return InterfaceFacts(interfaces=_isolated(number).interfaces, routes=(*_isolated(number).routes, gateway))


_DOWN = InterfaceFacts(interfaces=(Interface("eth0", up=False, addresses=(Address("inet", "10.0.0.2", 16),)),))


class _EndpointSubnet(msgspec.Struct, frozen=True):
    endpoint: InterfaceEndpoint
    interfaces: InterfaceFacts
    identical: IdenticalRanks
    address: IPv4Address | IPv6Address


def _by_choice(job: Job) -> Iterator[Finding]:
    events = [event for group in event_groups(job, "nccl.bootstrap.using") for event in group.events]
    used = {event.value("addr") or "": event.value("if") or "" for event in events}
    places = {event.value("addr") or "": event.host for event in events}
    chosen = {address: name for address, name in used.items() if parse_address(address) is not None}
    if len(set(map(_wide, chosen))) < 2:
        return
    named = [f"{name} ({address})" for address, name in sorted(chosen.items())]
    for group in event_groups(job, "net.peer.connect_failed", by=("host", "host2")):
        target = group.value("host", "host2") or ""
        if target in chosen and not set_up_after(job, group.events[-1]):
            other = next(
                text for text, address in zip(named, sorted(chosen), strict=True) if _wide(address) != _wide(target)
            )
            yield finding_from_logs(
                EventGroup(group.kind, (*events[:2], group.first)),
                f"NCCL uses interfaces in different subnets: {', '.join(named[:4])}",
                fix=f"On {places.get(target) or f'the host of {target}'}, set NCCL_SOCKET_IFNAME to the interface in "
                f"the subnet of {other}.",
                confidence=0.75,
                explains=("NET013", "NET008"),
            )
            return


def _says(host: str, name: str, address: str) -> tuple[str, ...]:
    return (f"{host}:41:77 [0] NCCL INFO Bootstrap: Using {name}:{address}<0>",)


def _wide(address: str) -> str:
    """The network that an address probably belongs to: that of a site, because racks have routes to each other."""
    parsed = parse_address(address)
    if parsed is None:
        return address
    return str(ip_network(f"{parsed}/{16 if parsed.version == 4 else 48}", strict=False))


@check(
    id="NET010",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="PM",
    needs=(InterfaceFacts, NcclFacts),
    needs_peers=True,
    from_logs=_by_choice,
    impacts={
        r"NCCL_COMM_ID": "The rank cannot connect to the root of NCCL's bootstrap, and NCCL fails when it starts.",
        r"only through the default route": (
            "If the gateway does not forward between the subnets, connections fail with `No route to host` or time out."
        ),
    },
    cases=lambda: (
        Passes("one subnet", healthy(hosts=2, per_host=2)),
        Passes(
            "two subnets with a router",
            healthy(2, 1).put(_joined(1), hosts=("node0",)).put(_joined(2), hosts=("node1",)),
        ),
        Passes("an interface that is down has no routes", healthy(2, 1).put(_DOWN, hosts=("node1",))),
        Fails(
            "two of three hosts share a subnet",
            healthy(3, 1)
            .put(_isolated(1), hosts=("node2",))
            .alter(InterfaceFacts, hosts=("node0", "node1"), routes=()),
            ranks=(2,),
        ),
        Fails(
            "two networks that never meet",
            healthy(2, 2).put(_isolated(1), hosts=("node0",)).put(_isolated(2), hosts=("node1",)),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "the second card of each host, and only the default route joins them",
            healthy(2, 1)
            .alter(InterfaceFacts, hosts=("node0",), interfaces=lambda old: (*old, _EAST))
            .alter(InterfaceFacts, hosts=("node1",), interfaces=lambda old: (*old, _WEST))
            .environ(NCCL_SOCKET_IFNAME="=eth1"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "racks with subnets of their own, and a route",
            logged(*_says("node1", "eth0", "10.0.1.5"), *_says("node2", "eth0", "10.0.2.5")),
        ),
        Fails(
            "one host takes the storage network",
            logged(
                *_says("node1", "eth0", "10.0.1.5"),
                *_says("node2", "ens9", "192.168.40.7"),
                "node1:41:77 [0] misc/socket.cc:484 NCCL WARN socketPollConnect: connect to 192.168.40.7<41234> "
                "returned Connection timed out, exceeded error retry count after 35 attempts",
            ),
        ),
    ),
)
def subnets_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether the interfaces that the ranks would use can reach each other.

    Why it hurts: connections between the subnets fail with `No route to host` or time out, and the job hangs at
    startup.
    Fix: Set NCCL_SOCKET_IFNAME on every host to an interface of one common subnet, or add the missing routes.
    """
    if not job.is_multi_host:
        yield Skip("one host")
        return
    members = []
    for interfaces, _, identical in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        note = interfaces.why_hidden("routes")
        member = _member(interfaces, identical)
        if note is not None:
            yield Unknown(note.reason, identical.ranks, note.unhide or "ip route")
        elif member is not None:
            members.append(member)
    for version in (4, 6):
        yield from _judge([member for member in members if member.address.version == version])


def _member(interfaces: InterfaceFacts, identical: IdenticalRanks) -> _EndpointSubnet | None:
    choice = choice_of(identical)
    endpoint = choice.first if choice else None
    address = parse_address(endpoint.address.address) if endpoint else None
    if endpoint is None or address is None or address.is_link_local:
        return None
    if endpoint.interface.kind in CARRIES_NOTHING or not endpoint.interface.up:
        return None  # NET009 and NET008 report these
    return _EndpointSubnet(endpoint, interfaces, identical, address)


def _judge(members: Sequence[_EndpointSubnet]) -> Iterator[Finding]:
    addresses = sorted(int(member.address) for member in members)
    stranded: list[_EndpointSubnet] = []
    rest: list[_EndpointSubnet] = []
    for member in members:
        (stranded if _misses(member, addresses, default=True) else rest).append(member)
    doubtful = [one for one in rest if _leaves_elsewhere(one) and _misses(one, addresses, default=False)]
    sizes: Counter[str] = Counter()
    for member in members:
        sizes[str(network_of(member.endpoint.address))] += len(member.identical.members)
    if stranded:
        blamed = _outside_the_largest(stranded, sizes)
        yield _finding(f"No route between the subnets {conjunction(list(sizes)[:3])}", blamed, sizes, None)
    if doubtful:
        names = ", ".join(dict.fromkeys(member.endpoint.interface.name for member in doubtful))
        claim = f"The subnets of {names} are connected only through the default route of another interface"
        yield _finding(claim, doubtful, sizes, Severity.INFO)


def _misses(member: _EndpointSubnet, addresses: Sequence[int], *, default: bool) -> bool:
    """Whether any of ``addresses`` (sorted) is outside the routes of the host."""
    ranges = routed_ranges(member.interfaces, member.address.version, default=default)
    return sum(bisect_right(addresses, end) - bisect_left(addresses, start) for start, end in ranges) < len(addresses)


def _leaves_elsewhere(member: _EndpointSubnet) -> bool:
    defaults = [route.interface for route in member.interfaces.routes if route.destination in ("0.0.0.0/0", "::/0")]
    return bool(defaults) and member.endpoint.interface.name not in defaults


def _outside_the_largest(members: list[_EndpointSubnet], sizes: Counter[str]) -> list[_EndpointSubnet]:
    """The members outside the largest subnet; all of them if none is the largest, or if all are in it.

    A baseline does not help: another job may have run on other hosts."""
    top = sizes.most_common(2)
    if len(top) == 2 and top[0][1] == top[1][1]:
        return members
    return [member for member in members if str(network_of(member.endpoint.address)) != top[0][0]] or members


def _finding(claim: str, members: list[_EndpointSubnet], sizes: Counter[str], severity: Severity | None) -> Finding:
    return Finding(
        claim,
        ranks=tuple(sorted(rank for member in members for rank in member.identical.ranks)),
        severity=severity,
        confidence=1.0 if severity is None else 0.5,
        evidence={
            "addresses": [f"{hosts_text(member.identical.hosts)}: {member.endpoint.text}" for member in members[:8]],
            "ranks_by_subnet": dict(sizes.most_common(8)),
        },
        fix="Set NCCL_SOCKET_IFNAME on every host to an interface of one common subnet, or add routes between "
        f"{conjunction(list(sizes)[:3])}.",
        explains=("NET013",),
    )

"""Plan which hosts connect, and at which address: the same on every host, from the facts of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from doctor.analysis.interface_choice import (
    InterfaceEndpoint,
    choice_of,
    gloo_endpoints,
    good_interfaces,
    is_loopback,
    needs_zone,
)
from doctor.analysis.visible_devices import backend_asked
from doctor.core.facts import EnvironmentFacts, HostFacts, InterfaceFacts, MasterFacts
from doctor.core.job import Job, Rank
from doctor.knowledge.interface_syntax import gloo_names
from doctor.probes.reachability.assignments import Agent, Assignment, MasterTarget, ProbeTarget
from doctor.probes.responder.wire_format import LARGEST

ALL_PAIRS = 32
"""Number of hosts up to which all pairs connect: 992 paths. In larger jobs each has about 2 log2(hosts)."""

PACKETS = 2
"""Packets of full size that a burst fills."""

SMALLEST_BURST = 8 << 10

USUAL_MTU = 9000
"""Bytes, if the MTU is unknown: the largest usual one."""

PORTS = range(1, 65536)


class ConnectAddress(NamedTuple):
    """An address of a host, and the library that would connect to it; ``None`` if unknown."""

    address: str | None
    library: str | None = None


class ProbeNode(NamedTuple):
    """A host that takes part: its agent, and its addresses; the first is the one that carries the training."""

    agent: Agent
    member: Rank
    dials: tuple[ConnectAddress, ...]

    @property
    def name(self) -> str:
        """Name of the host."""
        return self.member.host.name


def plan_light(job: Job, agents: Iterable[Agent]) -> tuple[Assignment, ...]:
    """Return an assignment for the agent of every host, in the order of ``agents``; none for fewer than two hosts."""
    agents = tuple(agents)
    nodes = [*nodes_of(job, agents)]
    if len(nodes) < 2:
        return ()
    zero = _zero(job)
    facts = zero.find(MasterFacts) if zero is not None else None
    is_listened_to = facts is not None and facts.listener is not None
    to_hold = facts.port if facts is not None and not is_listened_to and facts.port in PORTS else None
    # MASTER_PORT is held on the host of rank 0, unless a listener was seen there.
    ports = [to_hold if zero is not None and node.member.host is zero.host else None for node in nodes]
    held = is_listened_to or any(ports)
    assignments = {
        node.agent: Assignment(
            rank=node.agent.rank,
            host=node.name,
            targets=(*_targets(nodes, place, main=True), *_targets(nodes, place, main=False)),
            reference=nodes[reference_of(place, len(nodes))].name if place else None,
            master=_master(node.member, zero, held),
            hold_port=port,
            burst=_burst(node.member),
        )
        for place, (node, port) in enumerate(zip(nodes, ports, strict=True))
    }
    return tuple(assignments[agent] for agent in dict.fromkeys(agents) if agent in assignments)


def _zero(job: Job) -> Rank | None:
    """Return rank 0; of several that claim to be, one on the host to which MASTER_ADDR leads."""
    claimants = [rank for rank in job.ranks if rank.number == 0]
    at_home = (rank for rank in claimants if (facts := rank.find(MasterFacts)) is not None and facts.is_local)
    return next(at_home, claimants[0] if claimants else None)


def partners(place: int, count: int) -> list[int]:
    """Return the places that ``place`` of ``count`` connects to, those that follow it first.

    In a large job those whose distance along the ring is a power of two (the chords of Stoica et al., 2001): each place
    has at most 2 log2(count) partners, is a partner of all of them, and is at most log2(count) steps from any other.
    """
    if count <= ALL_PAIRS:
        return [(place + step) % count for step in range(1, count)]
    steps = [1 << power for power in range((count - 1).bit_length())]
    both = [(place + sign * step) % count for step in steps for sign in (1, -1)]
    return list(dict.fromkeys(both))


def reference_of(place: int, count: int) -> int:
    """Return the place whose clock ``place`` compares its own with: the first.

    In a large job it is a nearer partner, the place without its lowest bit, so that not thousands ask one.
    """
    return 0 if count <= ALL_PAIRS else place & (place - 1)


def nodes_of(job: Job, agents: Iterable[Agent]) -> Iterator[ProbeNode]:
    """Return the hosts of ``job`` that have an agent, in the order of the job; of several agents the first counts."""
    local = job.by_host()
    by_host = {agent.host: agent for agent in reversed(tuple(agents))}
    for host in sorted(by_host):
        if 0 <= host < len(local) and local[host].members:
            agent, members = by_host[host], local[host].members
            member = next((rank for rank in members if rank.number == agent.rank), members[0])
            yield ProbeNode(agent, member, tuple(_dials(member)))


def _dials(member: Rank) -> Iterator[ConnectAddress]:
    """Return the addresses at which NCCL or Gloo on other hosts would reach this rank.

    If they are unknown or unusable it is an address of its host. Gloo follows NCCL if settings ask for it.
    """
    choice = choice_of(member)
    chosen = _dialled(choice.endpoints) if choice is not None else None
    main = (
        ConnectAddress(chosen, choice.library)
        if choice is not None and chosen
        else ConnectAddress(_any_address(member))
    )
    yield main
    gloo = _gloo_address(member) if choice is not None and choice.library == "NCCL" else None
    if gloo is not None and gloo != main.address:
        yield ConnectAddress(gloo, "Gloo")


def _dialled(endpoints: Sequence[InterfaceEndpoint]) -> str | None:
    """Return the address that others are given; ``None`` for one that no other host can use, a fault of its own."""
    address = endpoints[0].address if endpoints else None
    return None if address is None or is_loopback(address.address) or needs_zone(address) else address.address


def _gloo_address(member: Rank) -> str | None:
    environment, interfaces = member.find(EnvironmentFacts), member.find(InterfaceFacts)
    if environment is None or interfaces is None:
        return None
    asked = gloo_names(environment.get("GLOO_SOCKET_IFNAME")) or "gloo" in (backend_asked(member) or "")
    return _dialled(gloo_endpoints(environment, interfaces, member.find(HostFacts))) if asked else None


def _any_address(member: Rank) -> str | None:
    """Return an address of the best interface, or one that the host name resolves to there."""
    interfaces, host = member.find(InterfaceFacts), member.find(HostFacts)
    for interface in good_interfaces(interfaces) if interfaces else ():
        for address in interface.addresses:
            if not is_loopback(address.address) and not needs_zone(address):
                return address.address
    own = (address for name in (host.names if host else ()) for address in name.addresses)
    return next((address for address in own if not is_loopback(address)), None)


def _targets(nodes: Sequence[ProbeNode], place: int, *, main: bool) -> Iterator[ProbeTarget]:
    for partner in partners(place, len(nodes)):
        peer = nodes[partner]
        for dial in peer.dials[:1] if main else peer.dials[1:]:
            yield ProbeTarget(peer.name, dial.address, peer.agent.port, peer.agent.word, dial.library, measured=main)


def _master(member: Rank, zero: Rank | None, held: bool) -> MasterTarget | None:
    """Return the master of this rank; ``held``: a listener is expected there."""
    facts = member.find(MasterFacts)
    if facts is None or not facts.address or facts.port is None or facts.port not in PORTS:
        return None
    return MasterTarget(facts.address, facts.port, peer=zero.host.name if zero else "", held=held)


def _burst(member: Rank) -> int:
    """Return the bytes that fill several packets of the largest MTU of this host, loopback aside."""
    interfaces = member.find(InterfaceFacts)
    sizes = [one.mtu or 0 for one in (interfaces.interfaces if interfaces else ()) if one.kind != "loopback" and one.up]
    return min(LARGEST, max(SMALLEST_BURST, PACKETS * (max(sizes, default=0) or USUAL_MTU)))

"""ENV006: ranks use different master addresses or ports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from doctor.analysis.interface_choice import is_loopback, parse_address
from doctor.analysis.logs.event_timeline import set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    Host,
    Job,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    ranks_in_words,
)
from doctor.facts import Address, Event, Interface, InterfaceFacts, MasterFacts
from doctor.testing import Fails, Passes, healthy, logged

MOST_FINDINGS = 8
"""Endpoints reported separately; more have a common cause, such as localhost on every host."""


class MasterEndpoint(NamedTuple):
    """The master endpoint of a rank: a host of the job by its index, else addresses; and the port."""

    host: int | None
    addresses: tuple[str, ...]
    port: int | None


class ReportedMaster(NamedTuple):
    """The master address configured on one rank, as reports show it."""

    told: str
    address: str
    rank: int
    host: Host


def _by_commands(job: Job) -> Iterator[Finding]:
    """Report start commands of several hosts with different masters.

    Two consecutive jobs use the same node rank, so their commands are not compared.
    """
    masters = {(one.file, one.line): one.value("host") for one in _given(job, "launch.master_given")}
    nodes = {(one.file, one.line): one.value("node") for one in _given(job, "launch.node_given")}
    pairs = {(str(nodes[place]), str(master)) for place, master in masters.items() if place in nodes}
    if len(dict(pairs)) > 1 and len({master for _, master in pairs}) > 1:
        (group,) = event_groups(job, "launch.master_given")
        yield _differing(group, {f"host {node}": master for node, master in sorted(pairs)}, 0.9)


def _by_attempts(job: Job) -> Iterator[Finding]:
    """Report ranks that time out while connecting to different masters.

    A name and an address may refer to the same host, so only addresses are compared.
    """
    for group in event_groups(job, "torch.store.connect_timeout"):
        waiting = {
            (f"rank {event.rank}" if event.rank is not None else event.host or event.file): event.value("host") or ""
            for event in group.events
            if not set_up_after(job, event)
        }
        addresses = {who: host for who, host in waiting.items() if parse_address(host) is not None}
        if len(set(addresses.values())) > 1:
            yield _differing(group, addresses, 0.8)


def _waits(rank: int, master: str) -> str:
    return f"[rank{rank}]: The client socket has timed out after 300000ms while trying to connect to ({master}, 29500)."


def _differing(group: EventGroup, masters: dict[str, str], confidence: float) -> Finding:
    return finding_from_logs(
        group,
        f"Hosts are configured with different masters: {', '.join(sorted(set(masters.values())))}",
        ranks=(),
        evidence={"masters": masters},
        confidence=confidence,
        fix=f"Use the master of host 0, `--master-addr={shlex.quote(masters['host 0'])}`, on all hosts."
        if "host 0" in masters
        else "Use the same master on all hosts: an address of the host with node rank 0.",
        explains=("NET006", "ENV005", "ENV015"),
    )


def _given(job: Job, kind: str) -> tuple[Event, ...]:
    return job.evidence.of(kind) if job.evidence else ()


@check(
    id="ENV006",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(MasterFacts,),
    from_logs=(_by_commands, _by_attempts),
    impacts={
        r"connects? to itself|\((?:::1|127\.[\d.]+) on ": (
            "Each host connects to itself, so its ranks wait for the ranks of the other hosts until the timeout."
        ),
    },
    cases=lambda: (
        Passes("one address for all", healthy(hosts=2, per_host=2)),
        Passes(
            "the master's own host resolves its name to loopback",
            healthy(hosts=2, per_host=2).alter(MasterFacts, ranks=(0, 1), resolved=("127.0.1.1",)),
        ),
        Passes(
            "the master's address is also that of a bridge elsewhere",
            healthy(hosts=3, per_host=1).alter(InterfaceFacts, hosts=("node2",), interfaces=_with_address_of_node0),
        ),
        Passes(
            "one host knows the master by another name",
            healthy(hosts=3, per_host=2).alter(MasterFacts, ranks=(2, 3), address="node0.cluster"),
        ),
        Fails(
            "each host uses its own address",
            healthy(hosts=2, per_host=2).alter(
                MasterFacts, ranks=(2, 3), address="10.0.0.2", resolved=("10.0.0.2",), is_local=True
            ),
            ranks=(2, 3),
        ),
        Fails(
            "localhost on every host",
            healthy(hosts=3, per_host=1).alter(
                MasterFacts, address="localhost", resolved=("::1", "127.0.0.1"), is_local=True
            ),
            ranks=(1, 2),
        ),
        Fails(
            "localhost on many hosts: one finding",
            healthy(hosts=12, per_host=1).alter(
                MasterFacts, address="localhost", resolved=("127.0.0.1",), is_local=True
            ),
            ranks=tuple(range(1, 12)),
        ),
        Fails(
            "a stale /etc/hosts on one host",
            healthy(hosts=3, per_host=2).alter(MasterFacts, ranks=(4, 5), resolved=("192.168.7.9",)),
            ranks=(4, 5),
        ),
        Fails(
            "one rank has another port",
            healthy(hosts=2, per_host=2).alter(MasterFacts, ranks=(0,), port=29501),
            ranks=(0,),
        ),
        Passes(
            "commands of two hosts that name one master",
            logged(
                "python -m torch.distributed.launch --nnodes=2 --node_rank=0 --master_addr=10.1.0.3 train.py",
                "python -m torch.distributed.launch --nnodes=2 --node_rank=1 --master_addr=10.1.0.3 train.py",
            ),
        ),
        Passes(
            "two jobs, one after the other",
            logged(
                "torchrun --nnodes=2 --node-rank=0 --master-addr=10.1.0.3 train.py",
                "torchrun --nnodes=2 --node-rank=0 --master-addr=10.1.0.7 train.py",
            ),
        ),
        Passes(
            "ranks that wait for one master",
            logged(*(_waits(rank, "10.1.0.3") for rank in (1, 2))),
        ),
        Fails("each waits for another master", logged(_waits(0, "10.1.0.3"), _waits(8, "10.1.0.4"))),
        Fails(
            "each host uses itself",
            logged(
                "torchrun --nnodes=2 --node-rank=0 --master-addr=10.1.0.3 --master-port=29501 train.py",
                "torchrun --nnodes=2 --node-rank=1 --master-addr=10.1.0.4 --master-port=29501 train.py",
            ),
        ),
    ),
)
def master_disagrees(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks use the same master address and port.

    Why it hurts: ranks that use a different master wait for a store that does not exist, while the others wait for
    them.
    Fix: Set MASTER_ADDR to the name of the host of rank 0 on every host, not to localhost.
    """
    owners = _owners(job)
    places: dict[MasterEndpoint, list[ReportedMaster]] = {}
    for master, identical in job.each(MasterFacts):
        told, known = f"{master.address}:{master.port}", dict[int, MasterEndpoint]()
        for rank in identical.members if master.resolved else ():
            place = known.get(rank.host.index) or known.setdefault(rank.host.index, _place(master, rank.host, owners))
            places.setdefault(place, []).append(ReportedMaster(told, master.resolved[0], rank.number, rank.host))
    right = _right(job, places)
    if right is not None:
        # Ranks that use an address at which the master's host finds itself share its endpoint, even if no interface
        # shows it: a second host has the same address, or network address translation is in use.
        own = {look.address for look in places[right] if right.host is not None}
        own = {address for address in own if not is_loopback(address)}
        for place in [place for place in places if place.host is None and place.port == right.port]:
            if own.intersection(place.addresses):
                places[right] += places.pop(place)
    if len(places) < 2 or _meet_somewhere(places):
        return
    if right is not None and right.host is not None and right.host not in owners.known:
        yield Unknown("the addresses of the master's host are unknown", unhide="collect the interfaces of every host")
        return
    wrong = [looks for place, looks in places.items() if place != right]
    where = ""
    if len(wrong) > MOST_FINDINGS:
        where = f"{len(wrong)} different masters"
        wrong = [[look for looks in wrong for look in looks]]
    for looks in wrong:
        yield _report(looks, places.get(right) if right else None, where)


class Owners(NamedTuple):
    """The host that owns each address, if it is unique, and the hosts whose addresses are known."""

    of: dict[str, int]
    known: set[int]


def _owners(job: Job) -> Owners:
    """Addresses that several hosts have (container bridges) identify no host."""
    owners: dict[str, set[int]] = {}
    known: set[int] = set()
    for host in job.hosts:
        interfaces = host.find(InterfaceFacts)
        if interfaces is not None:
            known.add(host.index)
        for interface in interfaces.interfaces if interfaces else ():
            for address in interface.addresses:
                owners.setdefault(address.address, set()).add(host.index)
    return Owners({address: next(iter(hosts)) for address, hosts in owners.items() if len(hosts) == 1}, known)


def _place(master: MasterFacts, host: Host, owners: Owners) -> MasterEndpoint:
    """A rank whose master is on its own host uses that host, whatever the name resolves to."""
    if master.is_local or all(is_loopback(address) for address in master.resolved):
        return MasterEndpoint(host.index, (), master.port)
    owner = next((owners.of[address] for address in master.resolved if address in owners.of), None)
    addresses = tuple(sorted(master.resolved)) if owner is None else ()
    return MasterEndpoint(owner, addresses, master.port)


def _right(job: Job, places: dict[MasterEndpoint, list[ReportedMaster]]) -> MasterEndpoint | None:
    """The endpoint on the host of rank 0, which hosts the store; else that of most ranks. ``None``: a tie.

    A baseline does not help: every job has its own master."""
    home = next((rank.host.index for rank in job.ranks if rank.number == 0), None)
    at_home = {place: looks for place, looks in places.items() if place.host == home and home is not None}
    ordered = sorted((at_home or places).items(), key=lambda item: -len(item[1]))
    if len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1]):
        return None
    return ordered[0][0] if ordered else None


def _meet_somewhere(places: dict[MasterEndpoint, list[ReportedMaster]]) -> bool:
    """Whether a name with several addresses (round robin) resolves to one that all ranks share."""
    if len({place.port for place in places}) > 1 or any(place.host is not None for place in places):
        return False
    return bool(set.intersection(*(set(place.addresses) for place in places)))


def _report(looks: list[ReportedMaster], right: list[ReportedMaster] | None, where: str) -> Finding:
    first, ranks = looks[0], tuple(look.rank for look in looks)
    elsewhere = f", the others {_shown(right[0])}" if right else ", without a majority"
    if where:
        elsewhere = f" instead of {_shown(right[0])}" if right else ""
    verb = "uses" if len(ranks) == 1 else "use"
    summary = f"{ranks_in_words(ranks).capitalize()} {verb} {where or f'master {_shown(first)}'}{elsewhere}"
    hosts = {look.host.name for look in looks}
    own = is_loopback(first.address) and {look.told for look in (*looks, *(right or ()))} == {first.told}
    if own and len(hosts) > 1:
        summary = f"The master is {first.told} on {len(hosts) + bool(right)} hosts: each host connects to itself"
    return Finding(
        summary,
        ranks=ranks,
        evidence={
            "told": first.told,
            "resolved": first.address,
            "on_host": first.host.name if len(hosts) > 1 and not own else None,
            "elsewhere_told": right[0].told if right else None,
            "elsewhere_resolved": right[0].address if right else None,
        },
        fix=_fix(ranks, looks, right[0]) if right else "",
        explains=() if is_loopback(first.address) else ("NET006",),  # NET005 explains loopback
    )


def _fix(ranks: tuple[int, ...], looks: list[ReportedMaster], right: ReportedMaster) -> str:
    odd = looks[0]
    name, _, port = right.told.rpartition(":")
    name, port = shlex.quote(name), shlex.quote(port)
    if is_loopback(right.address):
        host = shlex.quote(right.host.name)
        return f"Set MASTER_ADDR to {host}, the host of rank 0, on every host:\nexport MASTER_ADDR={host}"
    export = f"export MASTER_ADDR={name} MASTER_PORT={port}"
    if odd.told.rpartition(":")[0] != right.told.rpartition(":")[0] or odd.address == right.address:
        hosts = {look.host.name for look in looks}
        where = f" ({odd.host.name})" if len(hosts) == 1 else ""
        return f"Use the master of the other ranks on {ranks_in_words(ranks)}{where} as well:\n{export}"
    return f"On {odd.host.name}, correct DNS or /etc/hosts so that `getent ahosts {name}` prints {right.address}."


def _with_address_of_node0(old: tuple[Interface, ...]) -> tuple[Interface, ...]:
    return (*old, Interface("br-lab", "container-bridge", addresses=(Address("inet", "10.0.0.1", 24),)))


def _shown(look: ReportedMaster) -> str:
    name, _, port = look.told.rpartition(":")
    place = f" ({look.address} on {look.host.name})" if is_loopback(look.address) else f" ({look.address})"
    return f"{name}:{port}" + ("" if look.address == name else place)

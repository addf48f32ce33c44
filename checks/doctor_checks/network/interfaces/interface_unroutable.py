"""NET009: the interface in use does not reach other hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from doctor.analysis.interface_choice import (
    CARRIES_NOTHING,
    CHOICE_SECTIONS,
    InterfaceEndpoint,
    NetworkChoice,
    choice_of,
    gloo_endpoints,
    leads_nowhere,
    needs_zone,
    parse_address,
    sends_data_by_sockets,
)
from doctor.analysis.logs.event_timeline import set_up_after, spans_hosts
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Verdict,
    check,
    conjunction,
    event_groups,
    finding_from_logs,
    merge,
    source_of,
)
from doctor.core.text import HERE
from doctor.facts import (
    Address,
    EnvironmentFacts,
    HostFacts,
    Interface,
    InterfaceFacts,
    NameLookup,
    NcclFacts,
    RdmaFacts,
    SoftwareFacts,
)
from doctor.knowledge.interface_syntax import gloo_names
from doctor.testing import Fails, Passes, healthy, logged
from doctor_checks.network.interfaces._export_line import selecting_fix

_LOOPBACK = Interface("lo", "loopback", physical=False, addresses=(Address("inet", "127.0.0.1", 8),))
_DOCKER = Interface("docker0", "container-bridge", physical=False, addresses=(Address("inet", "172.17.0.1", 16),))
_COMPOSE = Interface(
    "br-0a1b2c3d4e5f", "container-bridge", physical=False, addresses=(Address("inet", "172.18.0.1", 16),)
)
_BRIDGED = Interface("eth0", "veth", physical=False, addresses=(Address("inet", "172.17.0.2", 16),))
_CABLE = Interface(
    "veth25f2e72", "veth", physical=False, addresses=(Address("inet6", "fe80::380d:bfff:fe5b:54d2", 64),)
)
_BOARD = Interface("enx3a0b", addresses=(Address("inet", "169.254.3.1", 24),))
_LIBVIRT = Interface("virbr0", "virtual-bridge", physical=False, addresses=(Address("inet", "192.168.122.1", 24),))


class _ChosenInterface(msgspec.Struct, frozen=True):
    choice: NetworkChoice
    interfaces: InterfaceFacts
    identical: IdenticalRanks
    all_carry: bool


def _by_choice(job: Job) -> Iterator[Finding]:
    """Report an NCCL interface that other hosts cannot reach; on one host any interface works."""
    for group in event_groups(job, "nccl.bootstrap.using", by=("if",)):
        name, address = group.value("if"), group.value("addr")
        words, last = leads_nowhere(name, address), group.events[-1]
        if words is None or set_up_after(job, last):
            continue
        failed = event_groups(job, "net.peer.connect_failed", by=_TARGETS)
        if spans_hosts(job) or any(
            _target(group) == address and "efused" not in (group.value("err") or "") for group in failed
        ):
            yield finding_from_logs(
                group,
                f"NCCL uses {name} ({address}, {words}): other hosts cannot reach it",
                confidence=0.85,
                fix=_FIX if words in ("loopback", "a container bridge") else _excluding(name or ""),
                explains=("NET008", "NET013", "NET010"),
            )


def _by_attempts(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "net.peer.connect_failed", by=_TARGETS):
        address = _target(group)
        words = leads_nowhere(None, address)
        if words is None or address.startswith("127.0.1.") or set_up_after(job, group.events[-1]):
            continue
        # A refused connection to the own host means that a process ended; other errors concern a peer on another host.
        if words != "loopback" or spans_hosts(job) or "refused" not in (group.value("err") or ""):
            yield finding_from_logs(
                group,
                f"{address} {_placed(words)}: other hosts cannot connect to it",
                confidence=0.8 if spans_hosts(job) else 0.7,
                fix="Start the containers with `docker run --network host`, or connect them to an overlay network."
                if words == "a container bridge"
                else _FIX,
                explains=("NET013", "NET010"),
            )


def _placed(words: str) -> str:
    placed = {"loopback": "is a loopback address", "a link local to this host": "is a link-local address"}
    return placed.get(words, f"is in the default subnet of {words}")


def _bootstrap(name: str, *addresses: str) -> list[str]:
    return [
        f"node{number}:41:77 [0] NCCL INFO Bootstrap: Using {name}:{address}<0>"
        for number, address in enumerate(addresses, 1)
    ]


_TARGETS = ("host", "host2", "host3", "remote")
_FIX = (
    "Set NCCL_SOCKET_IFNAME on every host to the interface that connects the hosts (`ip -br address` lists the "
    "interfaces)."
)


def _excluding(name: str) -> str:
    return f"Exclude {name} on all hosts:\nexport NCCL_SOCKET_IFNAME='^lo,docker,{name}'"


def _target(group: EventGroup) -> str:
    return group.value("remote", "host") or group.value("host2", "host3") or ""


@check(
    id="NET009",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(InterfaceFacts,),
    from_logs=(_by_choice, _by_attempts),
    impacts={
        r"would send data over": (
            "Some connections use an interface that other hosts cannot reach: they fail or block until the timeout."
        ),
        r": other hosts cannot connect": (
            "The rank cannot connect to its peer and fails, and the other ranks block until the timeout."
        ),
        r"that \d+ hosts share": (
            "A host that connects to this address reaches itself: the connection fails with `Connection refused`, or "
            "the ranks block until the timeout."
        ),
        r"\(127\.|loopback": (
            "Other hosts receive a loopback address and connect to themselves. The job works on one host and "
            "hangs on several."
        ),
        r"bridge": (
            "Other hosts receive the address of a bridge that is local to each host, and cannot connect. The job works "
            "on one host and hangs on several."
        ),
    },
    cases=lambda: (
        Passes("real interfaces", healthy(hosts=2, per_host=2)),
        Passes("docker0 is passed over", healthy(2, 2).alter(InterfaceFacts, interfaces=lambda old: (*old, _DOCKER))),
        Passes("loopback on one host", healthy(1, 4).environ(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")),
        Passes(
            "a bridge beside RDMA", healthy(2, 2, rdma=2).alter(InterfaceFacts, interfaces=lambda old: (*old, _LIBVIRT))
        ),
        Fails("NCCL_SOCKET_IFNAME=lo", healthy(2, 2).environ(NCCL_SOCKET_IFNAME="lo"), ranks=(0, 1, 2, 3)),
        Fails(
            "GLOO_SOCKET_IFNAME=lo on one host",
            healthy(2, 2).environ(ranks=(2, 3), GLOO_SOCKET_IFNAME="lo"),
            ranks=(2, 3),
        ),
        Fails(
            "one host has docker0 and nothing better",
            healthy(2, 2).alter(InterfaceFacts, hosts=("node1",), interfaces=(_LOOPBACK, _DOCKER)),
            ranks=(2, 3),
        ),
        Fails(
            "every container is 172.17.0.2",
            healthy(2, 1).alter(InterfaceFacts, interfaces=(_LOOPBACK, _BRIDGED)),
            ranks=(0, 1),
        ),
        Fails(
            "a compose bridge is listed first",
            healthy(2, 1).alter(InterfaceFacts, hosts=("node0",), interfaces=lambda old: (old[0], _COMPOSE, old[1])),
            ranks=(0,),
        ),
        Fails(
            "the host's end of a container's cable, with a link-local address",
            healthy(2, 1).alter(InterfaceFacts, hosts=("node1",), interfaces=lambda old: (*old, _CABLE)),
            ranks=(1,),
            severity=Severity.WARNING,
        ),
        Fails(
            "the management board's link bears one address on every host",
            healthy(2, 1).alter(InterfaceFacts, interfaces=lambda old: (*old, _BOARD)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Fails(
            "without GPUs: every container is 172.17.0.2, by its own name",
            healthy(2, 1, gpus=0)
            .alter(InterfaceFacts, interfaces=(_LOOPBACK, _BRIDGED))
            .alter(HostFacts, names=(NameLookup("trainer", "hostname", ("172.17.0.2",), seconds=0.001),)),
            ranks=(0, 1),
        ),
        Fails(
            "NCCL 2.27 would also use virbr0 for data",
            healthy(2, 1).alter(InterfaceFacts, interfaces=lambda old: (*old, _LIBVIRT)),
            ranks=(0, 1),
            severity=Severity.WARNING,
        ),
        Passes(
            "NCCL takes loopback on one host",
            logged(
                "node1:41:77 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>",
                "node1:41:77 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal "
                "implementation",
            ),
        ),
        Passes("eth0 on two hosts", logged(*_bootstrap("eth0", "10.0.0.1", "10.0.0.2"))),
        Passes(
            "a peer of the same host that has ended",
            logged(
                "node1:41:77 [0] misc/socket.cc:484 NCCL WARN socketPollConnect: connect to 127.0.0.1<41234> returned "
                "Connection refused, exceeded error retry count after 35 attempts"
            ),
        ),
        Fails("loopback on two hosts", logged(*_bootstrap("lo", "127.0.0.1", "127.0.0.1"))),
        Fails("Docker's bridge on two hosts", logged(*_bootstrap("docker0", "172.17.0.1", "172.17.0.1"))),
        Fails(
            "NCCL 2.4 uses a virtual bridge, and times out",
            logged(
                "node1:41:77 [0] NCCL INFO Bootstrap : Using [0]virbr0:192.168.122.1<0>",
                "node1:41:77 [0] include/socket.h:403 NCCL WARN Net : Connect to 192.168.122.1<41234> failed : "
                "Connection timed out",
            ),
        ),
        Fails(
            "the address of a container of another host",
            logged(
                "node1:41:77 [0] misc/socket.cc:484 NCCL WARN socketPollConnect: connect to 172.17.0.3<41234> "
                "returned No route to host, exceeded error retry count after 35 attempts"
            ),
        ),
    ),
)
def interface_unroutable(job: Job) -> Iterator[Verdict]:
    """Ask whether the interface that would be used can reach the other hosts.

    Why it hurts: the address that other hosts receive belongs to themselves or is unreachable; they get `Connection
    refused` or wait until the timeout. The job works on one host and hangs on several.
    Fix: Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that connects the hosts, or start containers
    with `docker run --network host`.
    """
    if not job.is_multi_host:
        yield Skip("one host")
        return
    used = list(_used(job))
    machines: dict[str, set[object]] = {}
    for one in used:
        bearers = {rank.host.machine for rank in one.identical.members}
        for endpoint in one.choice.endpoints if one.all_carry else one.choice.endpoints[:1]:
            machines.setdefault(endpoint.address.address, set()).update(bearers)
    repeated = {text: len(bearers) for text, bearers in machines.items() if len(bearers) > 1}
    yield from merge((finding for one in used for finding in _judge(one, repeated)), job.place_of)


def _used(job: Job) -> Iterator[_ChosenInterface]:
    for interfaces, identical in job.each(InterfaceFacts, also=(NcclFacts, RdmaFacts, *CHOICE_SECTIONS)):
        choice = choice_of(identical)
        environment = identical.find(EnvironmentFacts)
        if choice is not None and (choice.library == "NCCL" or choice.value is not None or _leaves(choice)):
            sockets = choice.library == "NCCL" and sends_data_by_sockets(identical)
            yield _ChosenInterface(choice, interfaces, identical, sockets)
        named = environment.get("GLOO_SOCKET_IFNAME") if environment else None
        if environment is not None and gloo_names(named) and (choice is None or choice.library == "NCCL"):
            endpoints = gloo_endpoints(environment, interfaces, None)
            yield _ChosenInterface(
                NetworkChoice("Gloo", "GLOO_SOCKET_IFNAME", named, endpoints), interfaces, identical, False
            )


def _leaves(choice: NetworkChoice) -> bool:
    """Whether it is not loopback: Gloo selecting loopback by the host's own name is another fault."""
    return choice.first is not None and choice.first.interface.kind != "loopback"


def _judge(used: _ChosenInterface, repeated: dict[str, int]) -> Iterator[Finding]:
    first = used.choice.first
    if first is None:
        return
    fault = _fault(first, repeated)
    if fault is not None:
        yield _finding(used, f"{used.choice.library} on {HERE} would use {first.text}, {fault}", Severity.ERROR)
    elif used.all_carry:
        others = used.choice.endpoints[1:]
        bad = [one for one in others if needs_zone(one.address) or _fault(one, repeated) is not None]
        if bad:
            names = bad[0].text if len(bad) == 1 else conjunction([one.interface.name for one in bad[:8]])
            summary = f"NCCL on {HERE} would send data over {names} as well as {first.interface.name}"
            fix = f"export NCCL_SOCKET_IFNAME='={first.interface.name}'"
            why = [f"{one.interface.name}: {_fault(one, repeated) or 'only a link-local address'}" for one in bad[:4]]
            yield _finding(used, summary, Severity.WARNING, fix, why)


def _fault(endpoint: InterfaceEndpoint, repeated: dict[str, int]) -> str | None:
    kind = endpoint.interface.kind
    if kind in CARRIES_NOTHING:
        return {"loopback": "the loopback interface", "container-bridge": "a bridge for local containers"}.get(
            kind, "a bridge for local virtual machines"
        )
    address = parse_address(endpoint.address.address)
    times = repeated.get(endpoint.address.address)
    if times and address is not None and not address.is_loopback:
        return f"an address that {times} hosts share"
    return None


def _finding(
    used: _ChosenInterface, summary: str, severity: Severity, fix: str = "", unfit: Sequence[str] = ()
) -> Finding:
    choice = used.choice
    software = used.identical.find(SoftwareFacts)
    evidence = {
        "unsuitable": unfit,
        choice.variable: choice.value,
        "candidates": [one.text for one in choice.endpoints] if len(choice.endpoints) > 1 else None,
        "nccl": software.nccl if software else None,
    }
    if summary.endswith(" hosts share"):
        fix = "Start the containers with `docker run --network host`, or connect them to an overlay network."
    return Finding(
        summary,
        ranks=used.identical.ranks,
        severity=severity,
        evidence=evidence,
        confidence=1.0 if severity is Severity.ERROR else 0.6,
        fix=fix or selecting_fix(choice.variable, used.interfaces),
        explains=("NET013",),
        source=source_of(choice.setting),
    )

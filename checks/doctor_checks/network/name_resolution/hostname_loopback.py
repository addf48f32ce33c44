"""NET002: a host's own name resolves to a loopback address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from doctor.analysis.interface_choice import good_interfaces, is_loopback
from doctor.analysis.logs.event_timeline import failed_before, set_up_after
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    hosts_text,
    merge,
)
from doctor.core.text import lazy_compile
from doctor.facts import EnvironmentFacts, HostFacts, InterfaceFacts, NameLookup
from doctor.knowledge.interface_syntax import gloo_names
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

_BOTH = (NameLookup("node0", "hostname", ("127.0.1.1", "10.0.0.1"), seconds=0.001),)
_MOVED = (NameLookup("node1", "hostname", ("203.0.113.9",), seconds=0.001),)


def _debian(sketch: JobBuilder, *hosts: str) -> JobBuilder:
    """The job with 127.0.1.1 as the address of each host's own name, as Debian's installer enters it."""
    for host in hosts:
        names = (NameLookup(host, "hostname", ("127.0.1.1",), seconds=0.001),)
        sketch = sketch.alter(HostFacts, hosts=(host,), names=names)
    return sketch


_LOCAL_NAMES = ("localhost.localdomain", "localhost6", "localhost6.localdomain6")


def _from_logs(job: Job) -> Iterator[Finding]:
    """Report peers that were given a loopback address by name lookup.

    Users do not type 127.0.1.1, which Debian assigns to a host's own name. A launcher that reports itself as
    localhost.localdomain has no other name."""
    for group in event_groups(job, *_CONNECTIONS, by=("host",)):
        target = group.value("host", "remote", "host2") or ""
        if not target.startswith("127.0.1.") and target not in _LOCAL_NAMES:
            continue
        if not set_up_after(job, group.events[-1]):
            yield finding_from_logs(
                group,
                f"The name of a host is {target}, so other hosts connect to themselves"
                if target in _LOCAL_NAMES
                else f"Other hosts connect to {target}: a host resolves its own name to a loopback address",
                fix="Give every host its own name with `sudo hostnamectl set-hostname`, and map it to the host's "
                "network address in /etc/hosts."
                if target in _LOCAL_NAMES
                else f"On every host, map its name in /etc/hosts to its network address instead of {target}.",
                severity=Severity.ERROR,
                confidence=0.85,
                explains=("NET005", "NET006", "NET009", "NET013", "ENV015"),
            )
            return
    # Gloo advertises the address that the host's name resolves to: a peer that gets 127.0.0.1 connects to itself. A
    # peer on the same host is reachable there as long as it runs.
    if job.evidence is None:
        return
    for event in job.evidence.of("python.exception"):
        found = _GLOO_AT_HOME.search(event.value("message") or "")
        if found and not set_up_after(job, event) and failed_before(job, event) is None:
            yield finding_from_logs(
                EventGroup(event.kind, (event,)),
                f"Gloo connects to {found[1]}: a host resolves its own name to a loopback address",
                evidence={"failed_connection": found[0].rpartition("connect ")[2].rpartition("\n")[2].strip()},
                fix=f"On every host, map its name in /etc/hosts to its network address instead of {found[1]}.",
                severity=Severity.ERROR,
                confidence=0.65,
                explains=("NET005", "NET006", "NET009", "NET013"),
            )
            return


_GLOO_AT_HOME = lazy_compile(
    r"(?:gloo/transport/tcp/\S+ connect |connectFullMesh failed[^\0]{0,400}?remote=)\[(127\.0\.0\.\d+)\]"
)
_CONNECTIONS = (
    "torch.store.connect_timeout",
    "torch.store.connect_fail",
    "torch.store.validate",
    "net.peer.connect_failed",
)


@check(
    id="NET002",
    severity=Severity.WARNING,
    scope=Scope.HOST,
    when="PM",
    needs=(HostFacts,),
    from_logs=_from_logs,
    impacts={
        r"^Gloo connects|[Oo]ther hosts connect": (
            "The host connects to itself instead of its peer: the connection fails with `Connection refused`, or the "
            "ranks block until the timeout."
        ),
    },
    cases=lambda: (
        Passes("names lead to real addresses", healthy(hosts=2, per_host=2)),
        Passes("loopback is only one of the addresses", healthy(2, 1).alter(HostFacts, names=_BOTH)),
        Passes("a laptop of Debian's making", _debian(healthy(per_host=1, gpus=0), "node0"), silent=False),
        Fails(
            "Debian's 127.0.1.1 on one host of two",
            _debian(healthy(2, 2), "node1"),
            ranks=(2, 3),
        ),
        Fails(
            "the address of a host before the move",
            healthy(2, 2).alter(HostFacts, hosts=("node1",), names=_MOVED),
            ranks=(2, 3),
        ),
        Passes(
            "the same with GLOO_SOCKET_IFNAME",
            healthy(2, 2).alter(HostFacts, hosts=("node1",), names=_MOVED).environ(GLOO_SOCKET_IFNAME="eth0"),
        ),
        Fails(
            "127.0.1.1 on both hosts, and GLOO_SOCKET_IFNAME is unset",
            _debian(healthy(2, 2), "node0", "node1"),
            ranks=(0, 1, 2, 3),
            severity=Severity.ERROR,
        ),
        Fails(
            "127.0.1.1 on both hosts, but GLOO_SOCKET_IFNAME is set",
            _debian(healthy(2, 2), "node0", "node1").environ(GLOO_SOCKET_IFNAME="eth0"),
            ranks=(0, 1, 2, 3),
        ),
        Fails(
            "one host alone only needs to know it",
            _debian(healthy(1, 2), "node0"),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Passes(
            "the store on one host, reached in the end",
            logged(
                "[W socket.cpp:663] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 111 - "
                "Connection refused).",
                "All distributed processes registered. Starting with 2 processes",
            ),
        ),
        Fails(
            "Gloo's peer advertised 127.0.1.1",
            logged(
                "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:33495: "
                "Connection refused"
            ),
            severity=Severity.ERROR,
        ),
        Fails(
            "Gloo's mesh over two hosts that both advertise 127.0.0.1",
            logged(
                "RuntimeError: Gloo connectFullMesh failed with [/tmp/gloo/gloo/transport/tcp/pair.cc:152]",
                "  timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:41233",
                "  (rank=2, size=4, local=[127.0.0.1])",
            ),
            severity=Severity.ERROR,
        ),
        Passes(
            "a peer of this host that died is a consequence",
            logged(
                "[rank1]: ValueError: no such column",
                "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect "
                "[127.0.0.1]:33495: Connection refused",
            ),
        ),
        Fails(
            "torchrun's agent calls itself localhost.localdomain",
            logged(
                "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
                "connect to (localhost.localdomain, 41233)."
            ),
            severity=Severity.ERROR,
        ),
    ),
)
def hostname_loopback(job: Job) -> Iterator[Verdict]:
    """Ask whether every host's own name resolves to an address that other hosts can reach.

    Why it hurts: other hosts receive a loopback address and connect to themselves: Gloo fails with `connectFullMesh
    failed ... Connection refused`, or the ranks block until the timeout.
    Fix: On every host, map its name in /etc/hosts to its network address instead of a loopback address.
    """
    affected = [
        (name, identical)
        for host, identical in job.each(HostFacts, also=(EnvironmentFacts, InterfaceFacts))
        if (name := next((name for name in host.names if name.role == "hostname"), None)) is not None
        and name.addresses
        and all(map(is_loopback, name.addresses))
    ]
    if job.is_multi_host:
        yield from merge(_foreign(job))
    by_name = [identical for _, identical in affected if _goes_by_name(identical)]
    advertised = {rank.host.machine for identical in by_name for rank in identical.members}
    groups: dict[Severity, list[tuple[NameLookup, IdenticalRanks]]] = {}
    for name, identical in affected:
        severity = Severity.ERROR if len(advertised) > 1 and _goes_by_name(identical) else Severity.WARNING
        severity = severity if job.is_multi_host else Severity.INFO
        groups.setdefault(severity, []).append((name, identical))
    for severity, hosts in groups.items():
        first, members = hosts[0]
        names = list(dict.fromkeys(name.name for name, _ in hosts))
        yield Finding(
            f"{hosts_text(names)} resolve{'s its own name' if len(names) == 1 else ' their own names'} to "
            f"{first.addresses[0]}, a loopback address",
            ranks=tuple(sorted(rank for _, identical in hosts for rank in identical.ranks)),
            severity=severity,
            evidence={"addresses": {name.name: list(name.addresses) for name, _ in hosts[:16]}}
            if len(hosts) > 1
            else {},
            effect="" if severity is Severity.ERROR else _effect(members, first, job.is_multi_host),
            fix=_fix(first, members.find(InterfaceFacts)) if len(hosts) == 1 else _fix_of_several(hosts),
            explains=("NET027",),
        )


def _foreign(job: Job) -> Iterator[Finding]:
    """Hosts whose own name leads to addresses that none of their interfaces has. Gloo can't bind to such an address
    and falls back to the loopback (torch ProcessGroupGloo.cpp, createDefaultDevice). Where two hosts share a name,
    NET003 says so."""
    names = Counter(host.name for host in job.hosts)
    for host, identical in job.each(HostFacts, also=(EnvironmentFacts, InterfaceFacts)):
        name = next((name for name in host.names if name.role == "hostname" and name.addresses), None)
        interfaces = identical.find(InterfaceFacts)
        if name is None or interfaces is None or not interfaces.interfaces or not _goes_by_name(identical):
            continue
        if any(names[rank.host.name] > 1 for rank in identical.members):
            continue
        own = {address.address for interface in interfaces.interfaces for address in interface.addresses}
        if any(address in own or is_loopback(address) for address in name.addresses):
            continue
        yield Finding(
            f"{name.name} resolves its own name to {name.addresses[0]}, an address that none of its interfaces has",
            ranks=identical.ranks,
            evidence={"interface_addresses": sorted(own)[:16]},
            effect="Gloo warns `Unable to resolve hostname to a (local) address` and advertises 127.0.0.1, so other "
            "hosts connect to themselves.",
            fix=_fix(name, interfaces),
        )


def _goes_by_name(identical: IdenticalRanks) -> bool:
    environment = identical.find(EnvironmentFacts)
    return environment is not None and not gloo_names(environment.get("GLOO_SOCKET_IFNAME"))


def _effect(members: IdenticalRanks, name: NameLookup, multi_host: bool) -> str:
    if not multi_host:
        return (
            "None while all ranks run on this host; in a job on several hosts, other hosts would connect to themselves."
        )
    if _goes_by_name(members):
        return ""
    return (
        f"Gloo uses GLOO_SOCKET_IFNAME instead, but torch.distributed.rpc advertises {name.addresses[0]}, so other "
        "hosts connect to themselves."
    )


def _fix_of_several(hosts: Sequence[tuple[NameLookup, IdenticalRanks]]) -> str:
    """Empty, for that of the check, unless the addresses are known."""
    known = {
        name.name: good[0].addresses[0].address
        for name, members in hosts
        if (interfaces := members.find(InterfaceFacts)) and (good := good_interfaces(interfaces))
    }
    if len(known) < len(hosts):
        return ""
    named = ", ".join(f"{name}: {address}" for name, address in list(known.items())[:4])
    more = ", and so on" if len(known) > 4 else ""
    return (
        f"On every host, map its name in /etc/hosts to its network address ({named}{more}) instead of a loopback "
        "address."
    )


def _fix(name: NameLookup, interfaces: InterfaceFacts | None) -> str:
    good = good_interfaces(interfaces) if interfaces else ()
    if not good:
        return ""
    address, wrong = good[0].addresses[0].address, name.addresses[0].replace(".", "\\.")
    own = name.name.replace(".", "\\.")
    hosts_file = f"/^{wrong}[[:space:]]/s/[[:space:]]{own}([[:space:]]|$)/ /; $a {address} {name.name}"
    return "\n".join(
        (
            f"On {name.name}, map the name to the address of {good[0].name} in /etc/hosts:",
            f"sudo sed -i -E '{hosts_file}' /etc/hosts",
        )
    )

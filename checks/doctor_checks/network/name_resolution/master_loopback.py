"""NET005: MASTER_ADDR is a loopback address, but the master is on another host."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from doctor.analysis.interface_choice import good_interfaces, is_loopback
from doctor.analysis.logs.event_timeline import set_up_after, spans_hosts
from doctor.api import (
    EventGroup,
    Finding,
    IdenticalRanks,
    Job,
    Rank,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    hosts_text,
    is_logged,
    ranks_in_words,
)
from doctor.facts import InterfaceFacts, LaunchFacts, MasterFacts, ProcessFacts
from doctor.knowledge.interface_syntax import is_loopback_name
from doctor.testing import Fails, Passes, healthy, logged

_LOCALHOST = MasterFacts(address="localhost", port=29500, resolved=("127.0.0.1",), is_local=True, interface="lo")
_OWN_NAME = MasterFacts(address="node0", port=29500, resolved=("127.0.1.1",), is_local=True, interface="lo")


_LOOPBACK = ("localhost", "ip6-localhost", "127.0.0.1", "::1", "[::1]")


def _from_logs(job: Job) -> Iterator[Finding]:
    if not spans_hosts(job):
        return
    kinds = ("torch.store.connect_timeout", "torch.store.connect_fail", "torch.store.validate", "launch.master_given")
    gone_wrong = is_logged(job, *kinds[:3], "elastic.rdzv_timeout", "elastic.rdzv_connect", "torch.store.clients")
    for group in event_groups(job, *kinds, "elastic.launch", by=("host", "host2", "value")):
        target = group.value("host", "host2") or (
            (group.value("value") or "").rpartition(":")[0] if group.value("key") == "rdzv_endpoint" else None
        )
        if target in _LOOPBACK and gone_wrong and not set_up_after(job, group.events[-1]):
            yield finding_from_logs(
                group,
                f"The master of a multi-host job is {target}: each host connects to itself",
                effect=OWN_RENDEZVOUS if group.value("key") == "rdzv_endpoint" else "",
                fix=f"On all hosts, set {_option(group)} to the address of "
                + (
                    "one host, for example that of rank 0."
                    if group.value("key") == "rdzv_endpoint"
                    else "rank 0's host."
                ),
                confidence=0.85,
                explains=("NET006", "ENV005", "ENV015"),
            )
            return


# A host whose endpoint is local hosts the store itself: _create_tcp_store in
# torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py.
OWN_RENDEZVOUS = (
    "Each host starts a rendezvous of its own and waits for the others until it fails with `RendezvousTimeoutError`."
)
"""What a rendezvous by c10d does on each host that is given its own address."""


def _option(group: EventGroup) -> str:
    if group.value("key") == "rdzv_endpoint":
        return "--rdzv-endpoint"
    return "--master-addr" if group.kind == "launch.master_given" else "MASTER_ADDR"


@check(
    id="NET005",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(MasterFacts,),
    from_logs=_from_logs,
    cases=lambda: (
        Passes("the master by its address", healthy(hosts=2, per_host=2)),
        Passes("localhost on one host", healthy(hosts=1, per_host=4).put(_LOCALHOST)),
        Passes(
            "the master's own host may know itself as 127.0.1.1",
            healthy(2, 2).put(_OWN_NAME, ranks=(0, 1)),
        ),
        Fails(
            "localhost on the master's own host alone",
            healthy(2, 2).put(_LOCALHOST, ranks=(0, 1)),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "localhost on the master's own host, seen without the other hosts",
            healthy(2, 2).put(_LOCALHOST).only((0, 1)),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails("localhost in a job of two hosts", healthy(2, 2).put(_LOCALHOST), ranks=(2, 3)),
        Fails(
            "one host takes the master's name for its own",
            healthy(hosts=3, per_host=1).put(_OWN_NAME, ranks=(2,)),
            ranks=(2,),
        ),
        Fails(
            "seen from the second host alone",
            healthy(2, 2).put(_LOCALHOST).only((2, 3)),
            ranks=(2, 3),
        ),
        Fails(
            "one rank whose host has another local rank 0 than rank 0",
            healthy(2, 2).put(_LOCALHOST).alter(LaunchFacts, node_rank=None).only((2,)),
            ranks=(2,),
        ),
        Passes(
            "one host, and rank 0 died before",
            logged(
                "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to "
                "connect to (127.0.0.1, 29500)."
            ),
        ),
        Fails(
            "two hosts, each going to itself",
            logged(
                "torchrun --nnodes=2 --node-rank=1 --master-addr=127.0.0.1 train.py",
                "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to "
                "connect to (127.0.0.1, 29500).",
            ),
        ),
        Fails(
            "the rendezvous of two hosts at localhost",
            logged(
                "  max_nodes        : 2",
                "  rdzv_endpoint    : localhost:29400",
                "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
            ),
        ),
    ),
)
def master_loopback(job: Job) -> Iterator[Verdict]:
    """Ask whether MASTER_ADDR is a loopback address on hosts other than that of rank 0.

    Why it hurts: all hosts except that of rank 0 connect to themselves, where no store listens, and fail with `The
    client socket has timed out`.
    Fix: Set MASTER_ADDR on every host to the address of rank 0's host.
    """
    first = next((rank for rank in job.ranks if rank.number == 0), None)
    others = [one for one, _ in job.each(MasterFacts) if not all(map(is_loopback, one.resolved))]
    at_home: list[tuple[MasterFacts, IdenticalRanks]] = []
    is_reported = False
    place = first.host.name if first is not None else "another host"
    for master, identical in job.each(MasterFacts, also=(InterfaceFacts,)):
        if not master.resolved or not all(map(is_loopback, master.resolved)):
            continue
        judged = {rank.number: _shares_host(rank, first, job.is_multi_host) for rank in identical.members}
        strange = tuple(number for number, shares in judged.items() if shares is False)
        is_reported |= bool(strange)
        if not strange and all(judged.values()) and is_loopback_name(master.address):
            at_home.append((master, identical))
        if strange:
            yield Finding(
                (
                    f"MASTER_ADDR={master.address} resolves to {master.resolved[0]} on "
                    f"{hosts_text(job.hosts_of(strange))}, but rank 0 runs on {place}"
                )
                if master.address != master.resolved[0]
                else f"MASTER_ADDR={master.address} is a loopback address, but rank 0 runs on {place}",
                ranks=strange,
                effect=f"{ranks_in_words(strange, 4).capitalize()} {'connects' if len(strange) == 1 else 'connect'} to "
                f"{'its' if len(strange) == 1 else 'their'} own host, where no store listens, and "
                f"{'fails' if len(strange) == 1 else 'fail'} with `The client socket has timed out`.",
                fix=_fix(master, identical, first),
                explains=("ENV006", "NET006"),
            )
        doubtful = tuple(number for number, shares in judged.items() if shares is None)
        if doubtful:
            yield Unknown("the host of rank 0 is unknown", doubtful, "gather all ranks")
    if job.is_multi_host and not is_reported:
        yield from (_only_at_home(master, identical, others) for master, identical in at_home)


def _fix(master: MasterFacts, identical: IdenticalRanks, first: Rank | None) -> str:
    """The name of another host is right, and its entry in /etc/hosts is wrong."""
    if master.address not in (*_LOOPBACK, *master.resolved):
        interfaces = first.find(InterfaceFacts) if first is not None else None
        good = good_interfaces(interfaces) if interfaces else ()
        address = good[0].addresses[0].address if good else "the network address of rank 0's host"
        return (
            f"In /etc/hosts on {hosts_text(identical.hosts)}, map {master.address} to {address} instead of "
            f"{master.resolved[0]}."
        )
    if first is None:
        return ""
    return f"Use the host of rank 0 on all hosts:\nexport MASTER_ADDR={shlex.quote(first.host.name)}"


def _only_at_home(master: MasterFacts, identical: IdenticalRanks, others: list[MasterFacts]) -> Finding:
    """A loopback address on the host of rank 0. The store listens on all addresses (torch TCPStore.cpp), so its own
    ranks reach it, but no other host can use the value. A name that resolves to 127.0.1.1 there can be passed on.
    """
    interfaces = identical.find(InterfaceFacts)
    good = good_interfaces(interfaces) if interfaces else ()
    known = [one.address for one in others] + [one.addresses[0].address for one in good]
    return Finding(
        f"MASTER_ADDR={master.address} works only on the host of rank 0",
        ranks=identical.ranks,
        severity=Severity.INFO,
        evidence={
            "MASTER_ADDR": master.address,
            "elsewhere": sorted({one.address for one in others})[:8],
            "interface": f"{good[0].name} ({good[0].addresses[0].address})" if good else None,
        },
        effect="Other hosts that receive this address, for example from a shared script, connect to themselves and "
        "never join the job.",
        fix=f"Use an address of rank 0's host on all hosts:\nexport MASTER_ADDR={shlex.quote(known[0])}"
        if known
        else "",
    )


def _shares_host(rank: Rank, first: Rank | None, multi_host: bool) -> bool | None:
    """Whether ``rank`` reaches rank 0 over a loopback address; ``None`` if unknown."""
    if first is not None:
        return _shares_network(rank, first)
    if not multi_host:
        return True
    launch = rank.find(LaunchFacts)
    if launch is not None and launch.node_rank is not None:
        return launch.node_rank == 0
    # Rank 0 has local rank 0 on its own host.
    return False if launch is not None and launch.local_rank == 0 and rank.number > 0 else None


def _shares_network(one: Rank, other: Rank) -> bool:
    """Whether both share a loopback interface: it belongs to a network namespace, which containers may share."""
    if one.host.machine != other.host.machine:
        return False
    processes = (one.find(ProcessFacts), other.find(ProcessFacts))
    spaces = [process.namespace("net") for process in processes if process is not None]
    if len(spaces) == 2 and None not in spaces:
        return spaces[0] == spaces[1]
    return one.host.index == other.host.index

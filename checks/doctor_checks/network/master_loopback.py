"""NET005: MASTER_ADDR is a loopback address where the master is another host."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.interface_choice import is_loopback
from doctor.analysis.logs.event_timeline import set_up_after, spans_hosts
from doctor.api import (
    EventGroup,
    Finding,
    Job,
    Rank,
    Scope,
    Severity,
    Unknown,
    Verdict,
    check,
    event_groups,
    finding_from_logs,
    is_logged,
)
from doctor.facts import LaunchFacts, MasterFacts, ProcessFacts
from doctor.testing import Fails, Passes, healthy, logged

_LOCALHOST = MasterFacts(address="localhost", port=29500, resolved=("127.0.0.1",), is_local=True, interface="lo")
_OWN_NAME = MasterFacts(address="node0", port=29500, resolved=("127.0.1.1",), is_local=True, interface="lo")


_LOOPBACK = ("localhost", "ip6-localhost", "127.0.0.1", "::1", "[::1]")


def _host_of(told: EventGroup) -> str | None:
    """The host of torchrun's rendezvous."""
    return (told.value("value") or "").rpartition(":")[0] if told.value("key") == "rdzv_endpoint" else None


def _told(job: Job) -> Iterator[Finding]:
    """On one host a loopback address is right; only a job of several that did not come up is sent astray by it."""
    if not spans_hosts(job):
        return
    kinds = ("torch.store.connect_timeout", "torch.store.connect_fail", "torch.store.validate", "launch.master_given")
    gone_wrong = is_logged(job, *kinds[:3], "elastic.rdzv_timeout", "elastic.rdzv_connect", "torch.store.clients")
    for told in event_groups(job, *kinds, "elastic.launch", by=("host", "host2", "value")):
        target = told.value("host") or told.value("host2") or _host_of(told)
        if target in _LOOPBACK and gone_wrong and not set_up_after(job, told.events[-1]):
            yield finding_from_logs(
                told,
                f"{target} is the master of a job of several hosts: each of them goes to itself",
                evidence={"master": target},
                confidence=0.85,
                explains=("NET006", "ENV005", "ENV015"),
            )
            return


@check(
    id="NET005",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    when="PM",
    needs=(MasterFacts,),
    told=_told,
    cases=lambda: (
        Passes("the master by its address", healthy(hosts=2, per_host=2)),
        Passes("localhost on one host", healthy(hosts=1, per_host=4).put(_LOCALHOST)),
        Passes(
            "the master's own host may know itself as 127.0.1.1",
            healthy(2, 2).put(_OWN_NAME, ranks=(0, 1)),
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
    """Ask whether ranks on other hosts than the master's are told a loopback address as MASTER_ADDR.

    Why it hurts: they dial themselves. Nobody listens there, and both sides wait: `The client socket has timed out
    after 600000ms while trying to connect to (127.0.0.1, 29500)`.
    Fix: `export MASTER_ADDR=<address of rank 0's host>` on every host, taken from
    `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1` or the scheduler's host list.
    """
    first = next((rank for rank in job.ranks if rank.number == 0), None)
    for master, alike in job.each(MasterFacts):
        if not master.resolved or not all(map(is_loopback, master.resolved)):
            continue
        judged = {rank.number: _shares_host(rank, first, job.is_multi_host) for rank in alike.members}
        strange = tuple(number for number, shares in judged.items() if shares is False)
        if strange:
            yield Finding(
                f"MASTER_ADDR={master.address} is {master.resolved[0]}, this host itself, and rank 0 runs elsewhere",
                ranks=strange,
                evidence={"MASTER_ADDR": master.address, "resolved": list(master.resolved), "port": master.port},
                explains=("ENV006", "NET006"),
            )
        doubtful = tuple(number for number, shares in judged.items() if shares is None)
        if doubtful:
            yield Unknown("on which host rank 0 runs is not known", doubtful, "gather all ranks")


def _shares_host(rank: Rank, first: Rank | None, multi_host: bool) -> bool | None:
    """Whether a loopback address leads from ``rank`` to rank 0; ``None`` where that can't be told."""
    if first is not None:
        return _shares_network(rank, first)
    if not multi_host:
        return True
    launch = rank.find(LaunchFacts)
    if launch is None or launch.node_rank is None:
        return None
    return launch.node_rank == 0


def _shares_network(one: Rank, other: Rank) -> bool:
    """Loopback belongs to a network namespace, so containers of one machine may share it or not."""
    if one.host.machine != other.host.machine:
        return False
    processes = (one.find(ProcessFacts), other.find(ProcessFacts))
    spaces = [process.namespace("net") for process in processes if process is not None]
    if len(spaces) == 2 and None not in spaces:
        return spaces[0] == spaces[1]
    return one.host.index == other.host.index

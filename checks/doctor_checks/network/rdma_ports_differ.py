"""NET022: hosts have different RDMA ports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import (
    Alike,
    Finding,
    GpuFacts,
    Job,
    Lack,
    NcclFacts,
    RdmaChoice,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    Scope,
    Severity,
    Sick,
    Skip,
    SoftwareFacts,
    TrainerFacts,
    Unknown,
    Verdict,
    Well,
    check,
    correlates,
    healthy,
    nccl_matters,
    nccl_rdma_ports,
    what_forces_sockets,
)

_ROCE = RdmaDevice("mlx5_9", (RdmaPort(1, "ACTIVE", "LinkUp", 100.0, "Ethernet"),), has_uverbs=True)

Kind = tuple[str, float]
"""Link layer and rate in Gb/s."""


class _Member(NamedTuple):
    ports: tuple[Kind, ...]
    alike: Alike
    choices: tuple[RdmaChoice, ...]


@check(
    id="NET022",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="PM",
    needs=(NcclFacts,),
    cases=lambda: (
        Well("the same ports everywhere", healthy(hosts=3, per_host=2, rdma=4)),
        Well("no RDMA anywhere", healthy(hosts=2, per_host=2)),
        Well(
            "sockets are asked for", healthy(2, 2, rdma=4).drop(RdmaFacts, hosts=("node1",)).environ(NCCL_NET="Socket")
        ),
        Well(
            "an Ethernet port that NCCL_IB_HCA leaves out",
            healthy(2, 1, rdma=4)
            .alter(RdmaFacts, hosts=("node1",), devices=lambda old: (*old, _ROCE))
            .environ(NCCL_IB_HCA="^=mlx5_9"),
        ),
        Sick(
            "one host of three lost a port",
            healthy(3, 2, rdma=4).alter(RdmaFacts, hosts=("node2",), devices=lambda old: old[:3]),
            ranks=(4, 5),
        ),
        Sick("one host has none at all", healthy(3, 1, rdma=2).drop(RdmaFacts, hosts=("node0",)), ranks=(0,)),
        Sick(
            "InfiniBand and a management port of Ethernet together",
            healthy(2, 2, rdma=4).alter(RdmaFacts, devices=lambda old: (*old, _ROCE)),
            ranks=(0, 1, 2, 3),
            severity=Severity.ERROR,
        ),
        Sick(
            "InfiniBand here, RoCE there",
            healthy(3, 1, rdma=1).alter(RdmaFacts, hosts=("node1",), devices=(_ROCE,)),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
    ),
)
def rdma_ports_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether every host has the same RDMA ports for NCCL.

    Why it hurts: channels are laid out by the ports of one host; a port that the peer lacks waits for ever (`Detected
    mixed local Net device counts across ranks`), and InfiniBand can't speak to RoCE (`Attempted to merge incompatible
    devices`).
    Fix: select ports that all hosts have, of one link layer: `export NCCL_IB_HCA='=mlx5_0,mlx5_1,mlx5_2,mlx5_3'`, or
    leave the host out until its port is back.
    """
    if not job.is_multi_host:
        yield Skip("one host")
        return
    members: list[_Member] = []
    for nccl, alike in job.each(NcclFacts, also=(RdmaFacts, SoftwareFacts, GpuFacts, TrainerFacts)):
        if not nccl_matters(alike) or what_forces_sockets(nccl) is not None:
            continue
        missing = alike.missing(RdmaFacts)
        if missing is not None and missing.lack is not Lack.ABSENT:
            yield Unknown(missing.reason, alike.ranks, missing.unhide)
            continue
        rdma = alike.find(RdmaFacts)
        ports = nccl_rdma_ports(nccl, rdma) if rdma else ()
        kinds = sorted((one.port.link_layer or "", one.port.rate or 0.0) for one in ports)
        members.append(_Member(tuple(kinds), alike, ports))
    mixed: list[_Member] = []
    plain: list[_Member] = []
    for member in members:
        (mixed if len({layer for layer, _ in member.ports}) > 1 else plain).append(member)
    if mixed:
        claim, fix = "the selected RDMA ports mix InfiniBand and Ethernet", _of_one_layer(mixed[0])
        yield _finding(job, claim, mixed, members, Severity.ERROR, fix)
    yield from _minority(job, plain, members)


def _minority(job: Job, members: list[_Member], everybody: list[_Member]) -> Iterator[Finding]:
    counts: Counter[tuple[Kind, ...]] = Counter()
    for member in members:
        counts[member.ports] += len(member.alike.members)
    if len(counts) < 2:
        return
    (common, most), (_, next_most) = counts.most_common(2)
    odd = [member for member in members if most == next_most or member.ports != common]
    layers = {layer for member in members for layer, _ in member.ports}
    shown = _words(odd[0].ports)
    usual = _words(common if most != next_most else next(p for p in counts if p != odd[0].ports))
    severity = Severity.ERROR if len(layers) > 1 else Severity.WARNING
    yield _finding(job, f"{shown} where others have {usual}", odd, everybody, severity)


def _of_one_layer(member: _Member) -> str:
    """The line that keeps the ports of the link layer that carries most on this host."""
    rates: Counter[str] = Counter()
    for one in member.choices:
        rates[one.port.link_layer or ""] += int(one.port.rate or 1)
    layer = rates.most_common(1)[0][0]
    names = dict.fromkeys(one.device.name for one in member.choices if (one.port.link_layer or "") == layer)
    return f"`export NCCL_IB_HCA='={','.join(names)}'` on all hosts keeps the {layer} ports"


def _finding(
    job: Job, claim: str, odd: list[_Member], everybody: list[_Member], severity: Severity, fix: str = ""
) -> Finding:
    ranks = tuple(sorted(rank for member in odd for rank in member.alike.ranks))
    counts: Counter[str] = Counter()
    for member in everybody:
        counts[_words(member.ports)] += len(member.alike.members)
    evidence = {"ranks_by_ports": dict(counts.most_common(8)), "goes_along_with": list(correlates(job, ranks))}
    return Finding(claim, ranks=ranks, severity=severity, evidence=evidence, fix=fix)


def _words(ports: tuple[Kind, ...]) -> str:
    """Such as ``8 InfiniBand ports of 400 Gb/s``."""
    if not ports:
        return "no RDMA port"
    return " and ".join(
        f"{count} {layer or 'RDMA'} port{'s' if count > 1 else ''} of {rate:g} Gb/s"
        for (layer, rate), count in sorted(Counter(ports).items())
    )

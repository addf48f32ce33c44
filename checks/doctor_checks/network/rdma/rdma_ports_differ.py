"""NET022: hosts have different RDMA ports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

import msgspec

from doctor.analysis.interface_choice import RdmaChoice, nccl_matters, rdma_ports_of, what_forces_sockets
from doctor.api import (
    BaselineDeviation,
    BaselineValue,
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    baseline_value,
    check,
    correlates,
    hosts_text,
    split_groups,
)
from doctor.facts import (
    GpuFacts,
    MissingReason,
    NcclFacts,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    SoftwareFacts,
    TrainerFacts,
)
from doctor.testing import Fails, Passes, healthy

_ROCE = RdmaDevice("mlx5_9", (RdmaPort(1, "ACTIVE", "LinkUp", 100.0, "Ethernet"),), has_uverbs=True)

Kind = tuple[str, float]
"""Link layer and rate in Gb/s."""


class _RankRdmaPorts(msgspec.Struct, frozen=True):
    ports: tuple[Kind, ...]
    identical: IdenticalRanks
    choices: tuple[RdmaChoice, ...]


@check(
    id="NET022",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    when="PM",
    needs=(NcclFacts,),
    uses_baseline=True,
    impacts={
        r"^The selected RDMA ports mix": (
            # src/transport/net_ib/connect.cc; src/graph/topo.cc only leaves such ports unmerged.
            "A connection between an InfiniBand port and an Ethernet port fails (`Attempted to connect incompatible "
            "devices`), and the job ends at startup."
        ),
        r"cannot combine an InfiniBand": "A connection between the two ports fails, and the job ends at startup.",
        r"no RDMA port": (
            "NCCL on hosts without an RDMA port selects another network, so the job may hang or fail when NCCL starts."
        ),
        r"InfiniBand.*Ethernet|Ethernet.*InfiniBand": (
            "Ports of InfiniBand and Ethernet cannot connect to each other: the job hangs or fails when NCCL starts."
        ),
        r"NCCL \w*Net devices": "NCCL fails with a system error on all ranks when it starts.",
        r"ports? of": (
            "NCCL may fail with `Detected mixed local Net device counts across ranks`, or ranks may block until the "
            "timeout."
        ),
    },
    cases=lambda: (
        Passes("the same ports everywhere", healthy(hosts=3, per_host=2, rdma=4)),
        Passes("no RDMA anywhere", healthy(hosts=2, per_host=2)),
        Passes(
            "sockets are asked for", healthy(2, 2, rdma=4).drop(RdmaFacts, hosts=("node1",)).environ(NCCL_NET="Socket")
        ),
        Passes(
            "an Ethernet port that NCCL_IB_HCA leaves out",
            healthy(2, 1, rdma=4)
            .alter(RdmaFacts, hosts=("node1",), devices=lambda old: (*old, _ROCE))
            .environ(NCCL_IB_HCA="^=mlx5_9"),
        ),
        Passes("one process, as in the capture", healthy(1, 1, rdma=4).expecting(healthy(2, 2, rdma=4))),
        Passes("a capture of a machine without RDMA", healthy(2, 2, rdma=4).expecting(healthy(1, 1))),
        Fails(
            "one host of three lost a port",
            healthy(3, 2, rdma=4).alter(RdmaFacts, hosts=("node2",), devices=lambda old: old[:3]),
            ranks=(4, 5),
        ),
        Fails("one host has none at all", healthy(3, 1, rdma=2).drop(RdmaFacts, hosts=("node0",)), ranks=(0,)),
        Fails("one host of two has none", healthy(2, 1, rdma=2).drop(RdmaFacts, hosts=("node0",)), ranks=(0,)),
        Fails(
            "InfiniBand and a management port of Ethernet together",
            healthy(2, 2, rdma=4).alter(RdmaFacts, devices=lambda old: (*old, _ROCE)),
            ranks=(0, 1, 2, 3),
            severity=Severity.ERROR,
        ),
        Fails(
            "InfiniBand here, RoCE there",
            healthy(3, 1, rdma=1).alter(RdmaFacts, hosts=("node1",), devices=(_ROCE,)),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
        Fails(
            "most hosts lost a port, and a baseline shows it",
            healthy(3, 1, rdma=4)
            .alter(RdmaFacts, hosts=("node0", "node2"), devices=lambda old: old[:3])
            .expecting(healthy(1, 1, rdma=4)),
            ranks=(0, 2),
        ),
        Fails(
            "one process on a host with fewer ports than in the capture",
            healthy(1, 1, rdma=2).expecting(healthy(2, 1, rdma=4)),
            ranks=(0,),
        ),
    ),
)
def rdma_ports_differ(job: Job) -> Iterator[Verdict]:
    """Ask whether every host has the same RDMA ports for NCCL.

    Why it hurts: ports without a counterpart on the peer cannot connect: NCCL fails with `Detected mixed local Net
    device counts across ranks` or `Attempted to merge incompatible devices`, or ranks block until the timeout.
    Fix: Set NCCL_IB_HCA on all hosts to ports of one link layer that all of them have, or exclude the hosts whose ports
    are missing.
    """
    # A baseline job without RDMA has no ports to compare.
    expected = baseline_value(
        job,
        lambda worked: (
            _member(nccl, identical).ports for nccl, identical in _users(worked) if identical.find(RdmaFacts)
        ),
    )
    users = list(_users(job))
    if not job.is_multi_host and not (expected and users):
        yield Skip("one host")
        return
    members: list[_RankRdmaPorts] = []
    for nccl, identical in users:
        missing = identical.missing(RdmaFacts)
        if missing is not None and missing.lack is not MissingReason.ABSENT:
            yield Unknown(missing.reason, identical.ranks, missing.unhide)
            continue
        members.append(_member(nccl, identical))
    mixed: list[_RankRdmaPorts] = []
    plain: list[_RankRdmaPorts] = []
    for member in members:
        (mixed if len({layer for layer, _ in member.ports}) > 1 else plain).append(member)
    if mixed:
        claim, fix = "The selected RDMA ports mix InfiniBand and Ethernet", _of_one_layer(mixed[0])
        yield _finding(job, claim, mixed, members, Severity.ERROR, fix)
    yield from _minority(job, plain, members, expected)


def _users(job: Job) -> Iterator[tuple[NcclFacts, IdenticalRanks]]:
    for nccl, identical in job.each(NcclFacts, also=(RdmaFacts, SoftwareFacts, GpuFacts, TrainerFacts)):
        if nccl_matters(identical) and what_forces_sockets(nccl) is None:
            yield nccl, identical


def _member(nccl: NcclFacts, identical: IdenticalRanks) -> _RankRdmaPorts:
    ports = rdma_ports_of(identical)
    kinds = sorted((one.port.link_layer or "", one.port.rate or 0.0) for one in ports)
    return _RankRdmaPorts(tuple(kinds), identical, ports)


def _minority(
    job: Job, members: list[_RankRdmaPorts], everybody: list[_RankRdmaPorts], expected: BaselineValue | None
) -> Iterator[Finding]:
    groups: dict[Hashable, list[int]] = {}
    for member in members:
        groups.setdefault(member.ports, []).extend(member.identical.ranks)
    parted = split_groups(groups, expected=expected)
    if not parted.minorities:
        return
    odd_ports = {group.value for group in parted.minorities}
    if parted.common is None and () in odd_ports:
        odd_ports = {()}  # Of as many hosts with and without ports, those without are at fault.
    odd = [member for member in members if member.ports in odd_ports]
    layers = {layer for member in members for layer, _ in member.ports}
    severity = Severity.ERROR if len(layers) > 1 else Severity.WARNING
    if expected:
        deviation = BaselineDeviation((parted.unlike("RDMA", _words),), parted.drifted)
        finding = deviation.finding(parted.odd, _evidence(job, parted.odd, everybody), severity=severity)
        yield finding.extended({}, "" if parted.drifted else _fix(job, odd, everybody))
        return
    others = (group.value for group in parted.groups if group.value != odd[0].ports)
    usual = parted.common.value if parted.common else next(others)
    hosts = job.hosts_of(rank for member in odd for rank in member.identical.ranks)
    has = "has" if len(hosts) == 1 else "have"
    summary = f"{hosts_text(hosts)} {has} {_words(odd[0].ports)}; other hosts have {_words(usual)}"
    yield _finding(job, summary, odd, everybody, severity, _fix(job, odd, everybody))


def _fix(job: Job, odd: list[_RankRdmaPorts], everybody: list[_RankRdmaPorts]) -> str:
    """Exclude the hosts, or select the devices that all hosts have."""
    hosts = job.hosts_of(rank for member in odd for rank in member.identical.ranks)
    names = [dict.fromkeys(one.device.name for one in member.choices) for member in everybody]
    shared = [name for name in names[0] if all(name in own for own in names)]
    exclude = f"Exclude {hosts_text(hosts)}"
    if len({layer for member in everybody for layer, _ in member.ports}) > 1:
        return f"{exclude} from the job (`srun --exclude={','.join(hosts)}` in SLURM)."
    if not all(member.ports for member in odd):
        return f"{exclude} until the RDMA ports are repaired, or run `export NCCL_IB_DISABLE=1` on all hosts."
    select = f", or run `export NCCL_IB_HCA='={','.join(shared)}'` on all hosts" if shared else ""
    return f"{exclude} until the ports are repaired{select}."


def _of_one_layer(member: _RankRdmaPorts) -> str:
    rates: Counter[str] = Counter()
    for one in member.choices:
        rates[one.port.link_layer or ""] += int(one.port.rate or 1)
    layer = rates.most_common(1)[0][0]
    names = dict.fromkeys(one.device.name for one in member.choices if (one.port.link_layer or "") == layer)
    return f"On all hosts, select the {layer} ports only:\nexport NCCL_IB_HCA='={','.join(names)}'"


def _finding(
    job: Job, claim: str, odd: list[_RankRdmaPorts], everybody: list[_RankRdmaPorts], severity: Severity, fix: str = ""
) -> Finding:
    ranks = tuple(sorted(rank for member in odd for rank in member.identical.ranks))
    return Finding(claim, ranks=ranks, severity=severity, evidence=_evidence(job, ranks, everybody), fix=fix)


def _evidence(job: Job, ranks: tuple[int, ...], everybody: list[_RankRdmaPorts]) -> dict[str, object]:
    counts: Counter[str] = Counter()
    for member in everybody:
        counts[_words(member.ports)] += len(member.identical.members)
    return {"ranks_by_ports": dict(counts.most_common(8)), "goes_along_with": list(correlates(job, ranks))}


def _words(ports: tuple[Kind, ...]) -> str:
    if not ports:
        return "no RDMA port"
    return " and ".join(
        f"{count} {layer or 'RDMA'} port{'s' if count > 1 else ''} of {rate:g} Gb/s"
        for (layer, rate), count in sorted(Counter(ports).items())
    )

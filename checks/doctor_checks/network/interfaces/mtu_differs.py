"""NET012: hosts use different MTUs, or full-size packets are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from doctor.analysis.interface_choice import (
    CARRIES_NOTHING,
    CHOICE_SECTIONS,
    InterfaceEndpoint,
    choice_of,
    data_goes_by_sockets,
    rdma_ports_of,
)
from doctor.analysis.stats.baseline import or_new_baseline
from doctor.api import (
    BaselineDeviation,
    Finding,
    IdenticalRanks,
    Job,
    MajoritySplit,
    Scope,
    Severity,
    Skip,
    Unknown,
    Verdict,
    baseline_value,
    check,
    conjunction,
    describe,
    hosts_text,
    ranks_in_words,
    split_groups,
)
from doctor.facts import (
    Gid,
    Interface,
    InterfaceFacts,
    NcclFacts,
    PathFacts,
    PathSample,
    RdmaDevice,
    RdmaFacts,
    RdmaPort,
    Trial,
    TrialFacts,
)
from doctor.testing import Fails, JobBuilder, Passes, healthy
from doctor_checks._trial_conclusions import with_trials


def _mtu(size: int) -> InterfaceFacts:
    (facts, _), *_ = healthy(2, 1).job().each(InterfaceFacts)
    lo, eth0 = facts.interfaces
    return InterfaceFacts(interfaces=(lo, Interface("eth0", mtu=size, addresses=eth0.addresses)), routes=facts.routes)


def _roce(first: int, second: int) -> JobBuilder:
    """Two hosts whose RoCE port has a separate interface, with these MTUs."""
    port = RdmaPort(1, "ACTIVE", "LinkUp", 400.0, "Ethernet", gids=(Gid(3, "::ffff:10.9.0.1", "RoCE v2", "rdma0"),))
    sketch = healthy(2, 1).put(RdmaFacts(devices=(RdmaDevice("mlx5_0", (port,), has_uverbs=True),)))
    for host, size in (("node0", first), ("node1", second)):
        sketch = sketch.alter(
            InterfaceFacts, hosts=(host,), interfaces=lambda old, size=size: (*old, Interface("rdma0", mtu=size))
        )
    return sketch


_LOST = PathFacts(samples=(PathSample("node0", "10.0.0.1", full_size_arrived=False),))
_TRIED = TrialFacts(
    trials=(
        Trial(
            "packet",
            "smaller packets (1500 bytes)",
            "sudo ip link set dev eth0 mtu 1500  # on node1",
            True,
            peer="node0",
            after=1500.0,
            unit="bytes",
        ),
        Trial("packet", "other interface eth1 (10.1.0.2 -> 10.1.0.1)", "", False, peer="node0", unit="bytes"),
    )
)
_ARRIVED = PathFacts(samples=(PathSample("node1", "10.0.0.2", full_size_arrived=True),))


_CONSEQUENCES = ("NET013", "NET014", "NET015", "NET027")


@check(
    id="NET012",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    needs=(InterfaceFacts, NcclFacts),
    uses_baseline=True,
    impacts={
        r"Full-size packets are lost": (
            "Small messages pass and large ones are lost: initialization succeeds, and the first large all_reduce "
            "blocks until the timeout."
        ),
        r"found|differ": (
            "Packets larger than the smallest MTU may be dropped between the hosts: large collectives then block, "
            "while small messages pass."
        ),
    },
    cases=lambda: (
        Passes("jumbo frames everywhere", healthy(hosts=3, per_host=1)),
        Passes("one host", healthy(hosts=1, per_host=2)),
        Passes("large packets arrive", healthy(2, 1).put(_ARRIVED, hosts=("node0",))),
        Passes("one process, as in the capture", healthy(1, 1).expecting(healthy(3, 2))),
        Passes(
            "a capture whose own hosts disagree",
            healthy(3, 1).expecting(healthy(2, 1).put(_mtu(1500), hosts=("node1",))),
        ),
        Fails("one host of three has 1500", healthy(3, 2).put(_mtu(1500), hosts=("node1",)), ranks=(2, 3)),
        Fails("two hosts disagree", healthy(2, 1).put(_mtu(1500), hosts=("node1",)), ranks=(0, 1)),
        Passes("RoCE ports of one MTU", _roce(9000, 9000)),
        Passes("RoCE ports of two MTUs that NCCL does not use", _roce(1500, 9000).environ(NCCL_IB_DISABLE="1")),
        Fails("RoCE ports of two MTUs behind equal training interfaces", _roce(1500, 9000), ranks=(0, 1)),
        Fails(
            "large packets are lost on the path",
            healthy(3, 1).put(_mtu(1500), hosts=("node1",)).put(_LOST, hosts=("node1",)),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
        Fails(
            "the MTUs agree and a switch between drops large packets",
            healthy(2, 1).put(_LOST, hosts=("node1",)),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
        Fails(
            "large packets are lost, and smaller ones were tried",
            healthy(3, 1).put(_LOST, hosts=("node1",)).put(_TRIED, ranks=(1,)),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
        Fails(
            "two hosts disagree, and a baseline shows which is right",
            healthy(2, 1).put(_mtu(1500), hosts=("node1",)).expecting(healthy(1, 1)),
            ranks=(1,),
        ),
        Fails(
            "all hosts have 1500, and the job that worked had 9000",
            healthy(3, 2).put(_mtu(1500)).expecting(healthy(2, 1)),
            ranks=(0, 1, 2, 3, 4, 5),
        ),
        Fails("one process with another MTU", healthy(1, 1).put(_mtu(1500)).expecting(healthy()), ranks=(0,)),
    ),
)
def mtu_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether all hosts use the same MTU on the training interfaces, and whether packets of that size arrive.

    Why it hurts: if path MTU discovery is filtered, small messages pass and large ones are dropped: initialization
    succeeds, and the first large all_reduce blocks until the timeout.
    Fix: Set the same MTU on the training interfaces of all hosts and on every switch port between them.
    """
    expected = baseline_value(job, lambda worked: (size for one, _, _ in _used(worked) if (size := one.interface.mtu)))
    used = list(_used(job))
    if not job.is_multi_host and not (expected and used):
        yield Skip("one host")
        return
    members: list[tuple[Interface, IdenticalRanks]] = []
    sizes: dict[Hashable, list[int]] = {}
    for endpoint, interfaces, identical in used:
        if endpoint.interface.mtu is None:
            note = interfaces.why_hidden("interfaces")
            yield Unknown(note.reason if note else f"the MTU of {endpoint.interface.name} is unknown", identical.ranks)
            continue
        members.append((endpoint.interface, identical))
        sizes.setdefault(endpoint.interface.mtu, []).extend(identical.ranks)
    for finding in _judge(members, split_groups(sizes, expected=expected), _lost(job)):
        yield with_trials(job, finding, "packet", otherwise=finding.fix)
    if job.is_multi_host:
        yield from _of_rdma(job)


def _of_rdma(job: Job) -> Iterator[Finding]:
    """Report hosts whose RoCE ports have interfaces of different MTUs: the MTU of RDMA follows from them, and releases
    of NCCL that do not agree on the smaller one hang (NVIDIA/nccl#1524, NVIDIA/nccl#2135)."""
    sizes: dict[Hashable, list[int]] = {}
    names: set[str] = set()
    for interfaces, nccl, identical in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        if data_goes_by_sockets(nccl, identical.find(RdmaFacts)):
            continue
        ports = (one.port for one in rdma_ports_of(identical) if one.port.link_layer == "Ethernet")
        own = {gid.interface for port in ports for gid in port.gids if gid.interface}
        used = [one for one in interfaces.interfaces if one.name in own and one.mtu]
        if used:
            sizes.setdefault(tuple(sorted({one.mtu for one in used if one.mtu})), []).extend(identical.ranks)
            names |= {f"{one.name} (MTU {one.mtu})" for one in used}
    parted = split_groups(sizes)
    if not parted.minorities:
        return
    yield Finding(
        f"The MTUs of the RoCE interfaces differ: {_on_ranks(parted)}",
        ranks=parted.odd,
        evidence={"interfaces": sorted(names)[:16]},
        # net_ib.cc sets a connection to std::min(remQpInfo.mtu, portAttr.active_mtu).
        effect="NCCL uses the smaller MTU for each connection, which lowers bandwidth; if a switch port has a still "
        "smaller MTU, large messages are lost and collectives block.",
        fix=f"Set the same MTU on {', '.join(sorted({name.partition(' ')[0] for name in names})[:4])} of all hosts, "
        "and on the switch ports between them.",
    )


def _used(job: Job) -> Iterator[tuple[InterfaceEndpoint, InterfaceFacts, IdenticalRanks]]:
    for interfaces, _, identical in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        choice = choice_of(identical)
        if choice and choice.first and choice.first.interface.kind not in CARRIES_NOTHING:
            yield choice.first, interfaces, identical


def _lost(job: Job) -> list[tuple[str, str]]:
    return [
        (name, sample.peer)
        for paths, identical in job.each(PathFacts)
        for name in identical.hosts
        for sample in paths.samples
        if sample.full_size_arrived is False
    ]


def _judge(
    members: list[tuple[Interface, IdenticalRanks]], parted: MajoritySplit, lost: list[tuple[str, str]]
) -> Iterator[Finding]:
    odd_sizes = {group.value for group in parted.minorities}
    odd = [member for member in members if member[0].mtu in odd_sizes]
    evidence = {
        "MTU (bytes)": describe(parted._replace(expected=None)),
        "interfaces": sorted({f"{one.name} (MTU {one.mtu})" for one, _ in odd or members})[:8],
        "full_size_lost": [f"{first} -> {second}" for first, second in lost[:8]],
    }
    if lost:
        counts = Counter(host for pair in lost for host in set(pair))
        hosts = {host for host, count in counts.items() if count == len(lost)} or set(counts)
        affected = [member for member in members if hosts.intersection(member[1].hosts)]
        blamed = affected if parted.drifted else odd or affected
        first, second = lost[0]
        text = f"Full-size packets are lost between {first} and {second}"
        senders = {sender for sender, _ in lost}
        size = max((one.mtu or 0 for one, identical in affected if senders.intersection(identical.hosts)), default=0)
        fix = f"Set the MTU of every switch port and tunnel between {first} and {second} to at least {size} bytes."
        more = f" and {len(lost) - 1} more pair{'s' if len(lost) > 2 else ''}" if len(lost) > 1 else ""
        ranks = tuple(sorted(rank for _, identical in blamed for rank in identical.ranks))
        yield Finding(
            text + more,
            ranks,
            severity=Severity.ERROR,
            evidence=evidence,
            fix=fix if size else "",
            explains=_CONSEQUENCES,
        )
    elif odd and parted.expected:
        row = parted.unlike("MTU of the training interface", "{} bytes".format)
        deviation = BaselineDeviation((row,), parted.drifted)
        fix = _fix_of_all(odd, parted.expected.value) if parted.drifted else _fix(odd, parted)
        yield deviation.finding(parted.odd, evidence).extended({}, fix)
    elif odd:
        summary = f"The MTUs of the training interfaces differ: {_on_ranks(parted)}"
        yield Finding(summary, ranks=parted.odd, evidence=evidence, fix=_fix(odd, parted))


def _on_ranks(parted: MajoritySplit) -> str:
    """``1500 bytes on ranks 2-3, 9000 bytes on the others``."""
    sides = [f"{_bytes(group.value)} on {ranks_in_words(group.ranks, 4)}" for group in parted.minorities[:3]]
    return ", ".join([*sides, f"{_bytes(parted.common.value)} on the others"] if parted.common else sides)


def _bytes(sizes: object) -> str:
    return f"{' and '.join(map(str, sizes)) if isinstance(sizes, tuple) else sizes} bytes"


def _fix_of_all(odd: list[tuple[Interface, IdenticalRanks]], mtu: object) -> str:
    names = conjunction(list(dict.fromkeys(one.name for one, _ in odd))[:4])
    places = hosts_text(host for _, identical in odd for host in identical.hosts)
    return or_new_baseline(f"Set the MTU of {names} on {places} to {mtu}")


def _fix(odd: list[tuple[Interface, IdenticalRanks]], parted: MajoritySplit) -> str:
    """Commands that give the interfaces the MTU of the baseline or of most ranks, else the smallest."""
    usual = parted.expected.value if parted.expected else parted.common.value if parted.common else None
    wanted = usual or min(one.mtu or 0 for one, _ in odd)
    wrong = [(one.name, host) for one, identical in odd if one.mtu != wanted for host in identical.hosts]
    commands = "\n".join(dict.fromkeys(f"sudo ip link set dev {name} mtu {wanted}" for name, _ in wrong))
    hosts = list(dict.fromkeys(host for _, host in wrong))
    return f"On {', '.join(hosts[:4])}{' and others' if len(hosts) > 4 else ''}, set the MTU to {wanted}:\n{commands}"

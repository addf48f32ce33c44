"""NET012: hosts use different MTUs, or full-size packets are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from doctor.api import (
    CARRIES_NOTHING,
    CHOICE_SECTIONS,
    Alike,
    Finding,
    Interface,
    InterfaceFacts,
    Job,
    NcclFacts,
    PathFacts,
    PathSample,
    Scope,
    Severity,
    Sick,
    Skip,
    Unknown,
    Verdict,
    Well,
    check,
    choice_of,
    healthy,
)


def _mtu(size: int) -> InterfaceFacts:
    (facts, _), *_ = healthy(2, 1).job().each(InterfaceFacts)
    lo, eth0 = facts.interfaces
    return InterfaceFacts(interfaces=(lo, Interface("eth0", mtu=size, addresses=eth0.addresses)), routes=facts.routes)


_LOST = PathFacts(samples=(PathSample("node0", "10.0.0.1", full_size_arrived=False),))
_ARRIVED = PathFacts(samples=(PathSample("node1", "10.0.0.2", full_size_arrived=True),))


class _Member(NamedTuple):
    name: str
    mtu: int
    alike: Alike


@check(
    id="NET012",
    severity=Severity.WARNING,
    scope=Scope.JOB,
    needs=(InterfaceFacts, NcclFacts),
    cases=lambda: (
        Well("jumbo frames everywhere", healthy(hosts=3, per_host=1)),
        Well("one host", healthy(hosts=1, per_host=2)),
        Well("large packets arrive", healthy(2, 1).put(_ARRIVED, hosts=("node0",))),
        Sick("one host of three has 1500", healthy(3, 2).put(_mtu(1500), hosts=("node1",)), ranks=(2, 3)),
        Sick("two hosts disagree", healthy(2, 1).put(_mtu(1500), hosts=("node1",)), ranks=(0, 1)),
        Sick(
            "large packets are lost on the way",
            healthy(3, 1).put(_mtu(1500), hosts=("node1",)).put(_LOST, hosts=("node1",)),
            ranks=(1,),
            severity=Severity.ERROR,
        ),
        Sick(
            "the MTUs agree and a switch between drops large packets",
            healthy(2, 1).put(_LOST, hosts=("node1",)),
            ranks=(0, 1),
            severity=Severity.ERROR,
        ),
    ),
)
def mtu_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether the hosts use one MTU on the training interface, and whether packets of that size arrive.

    Why it hurts: where path MTU discovery is filtered, small messages pass and large ones vanish: init succeeds, the
    first large all_reduce waits until the time-out.
    Fix: `sudo ip link set <interface> mtu 9000` on all hosts (or 1500 on all), and the same on every switch port;
    `ping -M do -s 8972 <other host>` must be answered.
    """
    if not job.is_multi_host:
        yield Skip("one host")
        return
    members = []
    for interfaces, _, alike in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        choice = choice_of(alike)
        endpoint = choice.first if choice else None
        if endpoint is None or endpoint.interface.kind in CARRIES_NOTHING:
            continue
        if endpoint.interface.mtu is None:
            note = interfaces.why_hidden("interfaces")
            yield Unknown(note.reason if note else f"the MTU of {endpoint.interface.name}", alike.ranks)
            continue
        members.append(_Member(endpoint.interface.name, endpoint.interface.mtu, alike))
    yield from _judge(members, _lost(job))


def _lost(job: Job) -> list[tuple[str, str]]:
    """Pairs of hosts between which a packet of the interface's full size did not arrive."""
    return [
        (name, sample.peer)
        for paths, alike in job.each(PathFacts)
        for name in alike.hosts
        for sample in paths.samples
        if sample.full_size_arrived is False
    ]


def _judge(members: list[_Member], lost: list[tuple[str, str]]) -> Iterator[Finding]:
    sizes: Counter[int] = Counter()
    for member in members:
        sizes[member.mtu] += len(member.alike.members)
    odd = _odd(members, sizes)
    evidence = {
        "ranks_by_mtu_bytes": {str(size): count for size, count in sizes.most_common()},
        "interfaces": sorted({f"{member.name} ({member.mtu})" for member in odd or members})[:8],
        "full_size_lost": [f"{first} -> {second}" for first, second in lost[:8]],
    }
    if lost:
        hosts = _most_affected(lost)
        blamed = odd or [member for member in members if hosts.intersection(member.alike.hosts)]
        text = f"full-size packets are lost between {lost[0][0]} and {lost[0][1]}"
        more = f" and {len(lost) - 1} more pairs" if len(lost) > 1 else ""
        yield Finding(text + more, ranks=_ranks(blamed), severity=Severity.ERROR, evidence=evidence)
    elif odd:
        words = ", ".join(f"{count} ranks with {size}" for size, count in sizes.most_common(4))
        yield Finding(f"the training interfaces differ in MTU: {words} bytes", ranks=_ranks(odd), evidence=evidence)


def _odd(members: list[_Member], sizes: Counter[int]) -> list[_Member]:
    """The hosts with another MTU than most; all where no MTU is the most frequent."""
    top = sizes.most_common(2)
    if len(top) < 2:
        return []
    common = None if top[0][1] == top[1][1] else top[0][0]
    return [member for member in members if member.mtu != common]


def _most_affected(pairs: list[tuple[str, str]]) -> set[str]:
    """The host that all pairs share; both ends where there is none."""
    counts = Counter(host for pair in pairs for host in set(pair))
    shared = {host for host, count in counts.items() if count == len(pairs)}
    return shared or set(counts)


def _ranks(members: list[_Member]) -> tuple[int, ...]:
    return tuple(sorted(rank for member in members for rank in member.alike.ranks))

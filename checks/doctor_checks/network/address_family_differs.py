"""NET016: IPv4 on some hosts, IPv6 on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from doctor.api import (
    CARRIES_NOTHING,
    CHOICE_SECTIONS,
    Address,
    Alike,
    Endpoint,
    Finding,
    Interface,
    InterfaceFacts,
    Job,
    NcclFacts,
    Scope,
    Severity,
    Sick,
    Skip,
    Verdict,
    Well,
    check,
    choice_of,
    healthy,
)

_NAMES = {"inet": "IPv4", "inet6": "IPv6"}
_SIX = (Interface("eth0", addresses=(Address("inet6", "fd00::7", 64),)),)
_BOTH = (Interface("eth0", addresses=(Address("inet", "10.0.0.2", 16), Address("inet6", "fd00::2", 64))),)


@check(
    id="NET016",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    needs=(InterfaceFacts, NcclFacts),
    cases=lambda: (
        Well("IPv4 everywhere", healthy(hosts=2, per_host=2)),
        Well(
            "one host has both and takes IPv4", healthy(2, 1).alter(InterfaceFacts, hosts=("node1",), interfaces=_BOTH)
        ),
        Sick(
            "one host of three has only IPv6",
            healthy(3, 2).alter(InterfaceFacts, hosts=("node2",), interfaces=_SIX),
            ranks=(4, 5),
        ),
        Sick(
            "one rank is told to use IPv6",
            healthy(2, 2)
            .alter(InterfaceFacts, hosts=("node1",), interfaces=_BOTH)
            .environ(ranks=(3,), NCCL_SOCKET_FAMILY="AF_INET6"),
            ranks=(3,),
        ),
        Sick(
            "two hosts, one family each",
            healthy(2, 1).alter(InterfaceFacts, hosts=("node1",), interfaces=_SIX),
            ranks=(0, 1),
        ),
    ),
)
def address_family_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks would use addresses of one family.

    Why it hurts: a socket of one family can't dial an address of the other: `Address family not supported by protocol`
    or `connecting to address with family 0`, or the ranks wait for one another.
    Fix: `export NCCL_SOCKET_FAMILY=AF_INET` on all hosts (or AF_INET6), and give the interface such an address.
    """
    if not job.is_multi_host:
        yield Skip("one host")
        return
    used: list[tuple[Endpoint, Alike]] = []
    counts: Counter[str] = Counter()
    for _, _, alike in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        choice = choice_of(alike)
        if choice is not None and choice.first is not None and choice.first.interface.kind not in CARRIES_NOTHING:
            used.append((choice.first, alike))
            counts[choice.first.address.family] += len(alike.members)
    if len(counts) < 2:
        return
    (common, most), (_, fewest) = counts.most_common(2)
    odd = [(endpoint, alike) for endpoint, alike in used if most == fewest or endpoint.address.family != common]
    words = ", ".join(f"{count} ranks {_NAMES[family]}" for family, count in counts.most_common())
    yield Finding(
        f"the ranks would use different address families: {words}",
        ranks=tuple(sorted(rank for _, alike in odd for rank in alike.ranks)),
        evidence={"families": words, "addresses": sorted({endpoint.text for endpoint, _ in odd})[:8]},
    )

"""NET016: some hosts use IPv4, others IPv6."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from doctor.analysis.interface_choice import CARRIES_NOTHING, CHOICE_SECTIONS, InterfaceEndpoint, choice_of
from doctor.analysis.stats.baseline import or_new_baseline
from doctor.api import (
    BaselineDeviation,
    Finding,
    IdenticalRanks,
    Job,
    Scope,
    Severity,
    Skip,
    Verdict,
    baseline_value,
    check,
    ranks_in_words,
    split_groups,
)
from doctor.facts import Address, Interface, InterfaceFacts, MasterFacts, NcclFacts
from doctor.testing import Fails, JobBuilder, Passes, healthy

_NAMES = {"inet": "IPv4", "inet6": "IPv6"}
_SIX = (Interface("eth0", addresses=(Address("inet6", "fd00::7", 64),)),)
_ELSEWHERE = (Interface("eth0", addresses=(Address("inet", "172.16.9.9", 16),)),)
_BOTH = (Interface("eth0", addresses=(Address("inet", "10.0.0.2", 16), Address("inet6", "fd00::2", 64))),)


def _host(interfaces: tuple[Interface, ...]) -> JobBuilder:
    return healthy(1, 1).alter(InterfaceFacts, interfaces=interfaces)


@check(
    id="NET016",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    needs=(InterfaceFacts, NcclFacts),
    uses_baseline=True,
    needs_peers=True,
    cases=lambda: (
        Passes("IPv4 everywhere", healthy(hosts=2, per_host=2)),
        Passes(
            "one host has both and takes IPv4", healthy(2, 1).alter(InterfaceFacts, hosts=("node1",), interfaces=_BOTH)
        ),
        Passes("one process, as in the capture", healthy(1, 1).expecting(healthy(2, 2))),
        Passes("addresses of another network", healthy(2, 1).expecting(_host(_ELSEWHERE))),
        Fails(
            "one host of three has only IPv6",
            healthy(3, 2).alter(InterfaceFacts, hosts=("node2",), interfaces=_SIX),
            ranks=(4, 5),
        ),
        Fails(
            "one rank is set to use IPv6",
            healthy(2, 2)
            .alter(InterfaceFacts, hosts=("node1",), interfaces=_BOTH)
            .environ(ranks=(3,), NCCL_SOCKET_FAMILY="AF_INET6"),
            ranks=(3,),
        ),
        Fails(
            "two hosts, one family each",
            healthy(2, 1).alter(InterfaceFacts, hosts=("node1",), interfaces=_SIX),
            ranks=(0, 1),
        ),
        Fails(
            "two hosts, one family each, and a baseline that shows which",
            healthy(2, 1).alter(InterfaceFacts, hosts=("node1",), interfaces=_SIX).expecting(_host(_SIX)),
            ranks=(0,),
        ),
        Fails("one process that lost its IPv4 address", _host(_SIX).expecting(healthy(2, 2)), ranks=(0,)),
    ),
)
def address_family_differs(job: Job) -> Iterator[Verdict]:
    """Ask whether all ranks use addresses of the same family.

    Why it hurts: ranks of different families cannot connect to each other: NCCL fails with `Address family not
    supported by protocol` or `connecting to address with family 0`, or the ranks wait until the timeout.
    Fix: Give the interfaces of all hosts addresses of one family, and select it with NCCL_SOCKET_FAMILY.
    """
    # Only the family: addresses of another job are not a baseline.
    expected = baseline_value(job, lambda worked: (one.address.family for one, _ in _used(worked)))
    used = list(_used(job))
    if not job.is_multi_host and not (expected and used):
        yield Skip("one host")
        return
    groups: dict[Hashable, list[int]] = {}
    for endpoint, identical in used:
        groups.setdefault(endpoint.address.family, []).extend(identical.ranks)
    parted = split_groups(groups, expected=expected)
    if not parted.minorities:
        return
    families = {group.value for group in parted.minorities}
    addresses = sorted({endpoint.text for endpoint, _ in used if endpoint.address.family in families})[:8]
    evidence = {"addresses": addresses}
    if expected is None:
        sides = [f"{_NAMES[str(group.value)]} on {ranks_in_words(group.ranks, 4)}" for group in parted.minorities]
        sides += [f"{_NAMES[str(parted.common.value)]} on the others"] if parted.common else []
        summary = f"The ranks use different address families: {', '.join(sides)}"
        usual = parted.common.value if parted.common else "inet"
        fix = _fix([(one, same) for one, same in used if one.address.family != usual], str(usual))
        yield Finding(summary, ranks=parted.odd, evidence=evidence, fix=fix, explains=_consequences(job, parted.odd))
        return
    deviation = BaselineDeviation((parted.unlike("Address family", _NAMES.__getitem__),), parted.drifted)
    finding = deviation.finding(parted.odd, evidence, explains=_consequences(job, parted.odd))
    others = (
        [(one, same) for one, same in used if one.address.family != parted.expected.value] if parted.expected else []
    )
    fix = _fix(others, str(expected.value))
    yield finding.extended({}, or_new_baseline(fix.removesuffix(".")) if parted.drifted and fix.endswith(".") else fix)


def _fix(odd: Sequence[tuple[InterfaceEndpoint, IdenticalRanks]], usual: str) -> str:
    lacking = {
        f"{one.interface.name} on {', '.join(same.hosts)}": None
        for one, same in odd
        if not any(address.family == usual for address in one.interface.addresses)
    }
    if lacking:
        return f"Give {' and '.join(list(lacking)[:4])} an {_NAMES[usual]} address."
    ranks = ranks_in_words(tuple(sorted({rank for _, same in odd for rank in same.ranks})), 4)
    return f"Use {_NAMES[usual]} on {ranks}:\nexport NCCL_SOCKET_FAMILY={'AF_INET' if usual == 'inet' else 'AF_INET6'}"


def _consequences(job: Job, odd: Sequence[int]) -> tuple[str, ...]:
    """Peers are unreachable, and so is the master if ranks without its family have no route to it."""
    masters = [master for master, identical in job.each(MasterFacts) if set(odd).intersection(identical.ranks)]
    return ("NET006", "NET013") if any(one.resolved and one.source_address is None for one in masters) else ("NET013",)


def _used(job: Job) -> Iterator[tuple[InterfaceEndpoint, IdenticalRanks]]:
    for _, _, identical in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        choice = choice_of(identical)
        if choice and choice.first and choice.first.interface.kind not in CARRIES_NOTHING:
            yield choice.first, identical

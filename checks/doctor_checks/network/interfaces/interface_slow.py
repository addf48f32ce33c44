"""NET017: the training interface is slow."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.analysis.interface_choice import (
    CARRIES_NOTHING,
    CHOICE_SECTIONS,
    choice_of,
    good_interfaces,
    sends_data_by_sockets,
)
from doctor.api import Finding, IdenticalRanks, Job, Scope, Severity, Skip, Unknown, Verdict, check, merge
from doctor.core.text import HERE
from doctor.facts import Address, Interface, InterfaceFacts, NcclFacts, RdmaFacts
from doctor.testing import Fails, Passes, healthy

_GIGABIT = Interface("eth0", mtu=1500, speed=1_000, addresses=(Address("inet", "10.0.0.2", 16),))
_FAST = Interface("ens5", mtu=9000, speed=100_000, addresses=(Address("inet", "10.1.0.2", 16),))
_TEN = Interface("eth0", mtu=1500, speed=10_000, addresses=(Address("inet", "10.0.0.2", 16),))
_SILENT = Interface("eth0", mtu=1500, addresses=(Address("inet", "10.0.0.2", 16),))


@check(
    id="NET017",
    severity=Severity.INFO,
    scope=Scope.HOST,
    needs=(InterfaceFacts, NcclFacts),
    impacts={
        r"is idle": (
            "Each step waits while the gradients are sent over the slow interface, although a faster one is free."
        ),
    },
    cases=lambda: (
        Passes("100 Gb/s", healthy(hosts=2, per_host=1)),
        Passes("one host needs no network", healthy(1, 2).alter(InterfaceFacts, interfaces=(_GIGABIT,))),
        Passes("the slow one only starts RDMA", healthy(2, 1, rdma=1).alter(InterfaceFacts, interfaces=(_GIGABIT,))),
        Passes("a cloud interface of unknown speed", healthy(2, 1).alter(InterfaceFacts, interfaces=(_SILENT,))),
        Fails(
            "one host trains over gigabit Ethernet",
            healthy(2, 2).alter(InterfaceFacts, hosts=("node1",), interfaces=(_GIGABIT,)),
            ranks=(2, 3),
        ),
        Fails(
            "the fast card is idle",
            healthy(2, 1).alter(InterfaceFacts, interfaces=(_TEN, _FAST)).environ(NCCL_SOCKET_IFNAME="eth0"),
            ranks=(0, 1),
        ),
    ),
)
def interface_slow(job: Job, *, least_speed: float = 10_000, times_faster: float = 4) -> Iterator[Verdict]:
    """Ask whether the hosts train over a fast interface, if data is sent over TCP.

    Why it hurts: each step waits while the gradients are sent over the slow interface.
    Fix: Select a faster interface on every host with NCCL_SOCKET_IFNAME.
    """
    if not job.is_multi_host:
        yield Skip("one host")
        return
    found = []
    for interfaces, _, identical in job.each(InterfaceFacts, NcclFacts, also=(*CHOICE_SECTIONS, RdmaFacts)):
        choice = choice_of(identical)
        if choice is None or choice.first is None or choice.first.interface.kind in CARRIES_NOTHING:
            continue
        if choice.library == "NCCL" and not sends_data_by_sockets(identical):
            continue
        interface = choice.first.interface
        if interface.speed is None:
            yield Unknown(f"{interface.name} does not report its speed", identical.ranks, f"ethtool {interface.name}")
            continue
        taken = {endpoint.interface.name for endpoint in choice.endpoints}
        least = interface.speed * times_faster
        idle = [one for one in good_interfaces(interfaces) if one.name not in taken and (one.speed or 0) >= least]
        faster = max(idle, key=lambda one: one.speed or 0, default=None)
        if faster is not None or interface.speed < least_speed:
            found.append(_finding(interface, interface.speed, faster, choice.variable, identical))
    yield from merge(found, job.place_of)


def _finding(
    interface: Interface,
    speed: int,
    faster: Interface | None,
    variable: str,
    identical: IdenticalRanks,
) -> Finding:
    beside = f"; {faster.name} with {(faster.speed or 0) / 1000:g} Gb/s is idle" if faster else ""
    exact = "'=" + faster.name + "'" if faster and variable.startswith("NCCL_") else faster.name if faster else ""
    return Finding(
        f"Training uses {interface.name} on {HERE} with only {speed / 1000:g} Gb/s{beside}",
        ranks=identical.ranks,
        fix=f"Select the faster interface on every host:\nexport {variable}={exact}"
        if faster
        else f"Check the negotiated speed with `ethtool {interface.name}` on {HERE}, or use a faster network.",
    )

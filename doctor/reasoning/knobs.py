"""Settings of NCCL and Gloo that may mend a collective, as far as they can apply to the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from doctor.facts import EnvironmentFacts, GpuFacts, InterfaceFacts, NcclFacts, RdmaFacts
from doctor.job import Rank
from doctor.reasoning.network import CARRIES_NOTHING, active_rdma_ports, choice_of, is_usable

MOST_KNOBS = 5
"""That are tried for one collective: each costs every rank a new process that loads torch."""


class Knob(NamedTuple):
    """One variable that is set to another value, for all ranks alike."""

    name: str
    value: str

    @property
    def setting(self) -> str:
        """To be pasted."""
        value = f"'{self.value}'" if self.value.startswith("=") else self.value
        return f"export {self.name}={value}  # for all ranks"


def knobs_for(members: Sequence[Rank], backend: str, *, is_small: bool = False) -> tuple[Knob, ...]:
    """What can be changed for a group of these ranks, what is likeliest first; at most :data:`MOST_KNOBS`.
    ``is_small``: their messages are, and latency is what counts."""
    every = _of_nccl(members, is_small) if "nccl" in backend else _of_gloo(members) if "gloo" in backend else ()
    return tuple(knob for knob in every if not _is_set(members, knob))[:MOST_KNOBS]


def _of_gloo(members: Sequence[Rank]) -> Iterator[Knob]:
    yield from _interfaces(members, "GLOO_SOCKET_IFNAME", "")


def _of_nccl(members: Sequence[Rank], is_small: bool) -> Iterator[Knob]:
    """One of each kind before a second one of any. Source: the environment variables of NCCL's user guide."""
    hosts = {member.host.index for member in members}
    if len(hosts) < len(members):
        yield _toggled(members, "NCCL_P2P_DISABLE")
        yield _toggled(members, "NCCL_SHM_DISABLE")
    if len(hosts) > 1 and any(map(_has_rdma, members)):
        yield _toggled(members, "NCCL_IB_DISABLE")
    interfaces = [*_interfaces(members, "NCCL_SOCKET_IFNAME", "=")] if len(hosts) > 1 else []
    yield from interfaces[:1]
    yield from _other_order(members)
    yield from interfaces[1:]
    # Of latency neither is a cure: Simple is the protocol of large messages, and a ring has the most steps.
    if not is_small:
        yield Knob("NCCL_ALGO", "Ring")
        yield Knob("NCCL_PROTO", "Simple")


def _toggled(members: Sequence[Rank], name: str) -> Knob:
    """What is switched off for one of them at least is switched on, else off."""
    return Knob(name, "0" if any(_value(member, name) == "1" for member in members) else "1")


def _has_rdma(member: Rank) -> bool:
    rdma = member.find(RdmaFacts)
    return rdma is not None and bool(active_rdma_ports(rdma))


def _interfaces(members: Sequence[Rank], variable: str, sign: str) -> Iterator[Knob]:
    """Interfaces that all hosts have, and that one of them at least does not use now."""
    common = [name for name in _usable(members[0]) if all(name in _usable(member) for member in members)]
    for name in common:
        if not all(_uses(member, name) for member in members):
            yield Knob(variable, sign + name)


def _usable(member: Rank) -> list[str]:
    interfaces = member.find(InterfaceFacts)
    return [
        one.name
        for one in (interfaces.interfaces if interfaces else ())
        if is_usable(one) and one.kind not in CARRIES_NOTHING and one.kind != "dummy"
    ]


def _uses(member: Rank, name: str) -> bool:
    choice = choice_of(member)
    return choice is not None and choice.first is not None and choice.first.interface.name == name


def _other_order(members: Sequence[Rank]) -> Iterator[Knob]:
    """The devices backwards, where all hosts have as many and nobody chose among them."""
    counts = {len(gpus.gpus) if (gpus := member.find(GpuFacts)) is not None else 0 for member in members}
    count = counts.pop()
    if not counts and count > 1 and not any(_value(member, "CUDA_VISIBLE_DEVICES") for member in members):
        yield Knob("CUDA_VISIBLE_DEVICES", ",".join(map(str, reversed(range(count)))))


def _is_set(members: Sequence[Rank], knob: Knob) -> bool:
    return all(_value(member, knob.name) == knob.value for member in members)


def _value(member: Rank, name: str) -> str | None:
    nccl, environment = member.find(NcclFacts), member.find(EnvironmentFacts)
    set_for_nccl = nccl.get(name) if nccl is not None else None
    return set_for_nccl or (environment.get(name) if environment is not None else None)

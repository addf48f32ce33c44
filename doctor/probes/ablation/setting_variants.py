"""Settings of NCCL and Gloo that may mend a collective, as far as they can apply to the ranks of a group.

Ranks name an experiment to one another by its id; each looks up the variable and its value in this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from doctor.analysis.interface_choice import CARRIES_NOTHING, active_rdma_ports, choice_of, is_usable
from doctor.core.facts import EnvironmentFacts, GpuFacts, InterfaceFacts, NcclFacts, RdmaFacts
from doctor.core.job import Rank

MOST_VARIANTS = 5
"""That are tried for one collective: each costs every rank a new process that loads torch."""

ExperimentId = Literal[
    "p2p-off", "p2p-on", "shm-off", "shm-on", "ib-off", "ib-on", "algo-ring", "proto-simple",
    "nccl-interface", "gloo-interface", "devices-backwards",
]  # fmt: skip

MOST_DEVICES = 64
"""GPUs of one host."""
_INTERFACE = r"\A[^\s/,=^\0]{0,15}\Z"
"""Names of the kernel (IFNAMSIZ, dev_valid_name in net/core/dev.c), without what separates names in the variables."""

_FIXED: Mapping[str, tuple[str, str]] = {
    "p2p-off": ("NCCL_P2P_DISABLE", "1"),
    "p2p-on": ("NCCL_P2P_DISABLE", "0"),
    "shm-off": ("NCCL_SHM_DISABLE", "1"),
    "shm-on": ("NCCL_SHM_DISABLE", "0"),
    "ib-off": ("NCCL_IB_DISABLE", "1"),
    "ib-on": ("NCCL_IB_DISABLE", "0"),
    "algo-ring": ("NCCL_ALGO", "Ring"),
    "proto-simple": ("NCCL_PROTO", "Simple"),
}
_OF_INTERFACE: Mapping[str, tuple[str, str]] = {
    "nccl-interface": ("NCCL_SOCKET_IFNAME", "="),
    "gloo-interface": ("GLOO_SOCKET_IFNAME", ""),
}
"""The variable, and what stands before the name: NCCL takes a name with ``=`` as a whole one."""


class ExperimentRow(msgspec.Struct, frozen=True):
    """One row of the table. ``interface``: of a row that takes the name of a network interface; ``devices``: of the one
    that takes a number of GPUs."""

    id: ExperimentId
    interface: Annotated[str, Meta(pattern=_INTERFACE)] = ""
    devices: Annotated[int, Meta(ge=0, le=MOST_DEVICES)] = 0

    @property
    def setting(self) -> tuple[str, str] | None:
        """The variable and its value; ``None`` where an argument is missing or does not belong there."""
        if self.id in _FIXED:
            return None if self.interface or self.devices else _FIXED[self.id]
        if self.id == "devices-backwards":
            backwards = ",".join(map(str, reversed(range(self.devices))))
            return ("CUDA_VISIBLE_DEVICES", backwards) if self.devices > 1 and not self.interface else None
        variable, sign = _OF_INTERFACE[self.id]
        return (variable, sign + self.interface) if self.interface and not self.devices else None


class SettingVariant(NamedTuple):
    """One variable that is set to another value, on all ranks; ``experiment``: the row that says so."""

    experiment: ExperimentRow
    name: str
    value: str

    @property
    def setting(self) -> str:
        """To be pasted."""
        value = f"'{self.value}'" if self.value.startswith("=") else self.value
        return f"export {self.name}={value}  # for all ranks"


def variant_of(experiment: ExperimentRow) -> SettingVariant:
    """The knob of a row.

    Raises:
        ValueError: its arguments do not fit.
    """
    if experiment.setting is None:
        raise ValueError(f"the experiment {experiment.id} does not take these arguments")
    return SettingVariant(experiment, *experiment.setting)


def variants_for(members: Sequence[Rank], backend: str, *, is_small: bool = False) -> tuple[SettingVariant, ...]:
    """What can be changed for a group of these ranks, what is likeliest first; at most :data:`MOST_VARIANTS`.
    ``is_small``: their messages are, and latency is what counts."""
    every = (
        _of_nccl(members, is_small)
        if "nccl" in backend
        else _interfaces(members, "gloo-interface")
        if "gloo" in backend
        else ()
    )
    unset = (knob for knob in every if any(_value(member, knob.name) != knob.value for member in members))
    return tuple(unset)[:MOST_VARIANTS]


def _of_nccl(members: Sequence[Rank], is_small: bool) -> Iterator[SettingVariant]:
    """One of each kind before a second one of any. Source: the environment variables of NCCL's user guide."""
    hosts = {member.host.index for member in members}
    if len(hosts) < len(members):
        yield _toggled(members, "p2p-off", "p2p-on")
        yield _toggled(members, "shm-off", "shm-on")
    if len(hosts) > 1 and any(map(_has_rdma, members)):
        yield _toggled(members, "ib-off", "ib-on")
    interfaces = [*_interfaces(members, "nccl-interface")] if len(hosts) > 1 else []
    yield from interfaces[:1]
    yield from _other_order(members)
    yield from interfaces[1:]
    # Of latency neither is a cure: Simple is the protocol of large messages, and a ring has the most steps.
    if not is_small:
        yield variant_of(ExperimentRow("algo-ring"))
        yield variant_of(ExperimentRow("proto-simple"))


def _toggled(members: Sequence[Rank], off: ExperimentId, on: ExperimentId) -> SettingVariant:
    """What is switched off for one of them at least is switched on, else off."""
    knob = variant_of(ExperimentRow(off))
    return variant_of(ExperimentRow(on)) if any(_value(member, knob.name) == "1" for member in members) else knob


def _has_rdma(member: Rank) -> bool:
    rdma = member.find(RdmaFacts)
    return rdma is not None and bool(active_rdma_ports(rdma))


def _interfaces(members: Sequence[Rank], row: ExperimentId) -> Iterator[SettingVariant]:
    """Interfaces that all hosts have, and that one of them at least does not use now."""
    common = [name for name in _usable(members[0]) if all(name in _usable(member) for member in members)]
    for name in common:
        if is_interface_name(name) and not all(_uses(member, name) for member in members):
            yield variant_of(ExperimentRow(row, interface=name))


def is_interface_name(name: str) -> bool:
    """Whether it can be an argument of an experiment."""
    return re.fullmatch(_INTERFACE, name) is not None


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


def _other_order(members: Sequence[Rank]) -> Iterator[SettingVariant]:
    """The devices backwards, where all hosts have as many and nobody chose among them."""
    counts = {len(gpus.gpus) if (gpus := member.find(GpuFacts)) is not None else 0 for member in members}
    count = counts.pop()
    if (
        not counts
        and 1 < count <= MOST_DEVICES
        and not any(_value(member, "CUDA_VISIBLE_DEVICES") for member in members)
    ):
        yield variant_of(ExperimentRow("devices-backwards", devices=count))


def _value(member: Rank, name: str) -> str | None:
    nccl, environment = member.find(NcclFacts), member.find(EnvironmentFacts)
    set_for_nccl = nccl.get(name) if nccl is not None else None
    return set_for_nccl or (environment.get(name) if environment is not None else None)

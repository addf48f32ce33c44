"""Settings of NCCL and Gloo that may fix a collective, as far as they apply to the ranks of a group.

Ranks send each other the id of an experiment; each looks up the variable and its value in this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from doctor.analysis.interface_choice import active_rdma_ports, choice_of
from doctor.core.facts import EnvironmentFacts, GpuFacts, NcclFacts, RdmaFacts
from doctor.core.job import Rank
from doctor.probes.ablation.alternative_paths import usable_interfaces

MOST_VARIANTS = 5
"""Variants per collective: each costs every rank a new process that loads torch."""

ExperimentId = Literal[
    "p2p-off", "p2p-on", "shm-off", "shm-on", "ib-off", "ib-on", "algo-ring", "proto-simple",
    "nccl-interface", "gloo-interface", "devices-backwards",
]  # fmt: skip

MOST_DEVICES = 64
"""GPUs of one host."""
_INTERFACE = r"\A[^\s/,=^\0]{0,15}\Z"
"""Names that the kernel allows (IFNAMSIZ, dev_valid_name in net/core/dev.c), without the separators of the variables.
"""

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
"""The variable, and the prefix of the name: NCCL takes a name with ``=`` as a whole one."""


class ExperimentRow(msgspec.Struct, frozen=True):
    """One row of the table.

    ``interface``: for a row with the name of a network interface; ``devices``: for the one with a number of GPUs.
    """

    id: ExperimentId
    interface: Annotated[str, Meta(pattern=_INTERFACE)] = ""
    devices: Annotated[int, Meta(ge=0, le=MOST_DEVICES)] = 0

    @property
    def setting(self) -> tuple[str, str] | None:
        """The variable and its value; ``None`` if an argument is missing or does not belong there."""
        if self.id in _FIXED:
            return None if self.interface or self.devices else _FIXED[self.id]
        if self.id == "devices-backwards":
            backwards = ",".join(map(str, reversed(range(self.devices))))
            return ("CUDA_VISIBLE_DEVICES", backwards) if self.devices > 1 and not self.interface else None
        variable, sign = _OF_INTERFACE[self.id]
        return (variable, sign + self.interface) if self.interface and not self.devices else None


class SettingVariant(NamedTuple):
    """One variable that is set to another value, on all ranks; ``experiment``: its row."""

    experiment: ExperimentRow
    name: str
    value: str

    @property
    def setting(self) -> str:
        """The command to paste."""
        value = f"'{self.value}'" if self.value.startswith("=") else self.value
        return f"export {self.name}={value}  # for all ranks"


def variant_of(experiment: ExperimentRow) -> SettingVariant:
    """Return the variant of a row. Raises :class:`ValueError` if its arguments do not fit."""
    if experiment.setting is None:
        raise ValueError(f"the experiment {experiment.id} does not take these arguments")
    return SettingVariant(experiment, *experiment.setting)


def variants_for(members: Sequence[Rank], backend: str, *, is_small: bool = False) -> tuple[SettingVariant, ...]:
    """Return what can be changed for a group of these ranks, the likeliest first; at most :data:`MOST_VARIANTS`.

    ``is_small``: their messages are small, so that latency counts.
    """
    every: Iterable[SettingVariant] = ()
    if "nccl" in backend:
        every = _of_nccl(members, is_small)
    elif "gloo" in backend:
        every = _interfaces(members, "gloo-interface")
    unset = (variant for variant in every if any(_value(member, variant.name) != variant.value for member in members))
    return tuple(unset)[:MOST_VARIANTS]


def _of_nccl(members: Sequence[Rank], is_small: bool) -> Iterator[SettingVariant]:
    """Yield one of each kind before a second one of any. Source: environment variables in the NCCL user guide."""
    hosts = {member.host.index for member in members}
    if len(hosts) < len(members):
        yield _toggled(members, "p2p-off", "p2p-on")
        yield _toggled(members, "shm-off", "shm-on")
    rdma = (facts for member in members if (facts := member.find(RdmaFacts)) is not None)
    if len(hosts) > 1 and any(map(active_rdma_ports, rdma)):
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
    """Return the variant that enables what is disabled for at least one of them, else the one that disables it."""
    variant = variant_of(ExperimentRow(off))
    return variant_of(ExperimentRow(on)) if any(_value(member, variant.name) == "1" for member in members) else variant


def _interfaces(members: Sequence[Rank], row: ExperimentId) -> Iterator[SettingVariant]:
    """Yield interfaces that all hosts have, and that at least one of them does not use now."""
    names = [[one.name for one in usable_interfaces(member)] for member in members]
    common = [name for name in names[0] if all(name in others for others in names)]
    choices = [choice_of(member) for member in members]
    used = [choice.first.interface.name if choice and choice.first else None for choice in choices]
    for name in common:
        if re.fullmatch(_INTERFACE, name) and any(other != name for other in used):
            yield variant_of(ExperimentRow(row, interface=name))


def _other_order(members: Sequence[Rank]) -> Iterator[SettingVariant]:
    """Yield the reversed devices if all hosts have as many and none are selected."""
    counts = {len(gpus.gpus) if (gpus := member.find(GpuFacts)) is not None else 0 for member in members}
    count = counts.pop()
    is_selected = any(_value(member, "CUDA_VISIBLE_DEVICES") for member in members)
    if not counts and 1 < count <= MOST_DEVICES and not is_selected:
        yield variant_of(ExperimentRow("devices-backwards", devices=count))


def _value(member: Rank, name: str) -> str | None:
    nccl, environment = member.find(NcclFacts), member.find(EnvironmentFacts)
    set_for_nccl = nccl.get(name) if nccl is not None else None
    return set_for_nccl or (environment.get(name) if environment is not None else None)

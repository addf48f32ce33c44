"""Plan which processes join a process group, at which store, and what they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from doctor.analysis.fabric.pairing import RankSlot, partners_of, places_on_hosts
from doctor.analysis.visible_devices import backend_asked, local_rank_of, processor_asked
from doctor.core.decoding import prepared
from doctor.core.facts import MasterFacts
from doctor.core.job import Job
from doctor.core.text import counted, ranks_in_words
from doctor.probes.base import ProbeParticipant
from doctor.probes.collectives.group_limits import MEASURED, MOST_BYTES
from doctor.probes.collectives.group_steps import AxisMembership, GroupsNotRun, JoinGroup, TorchCapabilities
from doctor.probes.collectives.mesh import Axis
from doctor.probes.collectives.mesh_layout import AxisGroups, axis_groups, misfit
from doctor.probes.reachability.assignments import Agent
from doctor.probes.reachability.connection_plan import nodes_of
from doctor.probes.runtime.cost_text import in_bytes, in_seconds

MOST_BY_GLOO = 512
"""Ranks up to which Gloo is probed: all pairs connect, 130,000 connections."""
LOOPBACK = "127.0.0.1"


class GroupAssembly(NamedTuple):
    """A planned group: its ``processes`` by rank, the first of which hosts the store.

    ``backend`` and ``device`` (cuda or cpu); ``courses``: the axes along which it is used.
    """

    processes: tuple[ProbeParticipant, ...]
    backend: str
    device: str
    courses: tuple[AxisGroups, ...]

    @property
    def first(self) -> ProbeParticipant:
        """The process that hosts the store."""
        return self.processes[0]

    def words(self, seconds: float, most_bytes: int) -> str:
        """Format its maximum cost; ``most_bytes``: sent by one rank."""
        axes = ", ".join(f"{course.axis} {course.words}" for course in self.courses)
        count = len(self.processes)
        largest, pairs = MOST_BYTES[self.device] >> 20, counted(count // 2, "pair")
        meet = self.backend != MEASURED and count > 1
        messages = f", then pair by pair up to {largest} MiB, {pairs} at once" if meet else ""
        return (
            f"groups: collectives on {self.backend} of {count} ranks, those of one axis at the same time: "
            f"{axes}{messages}; at most {in_bytes(most_bytes)} a rank and {in_seconds(seconds)}"
        )

    def join(self, job: Job, port: int, seconds: float, patience: float, *, pairs: bool = True) -> dict[str, JoinGroup]:
        """Return the orders of all, by token. ``port``: of the store; ``pairs``: exchange messages, too."""
        addresses = tuple(addresses_of(job, self.first))
        partners: tuple[tuple[int, ...], ...] = ()
        if pairs and self.backend != MEASURED:
            places = places_on_hosts(job)
            slots = [RankSlot(process.host, places[process.host][process.number]) for process in self.processes]
            partners = partners_of(slots)
        numbers = tuple(process.number for process in self.processes)
        ranks = () if numbers == tuple(range(len(numbers))) else numbers
        shares = _shares(self.courses)
        return {
            process.token: JoinGroup(
                addresses=(LOOPBACK, *addresses) if process.host == self.first.host else addresses,
                port=port,
                place=place,
                count=len(self.processes),
                backend=self.backend,
                device="cuda" if self.device == "cuda" else "cpu",
                shares=shares[process.number],
                seconds=seconds,
                patience=patience,
                local_rank=local_rank_of(process.rank),
                partners=partners[place] if partners else (),
                ranks=ranks,
            )
            for place, process in enumerate(self.processes)
        }


def assemble(
    job: Job, processes: Sequence[ProbeParticipant], mesh: tuple[Axis, ...]
) -> GroupAssembly | GroupsNotRun | None:
    """Return the group of all processes that have loaded torch, or the reason why there can be none.

    ``None`` if no process has anything to exchange: ranks without torch report that, and one alone on a CPU has no
    peer.
    """
    ready = dict(_ready(processes))
    joining = sorted((one for one in processes if one.token in ready), key=lambda one: one.number)
    if len(joining) < 2 and not any(one.devices for one in ready.values()):
        others = tuple(process.number for process in processes if process not in joining)
        lone = f"no peer to exchange with: {ranks_in_words(others)} cannot load torch"
        return GroupsNotRun(reason=lone) if others else None
    meshes = {one.mesh for one in ready.values()}
    axes = mesh or (meshes.pop() if len(meshes) == 1 else ())
    world = job.world_size or len(processes)
    backend, device = _backend(joining, ready)
    if error := misfit(axes, world):
        return GroupsNotRun(error=error)
    if reason := _why_not(backend, device, len(joining)):
        return GroupsNotRun(reason=reason)
    return GroupAssembly(tuple(joining), backend, device, axis_groups(axes, joining))


def _ready(processes: Sequence[ProbeParticipant]) -> Iterator[tuple[str, TorchCapabilities]]:
    """Return the processes with torch, by token; of several that claim one rank the first."""
    seen: set[int] = set()
    for process in processes:
        if process.note and process.number not in seen:
            seen.add(process.number)
            yield process.token, msgspec.msgpack.decode(process.note, type=prepared(TorchCapabilities))


def _backend(joining: Sequence[ProbeParticipant], ready: Mapping[str, TorchCapabilities]) -> tuple[str, str]:
    """Return the backend and the kind of device that it uses, empty if none can be used.

    The backend is the one that the job asks for, else NCCL if torch has it and sees devices that may be used, else
    Gloo.
    """
    asked = next((asked for process in joining if (asked := backend_asked(process.rank))), "")
    on_devices = any(
        ready[process.token].devices and ready[process.token].nccl and processor_asked(process.rank) is None
        for process in joining
    )
    if on_devices and (not asked or "nccl" in asked):
        return "nccl", "cuda"
    name = "gloo" if not asked or "gloo" in asked else asked
    return name, "cpu" if all(name in ready[process.token].backends for process in joining) else ""


def _why_not(backend: str, device: str, count: int) -> str:
    if backend == "mpi":
        return "the MPI backend can be initialized only once per process, and only under mpirun"
    if not device:
        return f"the backend {backend} is not available: torch has no device for it, or does not know it"
    return f"Gloo is probed with at most {MOST_BY_GLOO} ranks" if backend == "gloo" and count > MOST_BY_GLOO else ""


def _shares(lines: Sequence[AxisGroups]) -> dict[int, tuple[AxisMembership, ...]]:
    found: dict[int, list[AxisMembership]] = {}
    for course in lines:
        for group in course.groups:
            for rank in group:
                found.setdefault(rank, []).append(AxisMembership(course.axis, group, course.bytes))
    return {rank: tuple(shares) for rank, shares in found.items()}


def addresses_of(job: Job, process: ProbeParticipant) -> Iterator[str]:
    """Return the addresses of the host of ``process``: those that NCCL or Gloo would use, then MASTER_ADDR."""
    nodes = nodes_of(job, (Agent(process.number, process.host, process.port or 1, process.word),))
    found = [dial.address for node in nodes for dial in node.dials]
    master = process.rank.find(MasterFacts)
    if process.number == 0 and master is not None:
        found.append(master.address)
    yield from dict.fromkeys(address for address in found if address)

"""Who joins a process group, where they meet, and what they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from doctor.analysis.fabric.pairing import RankSlot, partners_of, places_on_hosts
from doctor.analysis.launch_origin import ranks_in_words
from doctor.analysis.visible_devices import backend_asked, local_rank_of, processor_asked
from doctor.core.decoding import prepared
from doctor.core.facts import MasterFacts
from doctor.core.job import Job
from doctor.probes.base import ProbeParticipant
from doctor.probes.collectives.group_steps import AxisMembership, GroupsNotRun, JoinGroup, TorchCapabilities
from doctor.probes.collectives.mesh import Axis
from doctor.probes.collectives.mesh_layout import AxisGroups, axis_groups, misfit
from doctor.probes.collectives.pair_exchange import MEASURED, MOST_BYTES
from doctor.probes.reachability.assignments import Agent
from doctor.probes.reachability.connection_plan import nodes_of
from doctor.probes.runtime.cost_text import counted, in_bytes, in_seconds

MOST_BY_GLOO = 512
"""Ranks up to which Gloo is probed: everybody connects to everybody, 130,000 connections."""
LOOPBACK = "127.0.0.1"


class GroupAssembly(NamedTuple):
    """A group in the making: its ``posts`` by rank, the first of which hosts the store; ``backend`` and ``device``
    (cuda or cpu); the axes along which it is used."""

    posts: tuple[ProbeParticipant, ...]
    backend: str
    device: str
    courses: tuple[AxisGroups, ...]

    @property
    def first(self) -> ProbeParticipant:
        """Who hosts the store."""
        return self.posts[0]

    def words(self, seconds: float, most_bytes: int) -> str:
        """What it costs, at most; ``most_bytes``: that one rank sends."""
        axes = ", ".join(f"{course.axis} {course.words}" for course in self.courses)
        largest, pairs = MOST_BYTES[self.device] >> 20, counted(len(self.posts) // 2, "pair")
        meet = self.backend != MEASURED and len(self.posts) > 1
        messages = f", then pair by pair up to {largest} MiB, {pairs} at once" if meet else ""
        return (
            f"groups: collectives on {self.backend} of {len(self.posts)} ranks, those of one axis at the same time: "
            f"{axes}{messages}; at most {in_bytes(most_bytes)} a rank and {in_seconds(seconds)}"
        )

    def join(self, job: Job, port: int, seconds: float, patience: float, *, pairs: bool = True) -> dict[str, JoinGroup]:
        """The orders of all by their tokens. ``port``: of the store; ``pairs``: exchange messages, too."""
        addresses = tuple(addresses_of(job, self.first))
        meets = pairs and self.backend != MEASURED
        partners: tuple[tuple[int, ...], ...] = ()
        if meets:
            places = places_on_hosts(job)
            partners = partners_of([RankSlot(post.host, places[post.host][post.number]) for post in self.posts])
        numbers = tuple(post.number for post in self.posts)
        ranks = () if numbers == tuple(range(len(numbers))) else numbers
        shares = _shares(self.courses)
        return {
            post.token: JoinGroup(
                addresses=(LOOPBACK, *addresses) if post.host == self.first.host else addresses,
                port=port,
                place=place,
                count=len(self.posts),
                backend=self.backend,
                device="cuda" if self.device == "cuda" else "cpu",
                shares=shares[post.number],
                seconds=seconds,
                patience=patience,
                local_rank=local_rank_of(post.rank),
                partners=partners[place] if partners else (),
                ranks=ranks,
            )
            for place, post in enumerate(self.posts)
        }


def assemble(
    job: Job, posts: Sequence[ProbeParticipant], mesh: tuple[Axis, ...]
) -> GroupAssembly | GroupsNotRun | None:
    """The group of all whose torch has been loaded; what to tell them where there can't be one, and ``None`` where
    nobody has anything to exchange: ranks without torch say so themselves, and one alone on a CPU has no peer."""
    ready = dict(_ready(posts))
    joining = sorted((post for post in posts if post.token in ready), key=lambda post: post.number)
    if len(joining) < 2 and not any(one.devices for one in ready.values()):
        return _left_alone(posts, joining)
    meshes = {one.mesh for one in ready.values()}
    axes = mesh or (meshes.pop() if len(meshes) == 1 else ())
    world = job.world_size or len(posts)
    backend, device = _backend(joining, ready)
    if error := misfit(axes, world):
        return GroupsNotRun(error=error)
    if reason := _why_not(backend, device, len(joining)):
        return GroupsNotRun(reason=reason)
    return GroupAssembly(tuple(joining), backend, device, axis_groups(axes, joining))


def _ready(posts: Sequence[ProbeParticipant]) -> Iterator[tuple[str, TorchCapabilities]]:
    """Those who have torch, by token; of several processes that claim one rank the first."""
    seen: set[int] = set()
    for post in posts:
        if post.note and post.number not in seen:
            seen.add(post.number)
            yield post.token, msgspec.msgpack.decode(post.note, type=prepared(TorchCapabilities))


def _left_alone(posts: Sequence[ProbeParticipant], joining: Sequence[ProbeParticipant]) -> GroupsNotRun | None:
    others = tuple(post.number for post in posts if post not in joining)
    return (
        GroupsNotRun(reason=f"nobody to exchange with: {ranks_in_words(others)} can't load torch") if others else None
    )


def _backend(joining: Sequence[ProbeParticipant], ready: Mapping[str, TorchCapabilities]) -> tuple[str, str]:
    """What the job asks for, else NCCL where torch has it and sees devices that may be used, and Gloo elsewhere; and
    the kind of device that it takes, empty where none can be used."""
    asked = next((asked for post in joining if (asked := backend_asked(post.rank))), "")
    on_devices = any(
        ready[post.token].devices and ready[post.token].nccl and processor_asked(post.rank) is None for post in joining
    )
    if on_devices and (not asked or "nccl" in asked):
        return "nccl", "cuda"
    name = "gloo" if not asked or "gloo" in asked else asked
    return name, "cpu" if all(name in ready[post.token].backends for post in joining) else ""


def _why_not(backend: str, device: str, count: int) -> str:
    if backend == "mpi":
        return "the back end mpi can be set up once a process, by mpirun alone"
    if not device:
        return f"the back end {backend} can't be used here: torch has no device for it, or does not know it by itself"
    return f"Gloo is probed with {MOST_BY_GLOO} ranks at most" if backend == "gloo" and count > MOST_BY_GLOO else ""


def _shares(lines: Sequence[AxisGroups]) -> dict[int, tuple[AxisMembership, ...]]:
    """What each rank runs, by its number."""
    found: dict[int, list[AxisMembership]] = {}
    for course in lines:
        for group in course.groups:
            for rank in group:
                found.setdefault(rank, []).append(AxisMembership(course.axis, group, course.bytes))
    return {rank: tuple(shares) for rank, shares in found.items()}


def addresses_of(job: Job, post: ProbeParticipant) -> Iterator[str]:
    """Where others would reach the host of ``post``: as NCCL or Gloo would dial it, then as the job does its master."""
    nodes = nodes_of(job, (Agent(post.number, post.host, post.port or 1, post.word),))
    found = [dial.address for node in nodes for dial in node.dials]
    master = post.rank.find(MasterFacts)
    if post.number == 0 and master is not None:
        found.append(master.address)
    yield from dict.fromkeys(address for address in found if address)

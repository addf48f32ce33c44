"""What a keeper tells the processes of a group, and these tell their children that have torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from doctor.core.facts import CollectiveResult, CollectiveTiming, Exchange
from doctor.core.message_bounds import MOST_RANKS, Name, Number, Port, Ranks, Text
from doctor.probes.authorization import is_address
from doctor.probes.collectives.mesh import LARGEST_MESSAGE, Axis

WORLD = "world"
"""The axis of all ranks."""

AxisName = Annotated[str, Meta(pattern=r"\A\w{1,64}\Z")]
Backend = Annotated[str, Meta(pattern=r"\A[a-z0-9_:,]{1,64}\Z")]
Patience = Annotated[float, Meta(ge=0.0, le=120.0)]
"""Seconds of one step of a group."""
MOST_AXES_SENT = 64


class LoadTorch(msgspec.Struct, frozen=True, tag="Load"):
    """Load torch. ``world``: how many ranks the job has."""

    world: Number


class TorchCapabilities(msgspec.Struct, frozen=True):
    """What came of it: CUDA devices that torch sees, whether it has NCCL, back ends that it knows for the CPU, and the
    mesh that the launcher tells of."""

    devices: Number = 0
    nccl: bool = False
    backends: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    mesh: Annotated[tuple[Axis, ...], Meta(max_length=MOST_AXES_SENT)] = ()


class OpenStore(msgspec.Struct, frozen=True, tag="Open"):
    """Make the store at which a group meets, at any port of this host. ``seconds``: what its requests may take."""

    seconds: Patience


class GroupsNotRun(msgspec.Struct, frozen=True, tag="Tell"):
    """Nothing is to be run. ``error``: an illness of the job; ``reason``: why it can't be seen."""

    error: Text = ""
    reason: Text = ""


class AxisMembership(msgspec.Struct, frozen=True):
    """One axis as a rank sees it: the ``members`` of its group, and the ``bytes`` of the job's messages along it."""

    axis: AxisName
    members: Ranks
    bytes: Annotated[int, Meta(ge=0, le=LARGEST_MESSAGE)]


class JoinGroup(msgspec.Struct, frozen=True, tag="Join"):
    """Set up a process group of ``count`` ranks, of which this is the one at ``place``.

    ``ranks``: their numbers in the job, empty where these are their places. ``addresses``: of the host of the store,
    those to try first before others. ``device``: cuda or cpu; ``local_rank`` tells which one. ``shares``: all axes that
    this rank lies on, in the order of the job. ``partners``: the places of the ranks with which it exchanges messages,
    round by round, and NOBODY where it rests. ``seconds``: for the set-up, and ``patience`` for each collective.
    """

    addresses: Annotated[tuple[Name, ...], Meta(max_length=16)]
    port: Port
    place: Number
    count: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    backend: Backend
    device: Literal["cuda", "cpu"]
    shares: Annotated[tuple[AxisMembership, ...], Meta(max_length=MOST_AXES_SENT)]
    seconds: Patience
    patience: Patience
    local_rank: Number | None = None
    ranks: Ranks = ()
    partners: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=1 << 32)], ...], Meta(max_length=1 << 10)] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks of all, in order."""
        return self.ranks or tuple(range(self.count))


def ends_of(join: JoinGroup) -> list[tuple[str | None, int]]:
    """Addresses and port of the store; a name, as MASTER_ADDR may be one, is looked up."""
    return [(address if is_address(address) else None, join.port) for address in join.addresses]


class VerifyCollectives(msgspec.Struct, frozen=True, tag="Values"):
    """Run collectives of known values along an axis. ``over``: there is no time left; the first rank's word counts."""

    axis: str
    over: bool = False


class TimeCollectives(msgspec.Struct, frozen=True, tag="Pace"):
    """Time collectives along an axis; ``turn``: for the how manyth time, from 0. ``over`` as in
    :class:`VerifyCollectives`."""

    axis: str
    turn: int
    over: bool = False


class ExchangeMessages(msgspec.Struct, frozen=True, tag="Meet"):
    """Exchange messages with all partners, one after the other. ``over`` as in :class:`VerifyCollectives`."""

    over: bool = False


class LeaveGroup(msgspec.Struct, frozen=True, tag="Leave"):
    """Take the group down, unless it is ``broken``: then nobody knows in what state it is. Who has the store stays
    until the others have left, or ``seconds`` are over."""

    seconds: float
    broken: bool = False


GroupStep = OpenStore | JoinGroup | VerifyCollectives | TimeCollectives | ExchangeMessages | LeaveGroup
"""What a child is asked to do."""


class GroupStepResult(msgspec.Struct, frozen=True):
    """What came of a step. ``error``: how it broke; ``awaited``: ranks that this one waited for or lost; ``over``:
    nobody did it, for want of time; ``reason``: why a part was left out, of which nothing broke."""

    results: tuple[CollectiveResult, ...] = ()
    timings: tuple[CollectiveTiming, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    port: int = 0
    device: str = ""
    seconds: float = 0.0
    error: str = ""
    awaited: tuple[int, ...] = ()
    over: bool = False
    reason: str = ""


def port_of(note: bytes) -> int | None:
    """The port of a store that a process has made, by its note."""
    port = int(note) if note.isdigit() and len(note) < 6 else 0
    return port if 0 < port < 1 << 16 else None

"""Messages from the coordinator to the processes of a group, and from these to their children with torch."""

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
"""Time limit in seconds of one step of a group."""
MOST_AXES_SENT = 64


class LoadTorch(msgspec.Struct, frozen=True, tag="Load"):
    """Load torch. ``world``: number of ranks of the job."""

    world: Number


class TorchCapabilities(msgspec.Struct, frozen=True):
    """The torch of a process: number of visible CUDA devices, support of NCCL, CPU backends, and the mesh in the
    variables of the launcher."""

    devices: Number = 0
    nccl: bool = False
    backends: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    mesh: Annotated[tuple[Axis, ...], Meta(max_length=MOST_AXES_SENT)] = ()


class OpenStore(msgspec.Struct, frozen=True, tag="Open"):
    """Create the store of a group, at any port of this host. ``seconds``: timeout of its requests."""

    seconds: Patience


class GroupsNotRun(msgspec.Struct, frozen=True, tag="Tell"):
    """Nothing is run. ``error``: a fault of the job; ``reason``: why it cannot be tested."""

    error: Text = ""
    reason: Text = ""


class AxisMembership(msgspec.Struct, frozen=True):
    """One axis of a rank: the ``members`` of its group, and the ``bytes`` of the messages of the job along it."""

    axis: AxisName
    members: Ranks
    bytes: Annotated[int, Meta(ge=0, le=LARGEST_MESSAGE)]


class JoinGroup(msgspec.Struct, frozen=True, tag="Join"):
    """Set up a process group of ``count`` ranks, of which this is the one at ``place``.

    ``ranks``: their numbers in the job, empty if these are their places. ``addresses``: of the host of the store, in
    the order of attempts. ``device``: cuda or cpu; ``local_rank`` selects it. ``shares``: all axes of this rank, in the
    order of the job. ``partners``: places of the ranks with which it exchanges messages, one per round, ``NO_PARTNER``
    for none. ``seconds``: for the setup, ``patience``: for each collective.
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
    """Return addresses and port of the store; a name, as MASTER_ADDR may be one, is looked up."""
    return [(address if is_address(address) else None, join.port) for address in join.addresses]


class VerifyCollectives(msgspec.Struct, frozen=True, tag="Values"):
    """Run collectives of known values along an axis. ``over``: no time is left; that of the first rank counts."""

    axis: str
    over: bool = False


class TimeCollectives(msgspec.Struct, frozen=True, tag="Pace"):
    """Time collectives along an axis, in the ``turn`` counted from 0. ``over`` as in :class:`VerifyCollectives`."""

    axis: str
    turn: int
    over: bool = False


class ExchangeMessages(msgspec.Struct, frozen=True, tag="Meet"):
    """Exchange messages with all partners, one by one. ``over`` as in :class:`VerifyCollectives`."""

    over: bool = False


class LeaveGroup(msgspec.Struct, frozen=True, tag="Leave"):
    """Destroy the group, unless it is ``broken``: its state is unknown then.

    The host of the store waits until the others have left, at most ``seconds``.
    """

    seconds: float
    broken: bool = False


GroupStep = OpenStore | JoinGroup | VerifyCollectives | TimeCollectives | ExchangeMessages | LeaveGroup
"""Requests to a child."""


class GroupStepResult(msgspec.Struct, frozen=True):
    """Result of a step.

    ``error``: how it failed; ``awaited``: ranks that this one waited for or lost; ``over``: skipped because of the time
    limit; ``reason``: why a part was skipped without a failure.
    """

    results: tuple[CollectiveResult, ...] = ()
    timings: tuple[CollectiveTiming, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    port: int = 0
    device: str = ""
    error: str = ""
    awaited: tuple[int, ...] = ()
    over: bool = False
    reason: str = ""


def port_of(note: bytes) -> int | None:
    """Return the port of the store that a process has created, from its note."""
    port = int(note) if note.isdigit() and len(note) < 6 else 0
    return port if 0 < port < 1 << 16 else None

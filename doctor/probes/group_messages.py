"""What a keeper tells the processes of a group, and these tell their children that have torch."""

from __future__ import annotations

import msgspec

from doctor.facts import CollectiveResult, CollectiveTiming, Exchange
from doctor.probes.mesh import Axis

WORLD = "world"
"""The axis of all ranks."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load torch. ``world``: how many ranks the job has."""

    world: int


class Ready(msgspec.Struct, frozen=True):
    """What came of it: CUDA devices that torch sees, whether it has NCCL, back ends that it knows for the CPU, and the
    mesh that the launcher tells of."""

    devices: int = 0
    nccl: bool = False
    backends: tuple[str, ...] = ()
    mesh: tuple[Axis, ...] = ()


class Open(msgspec.Struct, frozen=True, tag=True):
    """Make the store at which a group meets, at any port of this host. ``seconds``: what its requests may take."""

    seconds: float


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Nothing is to be run. ``error``: an illness of the job; ``reason``: why it can't be seen."""

    error: str = ""
    reason: str = ""


class Share(msgspec.Struct, frozen=True):
    """One axis as a rank sees it: the ``members`` of its group, and the ``bytes`` of the job's messages along it."""

    axis: str
    members: tuple[int, ...]
    bytes: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """Set up a process group of ``count`` ranks, of which this is the one at ``place``.

    ``ranks``: their numbers in the job, empty where these are their places. ``addresses``: of the host of the store,
    those to try first before others. ``device``: cuda or cpu; ``local_rank`` tells which one. ``shares``: all axes that
    this rank lies on, in the order of the job. ``partners``: the places of the ranks with which it exchanges messages,
    round by round, and NOBODY where it rests. ``seconds``: for the set-up, and ``patience`` for each collective.
    """

    addresses: tuple[str, ...]
    port: int
    place: int
    count: int
    backend: str
    device: str
    shares: tuple[Share, ...]
    seconds: float
    patience: float
    local_rank: int | None = None
    ranks: tuple[int, ...] = ()
    partners: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks of all, in order."""
        return self.ranks or tuple(range(self.count))


class Values(msgspec.Struct, frozen=True, tag=True):
    """Run collectives of known values along an axis. ``over``: there is no time left; the first rank's word counts."""

    axis: str
    over: bool = False


class Pace(msgspec.Struct, frozen=True, tag=True):
    """Time collectives along an axis; ``turn``: for the how manyth time, from 0. ``over`` as in :class:`Values`."""

    axis: str
    turn: int
    over: bool = False


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Exchange messages with all partners, one after the other. ``over`` as in :class:`Values`."""

    over: bool = False


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Take the group down, unless it is ``broken``: then nobody knows in what state it is. Who has the store stays
    until the others have left, or ``seconds`` are over."""

    seconds: float
    broken: bool = False


Step = Open | Join | Values | Pace | Meet | Leave
"""What a child is asked to do."""


class Done(msgspec.Struct, frozen=True):
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

"""What a step of measuring is, for whoever keeps a gathering and for everybody who takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from doctor.collectors.base import Machine
from doctor.core.facts import Missing, Section
from doctor.core.job import Job, Rank
from doctor.probes.responder.listener import Responder
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import TorchChild


class ProbeParticipant(NamedTuple):
    """A process that takes part, as whoever plans sees it.

    ``rank``: its facts; ``host``: the place of its host in ``Job.hosts``. ``speaks``: whether it measures for its host,
    with a responder at ``port`` that knows ``word``. ``note``: what it said to this stage's last order.
    """

    token: str
    rank: Rank
    host: int
    speaks: bool
    port: int | None = None
    word: str = ""
    note: bytes = b""

    @property
    def number(self) -> int:
        """Its rank."""
        return self.rank.number


class StageOrders(NamedTuple):
    """What everybody is to do next: an order by the token of the process. ``seconds``: for all of them, at the same
    time; ``words``: what that costs at most (bytes, seconds, how many at once), to be said before."""

    by_token: Mapping[str, bytes]
    seconds: float
    words: str = ""

    @classmethod
    def of(cls, orders: Mapping[str, msgspec.Struct], seconds: float, words: str = "") -> StageOrders:
        """Encode the orders of each token."""
        return cls({token: msgspec.msgpack.encode(order) for token, order in orders.items()}, seconds, words)


class StageResult(NamedTuple):
    """What one process found: sections by key, and a note for the next plan of the same stage."""

    sections: Mapping[str, Section | Missing]
    note: bytes = b""


@dataclass
class ProbeContext:
    """What a process has at hand while it measures. ``number``: its rank. ``child``: started when first asked for."""

    number: int
    responder: Responder | None
    surroundings: Machine
    _child: TorchChild | None = field(default=None, repr=False)

    def torch_child(self) -> TorchChild:
        """The child of this process that has torch loaded; the same one for all stages, until it is lost."""
        if self._child is None or self._child.is_lost:
            self._child = TorchChild(self.surroundings.environ)
        return self._child

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()


class Stage(Protocol):
    """One step of measuring. An instance lives in each process for the time of a gathering; it may remember.

    ``name`` tells stages apart, ``makes`` lists the sections that it measures, ``most_seconds`` is for all of its
    orders together. Stages run one after the other, so that none disturbs another.
    """

    name: ClassVar[str]
    makes: ClassVar[tuple[type[Section], ...]]
    most_seconds: float

    def plan(self, job: Job, posts: Sequence[ProbeParticipant]) -> StageOrders | None:
        """The next orders, from all facts so far (what this stage has measured among them); ``None`` when nothing is
        left to measure. Called again after everybody has answered or the time is up."""

    def take_part(self, order: bytes, bench: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Do what ``order`` says, back before ``deadline``."""

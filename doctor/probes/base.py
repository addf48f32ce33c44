"""Interfaces between the coordinator of a gather, probe stages and the processes that run them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import msgspec

from doctor.collectors.base import Machine
from doctor.core.facts import Missing, Section
from doctor.core.job import Job, Rank
from doctor.probes.reachability.assignments import Agent
from doctor.probes.responder.listener import Responder
from doctor.probes.runtime.deadline import ProbeDeadline
from doctor.probes.runtime.torch_child import TorchChild


class ProbeParticipant(NamedTuple):
    """A process that takes part in a probe, as the planner sees it.

    ``rank``: its facts; ``host``: index of its host in ``Job.hosts``. ``speaks``: it measures for its host, with a
    responder at ``port`` that knows the secret ``word``. ``note``: its reply to the last order of this stage.
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

    @property
    def agent(self) -> Agent | None:
        """What other hosts need to probe its host; ``None`` if it does not answer for it."""
        return Agent(self.number, self.host, self.port, self.word) if self.speaks and self.port is not None else None


class StageOrders(NamedTuple):
    """The next orders of a stage, by the token of the process.

    ``seconds``: time limit of all of them, which run concurrently. ``words``: their maximum cost (bytes, seconds,
    concurrency), which is announced before they run.
    """

    by_token: Mapping[str, bytes]
    seconds: float
    words: str = ""

    @classmethod
    def of(cls, orders: Mapping[str, msgspec.Struct], seconds: float, words: str = "") -> StageOrders:
        """Encode the orders."""
        return cls({token: msgspec.msgpack.encode(order) for token, order in orders.items()}, seconds, words)


class StageResult(NamedTuple):
    """Result of one process: sections by key, and a note for the next plan of the same stage."""

    sections: Mapping[str, Section | Missing]
    note: bytes = b""


@dataclass
class ProbeContext:
    """Resources of a process during a probe. ``number``: its rank. ``child``: started on first use."""

    number: int
    responder: Responder | None
    machine: Machine
    _child: TorchChild | None = field(default=None, repr=False)

    def torch_child(self) -> TorchChild:
        """Return the child process with torch loaded, shared by all stages; a lost one is replaced."""
        if self._child is None or self._child.is_lost:
            self._child = TorchChild(self.machine.environ)
        return self._child

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()


StagePlan = Generator[StageOrders, tuple[Job, Sequence[ProbeParticipant]], None]
"""Orders of a stage, one after the other; the facts and replies after each are sent in."""


class Stage:
    """One stage of the probes. Each process has an instance for the duration of a gather, which may keep state.

    ``name`` identifies the stage, ``makes`` lists the sections it measures, ``most_seconds`` bounds all of its orders
    together. Stages run one after the other so that none disturbs another.
    """

    name: ClassVar[str]
    makes: ClassVar[tuple[type[Section], ...]]
    most_seconds: float
    _plan: StagePlan | None = None

    def steps(self, job: Job, processes: Sequence[ProbeParticipant]) -> StagePlan:
        """Yield the orders of the stage, based on all facts so far, those of this stage included."""
        raise NotImplementedError

    def plan(self, job: Job, processes: Sequence[ProbeParticipant]) -> StageOrders | None:
        """Return the next orders of :meth:`steps`; ``None`` when nothing is left.

        Called again after all processes have replied or the time limit has passed.
        """
        if self._plan is None:
            self._plan = self.steps(job, processes)
            return next(self._plan, None)
        try:
            return self._plan.send((job, processes))
        except StopIteration:
            return None

    def take_part(self, order: bytes, context: ProbeContext, deadline: ProbeDeadline) -> StageResult:
        """Execute ``order`` and return before ``deadline``."""
        raise NotImplementedError

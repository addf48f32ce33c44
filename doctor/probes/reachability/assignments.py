"""Messages of the light probes, encoded as MessagePack or JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.core.facts import ClockFacts, PathFacts, ReachFacts
from doctor.core.message_bounds import Name, Number, Port, Word
from doctor.probes.responder.wire_format import LARGEST

MOST_TARGETS = 256
"""Paths from one host: those of :func:`doctor.probes.reachability.connection_plan.partners` in the largest job, for two
libraries."""
Library = Annotated[str, Meta(max_length=32)]
Address = Annotated[str, Meta(max_length=64)]


class Agent(msgspec.Struct, frozen=True):
    """The process that answers and probes for a host.

    ``host``: index of the host in ``Job.hosts``; ``port`` and ``word``: of its
    :class:`~doctor.probes.responder.listener.Responder`.
    """

    rank: int
    host: int
    port: Port
    word: Word


class ProbeTarget(msgspec.Struct, frozen=True):
    """A connection to the host called ``peer``, whose name is looked up without an ``address``.

    ``library``: the one that would connect to this address; ``measured``: false if the connection alone is of interest.
    """

    peer: Name
    address: Address | None
    port: Port
    word: Word
    library: Library | None = None
    measured: bool = True


class MasterTarget(msgspec.Struct, frozen=True):
    """MASTER_ADDR and MASTER_PORT of this agent. ``peer``: the host of rank 0, empty if unknown. ``held``: a listener
    is expected there."""

    address: Name
    port: Port
    peer: Name = ""
    held: bool = False


class Assignment(msgspec.Struct, frozen=True):
    """The light probes of one agent.

    ``host``: name of its host. ``reference``: the host whose clock its own is compared with; ``None`` for the reference
    itself. ``hold_port``: listen there meanwhile. ``burst``: bytes that fill several packets of full size.
    """

    rank: Number
    host: Name
    targets: Annotated[tuple[ProbeTarget, ...], Meta(max_length=MOST_TARGETS)] = ()
    reference: Name | None = None
    master: MasterTarget | None = None
    hold_port: Port | None = None
    burst: Annotated[int, Meta(ge=0, le=LARGEST)] = 0


class LightProbeResult(msgspec.Struct, frozen=True):
    """Results of one agent. ``clock`` is ``None`` if the reference did not answer."""

    reach: ReachFacts
    paths: PathFacts
    clock: ClockFacts | None = None

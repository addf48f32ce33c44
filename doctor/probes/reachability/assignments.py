"""What the hosts of a job tell one another about probes. Whatever carries them: MessagePack or JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.core.facts import ClockFacts, PathFacts, ReachFacts
from doctor.core.message_bounds import Name, Number, Port, Word
from doctor.probes.responder.wire_format import LARGEST

MOST_TARGETS = 256
"""Ways from one host: those that :func:`doctor.probes.reachability.connection_plan.partners` gives the largest job,
by two libraries."""
Library = Annotated[str, Meta(max_length=32)]
Address = Annotated[str, Meta(max_length=64)]


class Agent(msgspec.Struct, frozen=True):
    """The process that answers for a host and probes from it. ``host`` is the host's place in ``Job.hosts``; ``port``
    and ``word`` are those of its :class:`~doctor.probes.responder.listener.Responder`."""

    rank: int
    host: int
    port: Port
    word: Word


class ProbeTarget(msgspec.Struct, frozen=True):
    """Somebody to connect to: the host called ``peer``. Without an ``address`` its name is looked up. ``library`` is
    the one that would dial this address; ``measured`` is false where the connection alone is of interest."""

    peer: Name
    address: Address | None
    port: Port
    word: Word
    library: Library | None = None
    measured: bool = True


class MasterTarget(msgspec.Struct, frozen=True):
    """MASTER_ADDR and MASTER_PORT as this agent was told them. ``peer``: the host of rank 0, empty where it is not
    known. ``held``: somebody is to listen there."""

    address: Name
    port: Port
    peer: Name = ""
    held: bool = False


class Assignment(msgspec.Struct, frozen=True):
    """What one agent has to do.

    ``host`` is the name of its own host. ``reference``: the host whose clock its own is compared with; ``None`` for
    whoever is the reference. ``hold_port``: listen there meanwhile. ``burst``: bytes that hold several packets of full
    size.
    """

    rank: Number
    host: Name
    targets: Annotated[tuple[ProbeTarget, ...], Meta(max_length=MOST_TARGETS)] = ()
    reference: Name | None = None
    master: MasterTarget | None = None
    hold_port: Port | None = None
    burst: Annotated[int, Meta(ge=0, le=LARGEST)] = 0


class LightProbeResult(msgspec.Struct, frozen=True):
    """What one agent found. ``clock`` is ``None`` where the reference gave no answer."""

    reach: ReachFacts
    paths: PathFacts
    clock: ClockFacts | None = None

"""The transfers that a host measures, and its peers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.core.message_bounds import Name, Number, Port, Word
from doctor.probes.bandwidth.transfer import MOST_BYTES, MOST_SECONDS
from doctor.probes.reachability.assignments import Address

MOST_PAIRINGS = 64
"""Of one host in one step: 16 rounds of all hosts, or three of five ways between two."""
MOST_ROUND_SECONDS = 10.0


class TransferPairing(msgspec.Struct, frozen=True):
    """Another host, in one round. ``place``: its number among the hosts; ``calls``: this host is the one that connects,
    to ``address`` and ``port``, where the ``word`` is known, from ``source`` if the kernel is not to choose. ``pairs``:
    that meet in this round."""

    round: Number
    place: Number
    peer: Name
    address: Address | None
    port: Port
    word: Word
    calls: bool
    pairs: Number = 1
    source: Address | None = None


class TransferSchedule(msgspec.Struct, frozen=True):
    """Whom one host meets, by rounds. ``survey``: a number that is the same for all hosts and no other measurement;
    ``place``: this host's number. ``first``: the round with which all begin; ``round_seconds``: for each, from the end
    of the one before it. ``bytes`` and ``seconds``: at most, one way."""

    survey: Annotated[int, Meta(ge=0)]
    place: Number
    word: Word
    meetings: Annotated[tuple[TransferPairing, ...], Meta(max_length=MOST_PAIRINGS)]
    first: Number
    round_seconds: Annotated[float, Meta(ge=0.0, le=MOST_ROUND_SECONDS)]
    bytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    seconds: Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]
    confirms: bool = False


def outgoing_connections(itinerary: TransferSchedule) -> list[tuple[str | None, int]]:
    """Addresses and ports that the host connects to."""
    return [(pairing.address, pairing.port) for pairing in itinerary.meetings if pairing.calls]

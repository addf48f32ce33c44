"""Schedule of the transfers of one host."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from doctor.core.message_bounds import Name, Number, Port, Word
from doctor.probes.bandwidth.transfer import MOST_BYTES, MOST_SECONDS
from doctor.probes.reachability.assignments import Address

MOST_PAIRINGS = 64
"""Of one host in one step: 16 rounds of all hosts, or three of five paths between two."""
MOST_ROUND_SECONDS = 10.0


class TransferPairing(msgspec.Struct, frozen=True):
    """Another host, in one round.

    ``place``: its index among the hosts; ``calls``: this host connects to ``address`` and ``port``, whose responder
    knows ``word``, from ``source`` if the kernel is not to choose. ``pairs``: number of pairs in this round.
    """

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
    """Pairings of one host, by round.

    ``survey``: a number that all hosts share and no other measurement has; ``place``: index of this host. ``first``:
    the first round; ``round_seconds``: duration of each, from the end of the previous one. ``bytes`` and ``seconds``:
    at most, one way.
    """

    survey: Annotated[int, Meta(ge=0)]
    place: Number
    word: Word
    meetings: Annotated[tuple[TransferPairing, ...], Meta(max_length=MOST_PAIRINGS)]
    first: Number
    round_seconds: Annotated[float, Meta(ge=0.0, le=MOST_ROUND_SECONDS)]
    bytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    seconds: Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]
    confirms: bool = False


def outgoing_connections(schedule: TransferSchedule) -> list[tuple[str | None, int]]:
    """Return the addresses and ports that the host connects to."""
    return [(pairing.address, pairing.port) for pairing in schedule.meetings if pairing.calls]

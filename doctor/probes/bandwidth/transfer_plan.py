"""Plan the pairs of each round, and compute their maximum cost."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from doctor.core.text import counted
from doctor.probes.bandwidth.schedule import TransferPairing, TransferSchedule
from doctor.probes.bandwidth.transfer import MOST_BYTES, MOST_SECONDS
from doctor.probes.reachability.connection_plan import ProbeNode
from doctor.probes.runtime.cost_text import in_bytes, in_seconds

ROUND_SECONDS = 2.5
"""For one pair, both ways: each may lose the first packet of its connection, which is sent again after a second. A
healthy pair needs some hundredths of a second, so this is the cost of an absent partner."""

Rounds = Sequence[Sequence[tuple[int, int]]]


def cost_of_rounds(rounds: Rounds, *, confirms: bool = False) -> tuple[float, str]:
    """Return the seconds of ``rounds``, at most, and their cost without packet headers, such as ``bandwidth: 8 hosts in
    7 rounds, 4 pairs at once, at most 67 MB each way a pair, 3.8 GB in all and 18 s``."""
    hosts = {host for pairs in rounds for pair in pairs for host in pair}
    sizes = [len(pairs) for pairs in rounds]
    seconds = len(rounds) * ROUND_SECONDS
    again = " (repeated)" if confirms else ""
    return seconds, (
        f"bandwidth{again}: {counted(len(hosts), 'host')} in {counted(len(rounds), 'round')}, "
        f"{counted(max(sizes, default=0), 'pair')} at once, at most {MOST_BYTES / 1e6:.0f} MB each way a pair, "
        f"{in_bytes(2 * MOST_BYTES * sum(sizes))} in all and {in_seconds(seconds)}"
    )


def transfer_schedules(
    nodes: Sequence[ProbeNode], rounds: Rounds, *, first: int = 0, confirms: bool = False
) -> Mapping[int, TransferSchedule]:
    """Return the schedule of each of ``nodes`` that has a partner, by its place.

    ``first``: number of the first round. The host with the lower place connects.
    """
    pairings: dict[int, list[TransferPairing]] = {}
    for number, pairs in enumerate(rounds, first):
        for pair in pairs:
            low, high = sorted(pair)
            pairings.setdefault(low, []).append(_pairing(nodes, number, high, len(pairs), calls=True))
            pairings.setdefault(high, []).append(_pairing(nodes, number, low, len(pairs), calls=False))
    survey = secrets.randbits(64)

    limits = (ROUND_SECONDS, MOST_BYTES, MOST_SECONDS)
    return {
        place: TransferSchedule(survey, place, nodes[place].agent.word, tuple(own), first, *limits, confirms)
        for place, own in pairings.items()
    }


def _pairing(nodes: Sequence[ProbeNode], number: int, place: int, pairs: int, *, calls: bool) -> TransferPairing:
    """Return the pairing with the host at ``place``, at the address that its library would give to others."""
    peer = nodes[place]
    address = peer.dials[0].address if peer.dials else None
    return TransferPairing(number, place, peer.name, address, peer.agent.port, peer.agent.word, calls, pairs)

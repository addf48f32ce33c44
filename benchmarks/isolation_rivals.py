"""Ways to find the slow host among many: ours, the same decoder on a hypercube, and four that others use.

The four are written from their descriptions, not from their code. They blame hosts; none has a word for a link, a
direction or a boundary. Where they have thresholds in units of their hardware, they are given ours, relative to the
median of what they measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import median
from typing import NamedTuple

from isolation_faults import Network, Pairs

from doctor.analysis.fabric.localization.localizer import BandwidthReading, confirming, localize, rounds
from doctor.analysis.fabric.localization.pairing_rounds import most_rounds_to_confirm

Claim = tuple[str, tuple[int, ...]]
"""What is blamed, as of a Suspect."""

BET = 0.5
"""The confidence from which a suspect counts as named."""

SLOW = 0.6


@cache
def our_rounds(count: int) -> Sequence[Pairs]:
    """The same for every network of so many hosts."""
    return rounds(count)


@cache
def hypercube_rounds(count: int) -> Sequence[Pairs]:
    """Partner = index XOR 2^k, a bye where there is none."""
    bits = range((count - 1).bit_length())
    return [[(host, host ^ 1 << bit) for host in range(count) if host < host ^ 1 << bit < count] for bit in bits]


class Design(NamedTuple):
    """``words``: how it goes; ``hosts_only``: it has no word for links, directions and boundaries. ``first_rounds``:
    the pairs that it measures before anything is known, where these do not depend on chance."""

    name: str
    words: str
    find: Callable[[Network], set[Claim]]
    hosts_only: bool = True
    most_hosts: int = 4096
    first_rounds: Callable[[int], Sequence[Pairs]] = our_rounds


def ours(network: Network) -> set[Claim]:
    """Windows, maximum likelihood, rounds to confirm."""
    return _decoded(network, our_rounds(network.count))


def hypercube(network: Network) -> set[Claim]:
    """The same with the hypercube's first rounds."""
    return _decoded(network, hypercube_rounds(network.count))


def _decoded(network: Network, planned: Sequence[Pairs]) -> set[Claim]:
    """As many rounds in all as ours takes."""
    most = len(our_rounds(network.count)) + most_rounds_to_confirm(network.count)
    readings = [reading for pairs in planned for reading in network.play(pairs)]
    found = localize(readings, network.count)
    while network.played < most and (planned := confirming(found, readings, network.count)):
        readings += network.play(planned[0], confirms=True)
        found = localize(readings, network.count)
    return {(one.kind, one.members) for one in found.suspects if one.confidence >= BET}


def two_rounds(network: Network) -> set[Claim]:
    """DLRover: neighbours first, then the fastest with the slowest; the better of a host's two times, and slow is what
    takes more than twice the median. A third host joins the last pair where the number is odd."""
    first = _seconds(network.play(_joined(range(network.count))))
    order = sorted(range(network.count), key=lambda host: first[host])
    inward = [host for pair in zip(order, reversed(order), strict=True) for host in pair][: network.count]
    second = _seconds(network.play(_joined(inward)))
    best = [min(first[host], second.get(host, first[host])) for host in range(network.count)]
    return _hosts(host for host in range(network.count) if best[host] > 2 * median(best))


def _joined(order: Sequence[int]) -> list[tuple[int, int]]:
    pairs = [(order[place], order[place + 1]) for place in range(0, len(order) - 1, 2)]
    return [*pairs, (order[-2], order[-1])] if len(order) % 2 else pairs


def _seconds(readings: Iterable[BandwidthReading]) -> dict[int, float]:
    """Of each host, by the slowest of what it sent and received: pairs wait for each other."""
    found: dict[int, float] = {}
    for one in readings:
        for host in (one.source, one.target):
            found[host] = max(found.get(host, 0.0), 1 / one.value)
    return found


def second_pass(network: Network) -> set[Claim]:
    """GCP's cluster health scanner: random pairs; each host of a slow pair once more with one of a good pair."""
    order = list(range(network.count))
    network.chance.shuffle(order)
    readings = network.play(_joined(order))
    limit = SLOW * median(one.value for one in readings)
    seconds = _seconds(readings)
    suspects = [host for host in order if 1 / seconds[host] < limit]
    good = [host for host in order if host not in set(suspects)]
    again: list[BandwidthReading] = []
    for begin in range(0, len(suspects) if good else 0, len(good) or 1):
        again += network.play(list(zip(suspects[begin:], good, strict=False)))
    slow = {one.source for one in again if one.value < limit} | {one.target for one in again if one.value < limit}
    return _hosts(slow & set(suspects))


def bisection(network: Network) -> set[Claim]:
    """Primus: a ring through all hosts; while a set is slow, both halves of it, two sets at a time. By its description
    a slow pair whose hosts pass alone leaves nobody to blame; here both are named."""
    limit = SLOW * median(one.value for one in network.play(_ring(range(network.count))))
    left, named = [list(range(network.count))], set()
    while left:
        hosts = left.pop()
        if min(one.value for one in network.play(_ring(hosts))) >= limit:
            continue
        if len(hosts) <= 3:
            named.update(hosts)
        else:
            left += [hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]]
    return _hosts(named)


def _ring(hosts: Sequence[int]) -> list[tuple[int, int]]:
    return [(hosts[place - 1], hosts[place]) for place in range(1 if len(hosts) == 2 else 0, len(hosts))]


def all_pairs(network: Network) -> set[Claim]:
    """SuperBench: every pair, by the circle method; a host is slow where the median of its readings is."""
    count = network.count + network.count % 2
    values: list[list[float]] = [[] for _ in range(network.count)]
    for turn in range(count - 1):
        circle = [0, *((turn + place) % (count - 1) + 1 for place in range(count - 1))]
        pairs = [(circle[place], circle[count - 1 - place]) for place in range(count // 2)]
        for one in network.play([pair for pair in pairs if max(pair) < network.count]):
            values[one.source].append(one.value)
            values[one.target].append(one.value)
    middles = [median(own) for own in values]
    return _hosts(host for host, value in enumerate(middles) if value < SLOW * median(middles))


def _hosts(named: Iterable[int]) -> set[Claim]:
    return {("host", (host,)) for host in named}


DESIGNS = (
    Design("this doctor", "windows of 2, 4, 8 … hosts, likelihood, rounds to confirm", ours, hosts_only=False),
    Design(
        "hypercube",
        "index XOR 2^k, the same likelihood and confirmation",
        hypercube,
        hosts_only=False,
        first_rounds=hypercube_rounds,
    ),
    Design("two rounds (DLRover)", "neighbours, then fast with slow; slow is over twice the median", two_rounds),
    Design("second pass (GCP)", "random pairs, members of slow ones with good hosts", second_pass),
    Design("bisection (Primus)", "rings through halves of slow sets", bisection),
    Design("all pairs (SuperBench)", "circle method; slow is a median below 0.6", all_pairs, most_hosts=256),
)

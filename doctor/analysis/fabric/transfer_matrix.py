"""The hosts of a job in an order that follows the network, and what they measured of the bandwidth between them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network
from statistics import median
from typing import NamedTuple

from doctor.analysis.fabric.localization.localizer import BandwidthReading, Localization, confirming, localize, rounds
from doctor.analysis.fabric.localization.noise_model import cells_of, pair_spread
from doctor.analysis.fabric.localization.pairing_rounds import MOST_CONFIRMING_FEW, Pairs
from doctor.analysis.interface_choice import CHOICE_SECTIONS, choice_of, network_of
from doctor.core.facts import InterfaceFacts, NcclFacts, Transfer, TransferFacts
from doctor.core.job import Job
from doctor.core.text import natural_key

Network = IPv4Network | IPv6Network

ONE_STREAM = 1.25e9
"""Bytes a second (10 Gb/s) beyond which a processor at either end bounds one stream of TCP, by whatever else it has to
do. More counts as this: it is no better network. The collectives of the job tell of faster ones."""

MOST_WAITED = 0.9
"""The share of waiting for processors beyond which too little is left to tell from."""

LEAST_READINGS = 3
"""Fewer can't be compared."""
MOST_CONFIRMING = MOST_CONFIRMING_FEW
"""Small jobs have most."""
FEW_HOSTS = 4
"""Of which each has met all others after three rounds."""
AT_ONCE, TOGETHER = 16, 2
"""Hosts up to which so many rounds that confirm are planned together: few have few suspects, and a step costs a
second."""
CONTROLS = 8
UNTOUCHED = 0.75
"""Quantile of the shares by which pairs are slower than before: a host that is slow at times has a part in half of the
pairs of four, and must not pass for the rule."""

_NUMBER = re.compile(r"(\d{1,9})")


class SentSample(NamedTuple):
    """What the host ``source`` sent to another, as it was received there."""

    source: str
    sample: Transfer


class HostBandwidths(NamedTuple):
    """``hosts`` in the order that follows the network, ``readings`` by their places there, :data:`ONE_STREAM` at most;
    ``spread``: the standard deviation of logarithms as both directions of fast pairs tell it, without that bound;
    ``groups``: hosts that may have a boundary around them."""

    hosts: tuple[str, ...]
    readings: tuple[BandwidthReading, ...]
    groups: tuple[frozenset[int], ...]
    spread: float = 0.0


def sent_samples(job: Job) -> tuple[SentSample, ...]:
    """All transfers of a job, once each."""
    return tuple(
        SentSample(host.name, sample)
        for host in job.hosts
        if (facts := host.find(TransferFacts)) is not None
        for sample in facts.samples
        if sample.peer != host.name
    )


def bandwidths(job: Job) -> HostBandwidths:
    """What is known of the bandwidth between the hosts that met, also of those that nothing arrived from."""
    sent = sent_samples(job)
    subnets = subnets_of(job)
    names = ordered_hosts({name for one in sent for name in (one.source, one.sample.peer)}, subnets)
    places = {name: place for place, name in enumerate(names)}
    measured = [
        (one, BandwidthReading(places[source], places[one.peer], one.bandwidth, one.round, one.confirms))
        for source, one in sent
        if one.bandwidth is not None
    ]
    readings = tuple(one._replace(value=min(unhindered(sample), ONE_STREAM)) for sample, one in measured)
    fast = [one for _, one in measured if one.value >= ONE_STREAM / 2]
    return HostBandwidths(names, readings, _groups(names, subnets), pair_spread(cells_of(fast)))


def unhindered(sample: Transfer) -> float:
    """Bytes a second for the time in which there were processors at both ends: a host that is busy, or allowed a part
    of a processor, is no slow network. No more than :data:`ONE_STREAM` by that."""
    value = sample.bandwidth or 0.0
    return max(value, min(value / (1 - min(sample.waited, MOST_WAITED)), ONE_STREAM))


def rounds_to_confirm(known: HostBandwidths, *, patient: bool = True) -> tuple[Pairs, ...]:
    """Pairs, by their places, that have to meet again before anybody is blamed; at most :data:`MOST_CONFIRMING` rounds
    in all, fewer where nobody is ``patient``. To be asked again when they have: of many hosts one round is planned at a
    time, by what is known then.

    Others meet beside them, so that all is compared with what is usual at that moment. Where every host has met the one
    that is suspected, all meet again as at first.
    """
    count = len(known.hosts)
    has_confirmed = any(one.confirms for one in known.readings)
    if len(known.readings) < LEAST_READINGS or (has_confirmed and count <= FEW_HOSTS):
        return ()
    isolation = localize(known.readings, count, groups=known.groups, least_spread=known.spread)
    found = confirming(isolation, known.readings, count, patient=patient)
    if has_confirmed and not found:
        return ()
    if not found and not isolation.suspects:
        return ()
    if count <= FEW_HOSTS or not found:
        return rounds(count)[: 3 if count <= FEW_HOSTS else 2]
    return tuple(_with_controls(pairs, known, isolation) for pairs in found[: TOGETHER if count <= AT_ONCE else 1])


def levelled(readings: Sequence[BandwidthReading]) -> tuple[BandwidthReading, ...]:
    """``readings``, those to confirm measured by what was usual then: where the pairs that had been well are slower by
    some factor, too, all of the network or of its processors was busier, and nobody in particular."""
    first = {(one.source, one.target): one.value for one in readings if not one.confirms}
    if not first:
        return tuple(readings)
    usual = median(sorted(first.values())[len(first) // 2 :])
    again = [(first.get((one.source, one.target), 0.0), one.value) for one in readings if one.confirms]
    shares = sorted(value / before for before, value in again if before > usual / 2 and value > 0)
    level = shares[int(UNTOUCHED * (len(shares) - 1))] if len(shares) > 1 else 1.0
    return tuple(one._replace(value=one.value / level) if one.confirms else one for one in readings)


def _with_controls(pairs: Pairs, known: HostBandwidths, isolation: Localization) -> Pairs:
    """``pairs``, and up to :data:`CONTROLS` that were well when they met, of other hosts that nobody suspects."""
    busy = {host for pair in pairs for host in pair}.union(*(one.members for one in isolation.suspects))
    found = list(pairs)
    for one in known.readings:
        if len(found) >= len(pairs) + CONTROLS:
            break
        if one.value >= isolation.typical / 2 and not busy & {one.source, one.target}:
            busy |= {one.source, one.target}
            found.append((min(one.source, one.target), max(one.source, one.target)))
    return tuple(found)


def subnets_of(job: Job) -> dict[str, Network]:
    """The subnet of the interface that each host uses, by the host's name; without those of which it is not known."""
    subnets: dict[str, Network] = {}
    for _, _, alike in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        choice = choice_of(alike)
        network = network_of(choice.first.address) if choice is not None and choice.first is not None else None
        if network is not None:
            subnets.update(dict.fromkeys(alike.hosts, network))
    return subnets


def ordered_hosts(names: Iterable[str], subnets: Mapping[str, Network]) -> tuple[str, ...]:
    """Hosts of one subnet side by side, and there by their names, ``node2`` before ``node10``: neighbours in a rack are
    mostly named in a row."""
    in_a_row = sorted(names, key=lambda name: (natural_key(name), name))
    first: dict[Network | None, int] = {}
    for place, name in enumerate(in_a_row):
        first.setdefault(subnets.get(name), place)
    return tuple(sorted(in_a_row, key=lambda name: first[subnets.get(name)]))


def _groups(names: tuple[str, ...], subnets: Mapping[str, Network]) -> tuple[frozenset[int], ...]:
    """Hosts of a subnet, and hosts whose names differ in the last number alone; two or more, and not all."""
    found: dict[Hashable, set[int]] = {}
    for place, name in enumerate(names):
        for key in (subnets.get(name), _NUMBER.split(name)[:-2]):
            if key:
                found.setdefault(str(key), set()).add(place)
    return tuple(dict.fromkeys(frozenset(group) for group in found.values() if 2 <= len(group) < len(names)))

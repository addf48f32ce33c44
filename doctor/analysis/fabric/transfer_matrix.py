"""The hosts of a job in the order of the network, and the measured bandwidths between them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network
from statistics import median

import msgspec

from doctor.analysis.fabric.localization.localizer import BandwidthReading, Localization, confirming, localize, rounds
from doctor.analysis.fabric.localization.noise_model import cells_of, pair_spread
from doctor.analysis.fabric.localization.pairing_rounds import Pairs
from doctor.analysis.fabric.sent_samples import sent_samples
from doctor.analysis.interface_choice import CHOICE_SECTIONS, choice_of, network_of
from doctor.core.facts import InterfaceFacts, NcclFacts, Transfer
from doctor.core.job import Job
from doctor.core.text import lazy_compile, natural_key

Network = IPv4Network | IPv6Network

ONE_STREAM = 1.25e9
"""Bytes per second (10 Gb/s) above which a processor limits one TCP stream. Higher values count as this, because they
do not show a better network; the collectives of the job measure faster networks."""

MOST_WAITED = 0.9
"""The share of waiting for processors above which the rest is too short to measure."""

LEAST_READINGS = 3
"""The minimum number of readings to compare."""

FEW_HOSTS = 4
"""The number of hosts up to which each has been paired with all others after three rounds."""
AT_ONCE, TOGETHER = 16, 2
"""The number of hosts up to which so many confirming rounds are planned together: few hosts have few suspects, and a
step takes a second."""
CONTROLS = 8
UNTOUCHED = 0.75
"""The quantile of slowdowns of pairs that counts as the general one. A host that is slow at times is in half of the
pairs of four hosts."""

_NUMBER = lazy_compile(r"(\d{1,9})")


class HostBandwidths(msgspec.Struct, frozen=True):
    """``hosts`` in the order of the network; ``readings`` by their index, at most :data:`ONE_STREAM`; ``spread``: the
    standard deviation of logarithms from both directions of fast pairs, without that limit; ``groups``: hosts that may
    be inside a boundary."""

    hosts: tuple[str, ...]
    readings: tuple[BandwidthReading, ...]
    groups: tuple[frozenset[int], ...]
    spread: float = 0.0


def bandwidths(job: Job) -> HostBandwidths:
    """The bandwidths between the paired hosts, including those from which nothing arrived."""
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
    """Bytes per second of the time with processors at both ends, at most :data:`ONE_STREAM`.

    A host that is busy, or limited to part of a processor, is not a slow network."""
    value = sample.bandwidth or 0.0
    return max(value, min(value / (1 - min(sample.waited, MOST_WAITED)), ONE_STREAM))


def rounds_to_confirm(known: HostBandwidths, *, patient: bool = True) -> tuple[Pairs, ...]:
    """Pairs, by index, to measure again before a suspect is reported; at most :data:`MOST_CONFIRMING_FEW` rounds in
    all, fewer without ``patient``.

    To be called again after the returned rounds; for many hosts only one round is returned. Other pairs are measured at
    the same time, so that readings can be compared with what is usual at that moment. If every host has been paired
    with the suspected one, all pairs are measured again."""
    count = len(known.hosts)
    has_confirmed = any(one.confirms for one in known.readings)
    if len(known.readings) < LEAST_READINGS or (has_confirmed and count <= FEW_HOSTS):
        return ()
    isolation = localize(known.readings, count, groups=known.groups, least_spread=known.spread)
    found = confirming(isolation, known.readings, count, patient=patient)
    if not found and (has_confirmed or not isolation.suspects):
        return ()
    if count <= FEW_HOSTS or not found:
        return rounds(count)[: 3 if count <= FEW_HOSTS else 2]
    return tuple(_with_controls(pairs, known, isolation) for pairs in found[: TOGETHER if count <= AT_ONCE else 1])


def levelled(readings: Sequence[BandwidthReading]) -> tuple[BandwidthReading, ...]:
    """``readings`` with the confirming ones corrected for the general load of their rounds.

    If pairs that had been normal are slower by some factor too, the network or the processors were busier."""
    first = {(one.source, one.target): one.value for one in readings if not one.confirms}
    if not first:
        return tuple(readings)
    usual = median(sorted(first.values())[len(first) // 2 :])
    again = [(first.get((one.source, one.target), 0.0), one.value) for one in readings if one.confirms]
    shares = sorted(value / before for before, value in again if before > usual / 2 and value > 0)
    level = shares[int(UNTOUCHED * (len(shares) - 1))] if len(shares) > 1 else 1.0
    return tuple(one._replace(value=one.value / level) if one.confirms else one for one in readings)


def _with_controls(pairs: Pairs, known: HostBandwidths, isolation: Localization) -> Pairs:
    """``pairs``, and up to :data:`CONTROLS` normal pairs of other hosts without a suspicion."""
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
    """The subnet of the interface that each host uses, by host name, if known."""
    subnets: dict[str, Network] = {}
    for _, _, same in job.each(InterfaceFacts, NcclFacts, also=CHOICE_SECTIONS):
        choice = choice_of(same)
        network = network_of(choice.first.address) if choice is not None and choice.first is not None else None
        if network is not None:
            subnets.update(dict.fromkeys(same.hosts, network))
    return subnets


def ordered_hosts(names: Iterable[str], subnets: Mapping[str, Network]) -> tuple[str, ...]:
    """Hosts by subnet, then by name, ``node2`` before ``node10``: hosts of a rack mostly have consecutive names."""
    in_a_row = sorted(names, key=lambda name: (natural_key(name), name))
    first: dict[Network | None, int] = {}
    for place, name in enumerate(in_a_row):
        first.setdefault(subnets.get(name), place)
    return tuple(sorted(in_a_row, key=lambda name: first[subnets.get(name)]))


def _groups(names: tuple[str, ...], subnets: Mapping[str, Network]) -> tuple[frozenset[int], ...]:
    """Hosts of one subnet, and hosts whose names differ only in the last number; at least two, and not all."""
    found: dict[Hashable, set[int]] = {}
    for place, name in enumerate(names):
        for key in (subnets.get(name), _NUMBER.split(name)[:-2]):
            if key:
                found.setdefault(str(key), set()).add(place)
    return tuple(dict.fromkeys(frozenset(group) for group in found.values() if 2 <= len(group) < len(names)))

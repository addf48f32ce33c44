"""Ranks whose devices compute or copy slower than those of their peers, measured at the same time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from statistics import median
from typing import Literal, NamedTuple

from doctor.analysis.stats.outliers import outliers
from doctor.core.facts import DeviceSpeed, DeviceSpeedFacts
from doctor.core.job import Job

SPEED_SHARE = 0.6
"""The share of the peers' median above which a device is not slow. GPUs of one model differ by some 10 % in clock, and
a shared processor by 20 %."""
DEVIATIONS = 4.0
LEAST_PEERS = 3
"""The minimum number of peers: of two, which one is odd can't be determined."""

What = Literal["product", "to_device", "to_host"]
WHATS: tuple[What, ...] = ("product", "to_device", "to_host")


class SlowDevice(NamedTuple):
    """A rank that is slow in ``what``: ``value`` and ``usual`` in operations or bytes per second.

    ``peers``: the number of its peers; ``usual_share``: the share of a processor that they have."""

    rank: int
    what: What
    value: float
    usual: float
    sample: DeviceSpeed
    peers: int
    usual_share: float | None = None


def speed_of(sample: DeviceSpeed, what: What) -> float | None:
    """Operations per second of the products (2 n³ each), or bytes per second of the copies."""
    if what == "to_device":
        return sample.to_device
    if what == "to_host":
        return sample.to_host
    return 2 * sample.size**3 / sample.seconds if sample.seconds and sample.size else None


def kind_of(sample: DeviceSpeed) -> Hashable:
    """The properties that two comparable samples have in common."""
    return (sample.device.partition(":")[0], sample.name, sample.dtype, sample.size)


def samples_of(job: Job, turn: int) -> dict[int, DeviceSpeed]:
    """The samples of each rank: the first (``turn`` 0), or those that confirm it (1, 2 …)."""
    found = {}
    for facts, same in job.facts(DeviceSpeedFacts):
        kept = [sample for sample in facts.samples if sample.confirms == (turn > 0)]
        place = max(0, turn - 1)
        if place < len(kept):
            found.update(dict.fromkeys(same.ranks, kept[place]))
    return found


def kinds(samples: Mapping[int, DeviceSpeed]) -> dict[Hashable, dict[int, DeviceSpeed]]:
    """The ranks with a sample, by the kind of their device."""
    found: dict[Hashable, dict[int, DeviceSpeed]] = {}
    for rank, sample in samples.items():
        if sample.error is None:
            found.setdefault(kind_of(sample), {})[rank] = sample
    return found


def slow_devices(
    samples: Mapping[int, DeviceSpeed], *, share: float = SPEED_SHARE, deviations: float = DEVIATIONS
) -> list[SlowDevice]:
    """The ranks below ``share`` of their peers' median by more than ``deviations`` deviations of the logarithms."""
    return [
        slow
        for peers in kinds(samples).values()
        if len(peers) >= LEAST_PEERS
        for what in WHATS
        for slow in _slow(peers, what, share, deviations)
    ]


def _slow(peers: Mapping[int, DeviceSpeed], what: What, share: float, deviations: float) -> Iterator[SlowDevice]:
    # Logarithms: if peers differ by a fifth, no speed can be four deviations below their median.
    speeds = {rank: math.log(speed) for rank, sample in peers.items() if (speed := speed_of(sample, what))}
    if len(speeds) < LEAST_PEERS:
        return
    least = -math.log(share) if share > 0 else math.inf
    for found in outliers(speeds, share=0.0, least=least, deviations=deviations):
        if found.excess < 0:
            value, usual = math.exp(found.value), math.exp(found.typical)
            others = [sample for rank, sample in peers.items() if rank != found.rank]
            shares = [one.processor_share for one in others if one.processor_share is not None]
            share_of_peers = median(shares) if shares else None
            yield SlowDevice(found.rank, what, value, usual, peers[found.rank], len(others), share_of_peers)


class DeviceSpeedResult(NamedTuple):
    """``slow``: as first measured, for ranks that were slow each time. ``unconfirmed``: slow at first and not measured
    again. ``alone``: ranks without enough peers of their kind. ``compared``: the number of ranks with enough peers."""

    slow: tuple[SlowDevice, ...]
    unconfirmed: tuple[int, ...]
    alone: tuple[int, ...]
    compared: int


def compare_devices(job: Job, *, share: float = SPEED_SHARE, deviations: float = DEVIATIONS) -> DeviceSpeedResult:
    """The ranks that are slow in the first and in all later measurements; not measured again, they are unconfirmed."""
    first = samples_of(job, 0)
    suspected = {(slow.rank, slow.what): slow for slow in slow_devices(first, share=share, deviations=deviations)}
    confirmed_slow, judged_again, turn = set(suspected), set(), 1
    while samples := samples_of(job, turn):
        compared = {rank for peers in kinds(samples).values() if len(peers) >= LEAST_PEERS for rank in peers}
        confirmed = {(slow.rank, slow.what) for slow in slow_devices(samples, share=share, deviations=deviations)}
        confirmed_slow = {key for key in confirmed_slow if key in confirmed or key[0] not in compared}
        judged_again |= compared
        turn += 1
    alone = [rank for peers in kinds(first).values() if len(peers) < LEAST_PEERS for rank in peers]
    return DeviceSpeedResult(
        tuple(slow for key, slow in suspected.items() if key in confirmed_slow and key[0] in judged_again),
        tuple(sorted({rank for rank, _ in suspected} - judged_again)),
        tuple(sorted(alone)),
        sum(map(len, kinds(first).values())) - len(alone),
    )

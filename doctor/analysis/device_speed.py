"""Which ranks' devices compute or copy slower than those of their peers: of the same kind, at the same moment."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from doctor.analysis.stats.outliers import outliers
from doctor.core.facts import DeviceSpeed, DeviceSpeedFacts
from doctor.core.job import Job

SPEED_SHARE = 0.6
"""Of its peers' median: what is above that is no fault yet. GPUs of one model differ by some 10 % in clock, and a
processor that others use too by 20 %."""
DEVIATIONS = 4.0
LEAST_PEERS = 3
"""Of two, which one is odd can't be told."""

What = Literal["product", "to_device", "to_host"]
WHATS: tuple[What, ...] = ("product", "to_device", "to_host")


class SlowDevice(NamedTuple):
    """A rank that is slow in ``what``: ``value`` against ``usual``, operations or bytes a second. ``peers``: how many
    ranks of its kind it was compared with; ``usual_share``: of the processor, as its peers have it."""

    rank: int
    what: What
    value: float
    usual: float
    sample: DeviceSpeed
    peers: int
    usual_share: float | None = None


def speed_of(sample: DeviceSpeed, what: What) -> float | None:
    """Operations a second of the products (2 n³ each), or bytes a second of the copies."""
    if what == "to_device":
        return sample.to_device
    if what == "to_host":
        return sample.to_host
    return 2 * sample.size**3 / sample.seconds if sample.seconds and sample.size else None


def kind_of(sample: DeviceSpeed) -> Hashable:
    """What has to be the same for two samples to be compared."""
    return (sample.device.partition(":")[0], sample.name, sample.dtype, sample.size)


def samples_of(job: Job, turn: int) -> dict[int, DeviceSpeed]:
    """By rank, what was measured first (``turn`` 0), or to confirm that (1, 2 …)."""
    found = {}
    for facts, same in job.facts(DeviceSpeedFacts):
        kept = [sample for sample in facts.samples if sample.confirms == (turn > 0)]
        place = max(0, turn - 1)
        if place < len(kept):
            found.update(dict.fromkeys(same.ranks, kept[place]))
    return found


def kinds(samples: Mapping[int, DeviceSpeed]) -> dict[Hashable, dict[int, DeviceSpeed]]:
    """The ranks that measured something, by the kind of their device."""
    found: dict[Hashable, dict[int, DeviceSpeed]] = {}
    for rank, sample in samples.items():
        if sample.error is None:
            found.setdefault(kind_of(sample), {})[rank] = sample
    return found


def slow_devices(
    samples: Mapping[int, DeviceSpeed], *, share: float = SPEED_SHARE, deviations: float = DEVIATIONS
) -> list[SlowDevice]:
    """The ranks that are slower than ``share`` of their peers' median, and farther from it than ``deviations`` robust
    standard deviations of the logarithms. Kinds of fewer than three ranks are passed over."""
    return [
        slow
        for peers in kinds(samples).values()
        if len(peers) >= LEAST_PEERS
        for what in WHATS
        for slow in _slow(peers, what, share, deviations)
    ]


def _slow(peers: Mapping[int, DeviceSpeed], what: What, share: float, deviations: float) -> Iterator[SlowDevice]:
    # Logarithms: where peers lie a fifth apart, no speed could be four deviations below their median.
    speeds = {rank: math.log(speed) for rank, sample in peers.items() if (speed := speed_of(sample, what))}
    if len(speeds) < LEAST_PEERS:
        return
    least = -math.log(share) if share > 0 else math.inf
    for found in outliers(speeds, share=0.0, least=least, deviations=deviations):
        if found.excess < 0:
            value, usual = math.exp(found.value), math.exp(found.typical)
            others = [sample for rank, sample in peers.items() if rank != found.rank]
            yield SlowDevice(found.rank, what, value, usual, peers[found.rank], len(others), _usual_share(others))


def _usual_share(samples: Sequence[DeviceSpeed]) -> float | None:
    shares = [sample.processor_share for sample in samples if sample.processor_share is not None]
    return median(shares) if shares else None


class DeviceSpeedResult(NamedTuple):
    """``slow``: as first measured, of ranks that were slow each time. ``unconfirmed``: slow in the first, and not
    measured again, as far as is known. ``alone``: ranks whose kind of device has too few peers. ``compared``: how many
    ranks have enough."""

    slow: tuple[SlowDevice, ...]
    unconfirmed: tuple[int, ...]
    alone: tuple[int, ...]
    compared: int


def compare_devices(job: Job, *, share: float = SPEED_SHARE, deviations: float = DEVIATIONS) -> DeviceSpeedResult:
    """What the first measurement suspects and all later ones confirm. A rank that was as fast as its peers once is
    well, and one that was never measured again is not judged."""
    first = samples_of(job, 0)
    suspected = {(slow.rank, slow.what): slow for slow in slow_devices(first, share=share, deviations=deviations)}
    standing, judged_again, turn = set(suspected), set(), 1
    while samples := samples_of(job, turn):
        compared = {rank for peers in kinds(samples).values() if len(peers) >= LEAST_PEERS for rank in peers}
        confirmed = {(slow.rank, slow.what) for slow in slow_devices(samples, share=share, deviations=deviations)}
        standing = {key for key in standing if key in confirmed or key[0] not in compared}
        judged_again |= compared
        turn += 1
    alone = [rank for peers in kinds(first).values() if len(peers) < LEAST_PEERS for rank in peers]
    return DeviceSpeedResult(
        tuple(slow for key, slow in suspected.items() if key in standing and key[0] in judged_again),
        tuple(sorted({rank for rank, _ in suspected} - judged_again)),
        tuple(sorted(alone)),
        sum(map(len, kinds(first).values())) - len(alone),
    )

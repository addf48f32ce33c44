"""Hosts that lose packets, from the transfers between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from doctor.analysis.fabric.sent_samples import sent_samples, touches
from doctor.core.facts import PathFacts
from doctor.core.job import Job

QUEUED_SECONDS = 25e-3
"""The increase of a round trip by a queue that overflows. TCP needs such drops to adapt to a slow link, so they are not
packet loss. A switch buffer of 3 MB holds that long at 1 Gb/s."""

LEAST_SEGMENTS = 20
"""The minimum number of segments of a transfer: a stalled connection sends few."""

PART_SHARE = 0.6
"""The fraction of lossy transfers of a host from which the host is the cause and not its peers."""

ALL_SHARE = 0.7
"""The fraction of all transfers from which no single host is the cause. One host of four is in half of them."""
_FEW = 3

LEAST_TRANSFERS = 2
"""The minimum number of lossy transfers: a single burst that overflows a queue is not a lossy path."""

STARVED = 0.5
"""The share of time without a processor from which a loss between two hosts is no evidence against their link, because
a starved host drops packets."""

End = Literal["host", "sending", "receiving", "link", "all"]


class PacketLoss(msgspec.Struct, frozen=True):
    """Packet loss of ``hosts``: in what one host sends, receives or both, between two hosts, or everywhere.

    ``sent`` and ``again``: segments sent and retransmitted in its lossy transfers; ``ways``: these transfers as text,
    ``of``: the number of its transfers. ``times``: the number of lossy rounds; for a link without those in which a host
    was starved."""

    end: End
    hosts: tuple[str, ...]
    sent: int
    again: int
    ways: tuple[str, ...]
    of: int
    times: int

    @property
    def share(self) -> float:
        """The fraction of retransmitted segments."""
        return self.again / self.sent


class _LossPath(msgspec.Struct, frozen=True):
    source: str
    target: str
    sent: int
    again: int
    times: int
    calm: int
    lossy: bool


def lossy_parts(job: Job, *, share: float, least: float) -> tuple[PacketLoss, ...]:
    """The fewest hosts and pairs that explain the transfers with more than ``share`` retransmitted segments.

    Transfers with fewer than ``least`` segments do not count."""
    ways = _loss_paths(job, share)
    found = []
    left = [way for way in ways if way.lossy]
    while left:
        end, hosts = _explaining(ways, left)
        own = [way for way in left if _has(way, end, hosts)]
        left = [way for way in left if way not in own]
        sent, again = sum(way.sent for way in own), sum(way.again for way in own)
        named = tuple(f"{way.source} -> {way.target}: {way.again:,} of {way.sent:,}" for way in own)
        of = sum(_has(way, end, hosts) for way in ways)
        times = sum(way.calm if end == "link" else way.times for way in own)
        found.append(PacketLoss(end, hosts, sent, again, named, of, times))
    return tuple(one for one in found if one.sent >= least and one.times >= LEAST_TRANSFERS)


def _loss_paths(job: Job, share: float) -> list[_LossPath]:
    """All transfers between two hosts, except those with a queue that overflowed."""
    idle = {
        (host.name, sample.peer): sample.round_trip
        for host in job.hosts
        if (paths := host.find(PathFacts)) is not None
        for sample in paths.samples
        if sample.round_trip is not None
    }
    sums: dict[tuple[str, str], list[int]] = {}
    times: Counter[tuple[str, str]] = Counter()
    calm: Counter[tuple[str, str]] = Counter()
    for sending in sent_samples(job):
        sample = sending.sample
        loaded, before = sample.round_trip, idle.get((sending.source, sample.peer), 0.0)
        is_queued = loaded is not None and loaded - before > QUEUED_SECONDS
        if (sample.segments_sent or 0) >= LEAST_SEGMENTS and not is_queued:
            way = (sending.source, sample.peer)
            sent, again = sample.segments_sent or 0, sample.segments_retransmitted or 0
            total = sums.setdefault(way, [0, 0])
            total[0] += sent
            total[1] += again
            times[way] += again > share * sent
            calm[way] += again > share * sent and sample.waited < STARVED
    return [
        _LossPath(*way, sent, again, times[way], calm[way], again > share * sent) for way, (sent, again) in sums.items()
    ]


def _explaining(ways: Sequence[_LossPath], left: Sequence[_LossPath]) -> tuple[End, tuple[str, ...]]:
    """The component that explains most of ``left``: a host with mostly lossy transfers, else the first pair."""
    names = {name for way in ways for name in (way.source, way.target)}
    if len(names) > _FEW and len(left) > ALL_SHARE * len(ways):
        return "all", tuple(sorted(names))
    total, lossy = _by_part(ways), _by_part(left)
    best: tuple[tuple[int, float], End, str] | None = None
    for (end, host), count in lossy.items():
        score = (count, count / total[end, host])
        # Losses with one peer only belong to the link.
        if count >= (3 if end == "host" else 2) and score[1] >= PART_SHARE and (best is None or score > best[0]):
            best = (score, end, host)
    if best is None:
        return "link", tuple(sorted((left[0].source, left[0].target)))
    return best[1], best[2:]


def _by_part(ways: Sequence[_LossPath]) -> Counter[tuple[End, str]]:
    found: Counter[tuple[End, str]] = Counter()
    for way in ways:
        found.update((("host", way.source), ("host", way.target), ("sending", way.source), ("receiving", way.target)))
    return found


def _has(way: _LossPath, end: End, hosts: Sequence[str]) -> bool:
    return end == "all" or touches(end, frozenset(hosts), way.source, way.target)

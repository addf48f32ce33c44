"""Whose packets get lost: of many transfers between hosts, the ends that all the lossy ones have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from doctor.analysis.fabric.transfer_matrix import SentSample, sent_samples
from doctor.core.facts import PathFacts
from doctor.core.job import Job

QUEUED_SECONDS = 25e-3
"""By which a round trip grows where packets wait in a queue that overflows: what is dropped there is how a slow link
tells TCP to slow down, and no packet is lost on the way. A switch's buffer of 3 MB holds a gigabit for that long."""

LEAST_SEGMENTS = 20
"""Of one transfer, to tell anything: a stalled connection sends few."""

PART_SHARE = 0.6
"""Of the transfers of a host, from which it is this host that loses and not its partners."""

ALL_SHARE = 0.7
"""Of all transfers, from which nobody in particular loses. One host of four has a part in half of them."""
_FEW = 3

LEAST_TRANSFERS = 2
"""In which packets have to get lost: a burst that overflows a queue once is no lossy way."""

STARVED = 0.5
"""Of the time for which an end waited for a processor, from which a loss between two hosts tells nothing of their link:
who gets no processor drops what comes meanwhile. Seen in the lab while the hypervisor took some of the processors."""

End = Literal["host", "sending", "receiving", "link", "all"]


class PacketLoss(NamedTuple):
    """``hosts`` lose packets: one in what it sends, receives or both, two between each other alone, or all. ``sent``
    and ``again``: segments of the lossy transfers in which it has a part; ``ways``: these in words, ``of`` so many.
    ``times``: in how many rounds; of a link without those in which one of its hosts was starved."""

    end: End
    hosts: tuple[str, ...]
    sent: int
    again: int
    ways: tuple[str, ...]
    of: int
    times: int

    @property
    def share(self) -> float:
        """Of the segments that were sent again."""
        return self.again / self.sent


class _LossPath(NamedTuple):
    source: str
    target: str
    sent: int
    again: int
    times: int
    calm: int
    lossy: bool


class _LossComponent(NamedTuple):
    end: End
    host: str


def lossy_parts(job: Job, *, share: float, least: float) -> tuple[PacketLoss, ...]:
    """The fewest hosts that explain the transfers of which more than ``share`` of the segments were sent again, and
    pairs that no host explains; those that sent ``least`` segments or more."""
    ways = _loss_paths(job, share)
    found = []
    left = [way for way in ways if way.lossy]
    while left:
        end, hosts = _explaining(ways, left)
        own = [way for way in left if _has(way, end, hosts)]
        left = [way for way in left if way not in own]
        found.append(_lossy(end, hosts, own, sum(_has(way, end, hosts) for way in ways)))
    return tuple(one for one in found if one.sent >= least and one.times >= LEAST_TRANSFERS)


def _loss_paths(job: Job, share: float) -> list[_LossPath]:
    """All that was sent from one host to another, without what waited in queues."""
    idle = _round_trips(job)
    sums: dict[tuple[str, str], list[int]] = {}
    times: Counter[tuple[str, str]] = Counter()
    calm: Counter[tuple[str, str]] = Counter()
    for sending in sent_samples(job):
        sample = sending.sample
        if (sample.segments_sent or 0) >= LEAST_SEGMENTS and not _is_queued(sending, idle):
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


def _round_trips(job: Job) -> dict[tuple[str, str], float]:
    """Between idle hosts, seconds."""
    return {
        (host.name, sample.peer): sample.round_trip
        for host in job.hosts
        if (paths := host.find(PathFacts)) is not None
        for sample in paths.samples
        if sample.round_trip is not None
    }


def _is_queued(sending: SentSample, idle: dict[tuple[str, str], float]) -> bool:
    loaded = sending.sample.round_trip
    before = idle.get((sending.source, sending.sample.peer), 0.0)
    return loaded is not None and loaded - before > QUEUED_SECONDS


def _explaining(ways: Sequence[_LossPath], left: Sequence[_LossPath]) -> tuple[End, tuple[str, ...]]:
    """The part that explains most of ``left``: a host whose transfers are mostly lossy, else the first pair."""
    names = {name for way in ways for name in (way.source, way.target)}
    if len(names) > _FEW and len(left) > ALL_SHARE * len(ways):
        return "all", tuple(sorted(names))
    total, lossy = _by_part(ways), _by_part(left)
    best: tuple[tuple[int, float], _LossComponent] | None = None
    for part, count in lossy.items():
        score = (count, count / total[part])
        if count >= _two_peers(part) and score[1] >= PART_SHARE and (best is None or score > best[0]):
            best = (score, part)
    if best is None:
        return "link", tuple(sorted((left[0].source, left[0].target)))
    return best[1].end, (best[1].host,)


def _by_part(ways: Sequence[_LossPath]) -> Counter[_LossComponent]:
    """How many of ``ways`` go through each host, and through each of its directions."""
    return Counter(
        part
        for way in ways
        for part in (
            _LossComponent("host", way.source),
            _LossComponent("host", way.target),
            _LossComponent("sending", way.source),
            _LossComponent("receiving", way.target),
        )
    )


def _two_peers(part: _LossComponent) -> int:
    """Lossy transfers that have to be seen: those with one peer alone are the link's."""
    return 3 if part.end == "host" else 2


def _has(way: _LossPath, end: End, hosts: Sequence[str]) -> bool:
    """Whether ``way`` goes through that part."""
    if end == "all":
        return True
    if end == "link":
        return {way.source, way.target} == set(hosts)
    return (end != "receiving" and way.source == hosts[0]) or (end != "sending" and way.target == hosts[0])


def _lossy(end: End, hosts: tuple[str, ...], own: Sequence[_LossPath], of: int) -> PacketLoss:
    named = tuple(f"{way.source} -> {way.target}: {way.again:,} of {way.sent:,}" for way in own)
    sent, again = sum(way.sent for way in own), sum(way.again for way in own)
    return PacketLoss(end, hosts, sent, again, named, of, sum(way.calm if end == "link" else way.times for way in own))

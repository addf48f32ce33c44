"""Slow components of the network between hosts, and host pairs whose bandwidth could not be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from doctor.analysis.fabric.localization.localizer import BandwidthReading, Blame, Localization, Suspect, localize
from doctor.analysis.fabric.sent_samples import SentSample, touches
from doctor.analysis.fabric.slow_paths import MeasuredPath, take_hosts
from doctor.analysis.fabric.transfer_matrix import HostBandwidths, levelled
from doctor.analysis.stats.outliers import MAD_TO_SIGMA
from doctor.core.facts import ReachFacts
from doctor.core.job import Job

FAILING_SHARE = 0.6
"""The fraction of failed transfers of a host from which the host is the cause and not its peers."""

SIGMAS = 4.0
"""Standard errors by which the slow readings must be below the usual value: among hundreds of candidates none is that
far off by chance."""

LEAST_LEFT = 4


class SlowPart(msgspec.Struct, frozen=True):
    """A suspect of :func:`doctor.analysis.fabric.localization.localizer.localize`, with the names of its hosts.

    ``others``: the other side of a boundary. ``value``: the median of its slow readings in bytes per second, and
    ``share`` of the usual value; ``readings``: those that it affects, slowest first."""

    suspect: Suspect
    hosts: tuple[str, ...]
    others: tuple[str, ...]
    value: float
    share: float
    readings: tuple[MeasuredPath, ...]

    @property
    def kind(self) -> Blame:
        """The kind of the suspect."""
        return self.suspect.kind


class SlowParts(msgspec.Struct, frozen=True):
    """``typical``: the usual bandwidth in bytes per second; ``spread``: the variation of usual values, as a share."""

    typical: float
    spread: float
    rounds: int
    parts: tuple[SlowPart, ...]


def slow_parts(known: HostBandwidths, *, least_share: float, least_confidence: float) -> SlowParts:
    """The components below ``least_share`` of the usual bandwidth, with at least ``least_confidence``."""
    readings = levelled(known.readings)
    count = len(known.hosts)
    found = localize(readings, count, groups=known.groups, least_share=least_share, least_spread=known.spread)
    if not found.typical:  # Next to nothing arrived anywhere.
        return SlowParts(0.0, 0.0, 0, ())
    left = _untouched(found, readings)
    usual = math.exp(median(left)) * found.typical if len(left) >= LEAST_LEFT else found.typical
    likely = (one for one in found.suspects if one.confidence >= least_confidence)
    slow = (one for one in likely if one.share * found.typical < least_share * usual)
    sure = [one for one in slow if _stands_out(one, left)]
    turns = len({reading.round for reading in known.readings})
    return SlowParts(usual, found.spread, turns, tuple(_part(one, known, usual) for one in sure))


def _untouched(found: Localization, readings: Sequence[BandwidthReading]) -> list[float]:
    """Log shares of the typical value, for readings that no suspect affects."""
    parts = [(part.kind, frozenset(part.members)) for part in found.suspects]
    return [
        math.log(one.value / found.typical)
        for one in readings
        if one.value > 0 and not any(touches(*part, one.source, one.target) for part in parts)
    ]


def _stands_out(suspect: Suspect, left: Sequence[float]) -> bool:
    if len(left) < LEAST_LEFT:
        return True
    middle = median(left)
    scatter = MAD_TO_SIGMA * median(abs(value - middle) for value in left)
    return (middle - math.log(suspect.share)) * math.sqrt(max(1, suspect.slow)) >= SIGMAS * scatter


def _part(suspect: Suspect, known: HostBandwidths, typical: float) -> SlowPart:
    members = frozenset(suspect.members)
    affected = (one for one in known.readings if touches(suspect.kind, members, one.source, one.target))
    touched = sorted(affected, key=lambda one: one.value)
    others = range(len(known.hosts)) if suspect.kind == "boundary" else ()
    value = median(one.value for one in touched[: max(1, suspect.slow)])
    return SlowPart(
        suspect,
        tuple(known.hosts[place] for place in suspect.members),
        tuple(known.hosts[place] for place in others if place not in members),
        value,
        value / typical,
        tuple(MeasuredPath(known.hosts[one.source], known.hosts[one.target], one.value) for one in touched),
    )


class UnmeasuredPairs(msgspec.Struct, frozen=True):
    """Host pairs without a bandwidth.

    ``hosts``: hosts whose transfers with nearly all peers failed, with the failures; ``cut_off``: those of them whose
    transfers all failed. ``ways``: single failures between other hosts."""

    hosts: tuple[tuple[str, tuple[str, ...]], ...]
    cut_off: frozenset[str]
    ways: tuple[SentSample, ...]


_OUTCOMES = {"unreached": "no connection", "late": "peer not ready in time", "cut": "connection ended"}


def unmeasured_pairs(sent: Sequence[SentSample]) -> UnmeasuredPairs:
    """The host pairs without a bandwidth in any round."""
    known = {(one.source, one.sample.peer) for one in sent if one.sample.bandwidth is not None}
    ways = {(one.source, one.sample.peer): one for one in sent}
    failed = {way: one for way, one in ways.items() if way not in known}
    paths = [MeasuredPath(*way, float(way in known)) for way in ways]
    hosts, rest = take_hosts(paths, [path for path in paths if not path.value], FAILING_SHARE)
    reached = {name for way in known for name in way}
    outcomes = {
        way: f"{source} -> {sample.peer}: {_OUTCOMES.get(sample.outcome, sample.outcome)}"
        for way, (source, sample) in failed.items()
    }
    return UnmeasuredPairs(
        tuple((name, tuple(outcomes[path.first, path.second] for path in failures)) for name, failures in hosts),
        frozenset(name for name, _ in hosts if name not in reached),
        tuple(failed[path.first, path.second] for path in rest),
    )


def is_reachable(job: Job, host: str) -> bool:
    """Whether most of the connections that other hosts tried to ``host`` were opened."""
    outcomes = [
        attempt.outcome == "open"
        for reach, same in job.each(ReachFacts)
        for attempt in reach.attempts
        if attempt.purpose == "peer" and attempt.peer == host and host not in same.hosts
    ]
    return sum(outcomes) * 2 > len(outcomes)

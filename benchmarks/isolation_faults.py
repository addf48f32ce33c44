"""A network that exists only as numbers: faults are planted in it, and pairs of its hosts are measured with noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from doctor.analysis.fabric.localization.localizer import BandwidthReading, Blame

Pairs = Sequence[tuple[int, int]]

USUAL = 1e9
WILD = 0.02
"""The share of pairs, and again of single readings, that are slower than they should be for no lasting reason."""


class Fault(NamedTuple):
    """A slow part: what a perfect diagnosis names. ``members``: the whole smaller side of a boundary. ``source``: of a
    link that is slow in one direction only the host that sends that way; to blame is the link, as for both."""

    blame: Blame
    members: tuple[int, ...]
    share: float
    at_times: bool = False
    source: int | None = None


@dataclass
class Network:
    """``count`` hosts with ``faults``. What was measured is kept: ``measured`` pairs, ``busy`` rounds."""

    count: int
    faults: Sequence[Fault]
    noise: float
    chance: random.Random
    measured: int = 0
    played: int = 0
    _resting: set[int] = field(default_factory=set)

    def play(self, pairs: Sequence[tuple[int, int]], confirms: bool = False) -> list[BandwidthReading]:
        """Measure all pairs at once, both ways; a fault that comes and goes is there in half of the rounds."""
        at_times = [place for place, fault in enumerate(self.faults) if fault.at_times]
        self._resting = {place for place in at_times if self.chance.random() < 0.5}
        found = []
        for first, second in pairs:
            busy = self._wild()
            found.append(BandwidthReading(first, second, self._value(first, second) * busy, self.played, confirms))
            found.append(BandwidthReading(second, first, self._value(second, first) * busy, self.played, confirms))
        self.measured += len(pairs)
        self.played += 1
        return found

    def _wild(self) -> float:
        return self.chance.uniform(0.05, 1.0) if self.chance.random() < WILD else 1.0

    def _value(self, source: int, target: int) -> float:
        slowest = 1.0
        for place, fault in enumerate(self.faults):
            if _touches(fault, source, target) and not (fault.at_times and place in self._resting):
                slowest = min(slowest, fault.share)
        return USUAL * slowest * math.exp(self.chance.gauss(0.0, self.noise)) * self._wild()


def _touches(fault: Fault, source: int, target: int) -> bool:
    if fault.blame == "sending":
        return source == fault.members[0]
    if fault.blame == "receiving":
        return target == fault.members[0]
    if fault.blame == "host":
        return fault.members[0] in (source, target)
    if fault.blame == "link":
        return {source, target} == {*fault.members} and fault.source in (None, source)
    return _inside(fault, source) != _inside(fault, target)


def _inside(fault: Fault, host: int) -> bool:
    """All planted boundaries are around runs of hosts."""
    return fault.members[0] <= host <= fault.members[-1]


def plant(
    kind: str, count: int, share: float, chance: random.Random, first_rounds: Sequence[Pairs]
) -> tuple[Fault, ...]:
    """Faults of a kind: none, host, hosts-2, hosts-4, hosts-8, sending, receiving, link (one that the first rounds
    measure), link-one-way (the same, slow in one direction only), any-link, host-and-link (a host, and a link between
    two others that the first rounds measure), half, rack, at-times."""
    if kind == "none":
        return ()
    if kind.startswith("hosts-"):
        return tuple(Fault("host", (one,), share) for one in sorted(chance.sample(range(count), int(kind[6:]))))
    if kind in ("half", "rack"):
        return (Fault("boundary", _block(kind, count, chance), share),)
    if kind == "any-link":
        return (Fault("link", tuple(sorted(chance.sample(range(count), 2))), share),)
    met = sorted(pair for pairs in first_rounds for pair in pairs)
    if kind in ("link", "link-one-way"):
        pair = chance.choice(met)
        return (Fault("link", pair, share, source=chance.choice(pair) if kind == "link-one-way" else None),)
    one = (chance.randrange(count),)
    if kind == "host-and-link":
        elsewhere = [pair for pair in met if one[0] not in pair]
        return (Fault("host", one, share), Fault("link", chance.choice(elsewhere), share))
    blame: Blame = "sending" if kind == "sending" else "receiving" if kind == "receiving" else "host"
    return (Fault(blame, one, share, at_times=kind == "at-times"),)


def _block(kind: str, count: int, chance: random.Random) -> tuple[int, ...]:
    """Both halves, of which the first is named, or a run of any size between two hosts and three eighths of all."""
    if kind == "half":
        return tuple(range(count // 2))
    size = chance.randint(2, max(2, 3 * count // 8))
    start = chance.randrange(count - size + 1)
    if 2 * size == count:
        start = 0  # of equal sides that with host 0 is named
    return tuple(range(start, start + size))

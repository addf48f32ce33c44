"""Localization of the host, direction, link or boundary that makes pairs of hosts slow, with a confidence.

Pairs of hosts are measured in :func:`rounds`; :func:`localize` finds the slow components by maximum a posteriori
estimation; :func:`confirming` plans more rounds, after which :func:`localize` over all readings gives the final result.

**Readings.** A pair is as slow as its slowest component. The logarithm of a reading is that of the usual value, plus
that of the share of the slowest component that affects it, plus noise: normal, with a standard deviation estimated from
the readings (1 to 50 %), or, in a few percent of the cases, an arbitrary value. Both directions of a pair in one round
also share other load on their hosts at that moment, so that a pair that was slow in one round only is no evidence for a
slow link.

**Components.** A host, one direction of a host, a link between two hosts, a boundary around a known group or around a
contiguous range of hosts; also hosts that are slow at times, each round with probability one half; and a whole round,
which is no fault. A component costs the logarithm of the number of components of its kind and of its rarity, and for
its unknown share Laplace's approximation of the evidence (whose limit is BIC, Schwarz 1978).

**Search.** Components are chosen greedily, the best first, with lazy re-evaluation (Minoux 1978: Accelerated greedy
algorithms); then those that the others make redundant are removed, and noise and components are estimated in turn. A
boundary explains many readings at once, so searches without boundaries compete with it. The usual value is the mode of
the better readings, because even with half of all hosts slow a quarter of the pairs is usual.

**Confidence** is the posterior probability of a component against every other component that affects the same readings,
and against no fault. Group testing with pairs as pools: Aldridge, Johnson and Scarlett 2019, Group Testing: An
Information Theory Perspective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from doctor.analysis.fabric.localization.component_model import ComponentFit, ComponentModel
from doctor.analysis.fabric.localization.confirmation import confirming
from doctor.analysis.fabric.localization.noise_model import (
    NoiseModel,
    cells_of,
    pair_spread,
    refined,
    shifted,
    upper_spread,
    usual_level,
)
from doctor.analysis.fabric.localization.pairing_rounds import rounds
from doctor.analysis.fabric.localization.suspect_search import SuspectSearch, explain
from doctor.analysis.fabric.localization.suspects import BandwidthReading, Blame, Localization, Suspect

__all__ = ["BandwidthReading", "Blame", "Localization", "Suspect", "confirming", "localize", "rounds"]


TIMES = 3
"""The maximum number of alternations between estimating noise and components."""


def localize(
    readings: Sequence[BandwidthReading],
    count: int,
    *,
    groups: Sequence[frozenset[int]] = (),
    least_share: float = 0.6,
    least_spread: float = 0.0,
) -> Localization:
    """Find the components that explain the slow ones of ``readings`` between hosts 0 to ``count`` - 1.

    ``groups``: hosts that share something (a subnet, a rack), around which a boundary may exist. A component with more
    than ``least_share`` of the usual value is not a suspect. ``least_spread``: a known lower bound of the standard
    deviation of logarithms, for readings that were capped. ``typical`` is 0 if nothing was measured."""
    cells = cells_of(readings)
    if count < 2 or sum(one.value > 0 for one in readings) < 2:
        return Localization(0.0, 0.0, ())
    level = usual_level(cells, -math.log(least_share) / 2)
    noise = NoiseModel(max(pair_spread(cells), upper_spread(cells, level), least_spread))
    for _ in range(TIMES):
        search = explain(partial(ComponentModel, shifted(cells, level), count, noise, least_share), groups)
        moved, better = refined(search.model.residuals(), least_spread)
        level += moved
        if abs(moved) < 0.1 * noise.sigma and abs(math.log(better.sigma / noise.sigma)) < 0.15:
            break
        noise = better
    suspects = _absorbed([_suspect(fit, search) for fit in search.found if fit.part.kind is not None])
    return Localization(math.exp(level), noise.sigma, tuple(sorted(suspects, key=lambda one: -one.confidence)))


def _absorbed(suspects: Sequence[Suspect]) -> list[Suspect]:
    """The suspects with only the most certain one for a host that is slow at times: its links were slow then, too."""
    at_times = {one.members[0] for one in suspects if one.intermittent}
    found: dict[int, Suspect] = {}
    kept = []
    for one in sorted(suspects, key=lambda one: (one.kind == "link", -one.confidence)):
        if one.kind == "boundary" or not at_times.intersection(one.members):
            kept.append(one)
        elif one.kind != "link":
            first = found.setdefault(one.members[0], one)
            if first.kind != one.kind:
                found[one.members[0]] = first._replace(kind="host")
    return [*kept, *found.values()]


def _suspect(fit: ComponentFit, search: SuspectSearch) -> Suspect:
    model, part = search.model, fit.part
    assert part.kind is not None
    slow, total = 0, 0
    for place, slowed in model.touched(part):
        for value, is_slowed in zip(model.cells[place][3:], slowed, strict=True):
            if is_slowed and value is not None:
                total += 1
                slow += value < model.slow_below
    return Suspect(
        part.kind,
        tuple(sorted(part.members)),
        math.exp(fit.level),
        search.confidence(fit),
        slow,
        total,
        fit.intermittent,
    )

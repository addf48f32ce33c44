"""The gain of each network component for the readings, and the readings that are explained so far."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from doctor.analysis.fabric.localization.noise_model import SLOWEST, NoiseModel, PairCell
from doctor.analysis.fabric.localization.suspects import Blame

Slowed = tuple[bool, bool]
"""Whether a component slows the forward and the backward direction of a cell."""

BOTH: Slowed = (True, True)

LEAST_ERRATIC = 3
"""The minimum number of slow readings with different factors that may have one cause; two occur by chance."""

OWN_WAY = 1 / 4
"""The prior probability of each way to be slow, for a component with a different factor each time: forward, backward,
both with one factor, both with different ones."""

COMMON_WAY, OTHER_WAY = 1 / 6, 1 / 12
"""The same for a component that mostly has one factor, such as a link that falls back to a lower rate: forward,
backward or both with that factor; and six ways in which one or both directions have another one."""

FEWEST_FOR_ERRATIC = 5
"""Number of hosts. With four hosts each is in half of the pairs that are slow by chance."""

BY_CHANCE, SAME_FACTOR_BY_CHANCE = 1e-4, 0.05
"""The probability below which the number of slow pairs of a host is not chance, and the same if they have one factor,
which is evidence in itself. On a busy machine one in six pairs is slow by chance, so the rate is estimated from the
pairs of the other hosts."""

USUALLY, AS_MANY = 0.06, 5
"""The prior fraction of pairs that are slow for a moment, and the number of pairs that this prior counts as."""


class Component(NamedTuple):
    """A candidate. ``members``: as for a Suspect; for a link that is slow in one direction (``oneway``) the source
    comes first. ``turn``: a round that was slow as a whole, which is no fault."""

    kind: Blame | None
    members: tuple[int, ...] = ()
    oneway: bool = False
    turn: int = -1


class ComponentFit(NamedTuple):
    """The fit of a component. ``level``: the logarithm of its share; ``score``: its log odds against no fault;
    ``cells``: the cells that it slowed, with the directions; ``price``: the cost included in the score; ``levels``: for
    each of ``cells`` both directions, if they vary."""

    part: Component
    level: float
    score: float
    cells: tuple[tuple[int, Slowed], ...]
    price: float
    intermittent: bool = False
    levels: tuple[tuple[float, float], ...] = ()


class _CellSlowdown(NamedTuple):
    """One way for a cell to be slow: the log shares forward and backward, their gain and their price."""

    ahead: float
    back: float
    gain: float
    price: float

    @property
    def worth(self) -> float:
        return self.gain - self.price


class ComponentModel:
    """The cells, and the readings expected from the suspects so far."""

    def __init__(self, cells: Sequence[PairCell], count: int, noise: NoiseModel, least_share: float) -> None:
        self.cells, self.count, self.noise = cells, count, noise
        self.most_level = math.log(least_share)
        self.slow_below = self.most_level / 2
        self.at_host: list[list[int]] = [[] for _ in range(count)]
        self.at_pair: dict[tuple[int, int], list[int]] = {}
        self.in_round: dict[int, list[int]] = {}
        for place, cell in enumerate(cells):
            self.at_host[cell.first].append(place)
            self.at_host[cell.second].append(place)
            self.at_pair.setdefault((cell.first, cell.second), []).append(place)
            self.in_round.setdefault(cell.round, []).append(place)
        self._slowest = [min(value for value in cell[3:] if value is not None) for cell in cells]
        self._in_order = sorted(self._slowest)
        self._suspected: Counter[int] = Counter()
        self._causes: list[dict[Component, tuple[float, float]]] = [{} for _ in cells]
        self.expected: list[tuple[float, float]] = [(0.0, 0.0)] * len(cells)
        self._density_now = [self._log_density(place, 0.0, 0.0) for place in range(len(cells))]

    def add(self, fit: ComponentFit) -> None:
        """Expect the component to be slow from now on."""
        for number, (place, (ahead, back)) in enumerate(fit.cells):
            same = (fit.level if ahead else 0.0, fit.level if back else 0.0)
            self._causes[place][fit.part] = fit.levels[number] if fit.levels else same
            self._expect(place)
        if fit.part.kind is not None:
            self._suspected.update(place for place, _ in fit.cells)

    def remove(self, fit: ComponentFit) -> None:
        """Do not expect the component to be slow any more."""
        for place, _ in fit.cells:
            self._causes[place].pop(fit.part, None)
            self._expect(place)
        if fit.part.kind is not None:
            self._suspected.subtract(place for place, _ in fit.cells)

    def _expect(self, place: int) -> None:
        causes = self._causes[place].values()
        ahead = min((cause[0] for cause in causes), default=0.0)
        back = min((cause[1] for cause in causes), default=0.0)
        self.expected[place] = (ahead, back)
        self._density_now[place] = self._log_density(place, ahead, back)

    def is_slow(self, place: int) -> bool:
        """Whether a reading of the cell is slower than expected by more than half of the relevant difference."""
        cell, (ahead, back) = self.cells[place], self.expected[place]
        below = self.slow_below
        return (cell.ahead is not None and cell.ahead - ahead < below) or (
            cell.back is not None and cell.back - back < below
        )

    def unexplained(self) -> list[int]:
        """The cells that are slower than expected."""
        return [place for place in range(len(self.cells)) if self.is_slow(place)]

    def residuals(self) -> list[PairCell]:
        """The cells minus the expected values; 0 below the measurable range, so that this does not count as noise."""

        def left(value: float | None, expected: float) -> float | None:
            return None if value is None or value <= SLOWEST else value - expected

        pairs = zip(self.cells, self.expected, strict=True)
        return [
            cell._replace(ahead=left(cell.ahead, ahead), back=left(cell.back, back)) for cell, (ahead, back) in pairs
        ]

    def log_density(self) -> float:
        """The log density of all cells, given the expected values."""
        return sum(self._density_now)

    def touched(self, part: Component) -> list[tuple[int, Slowed]]:
        """The cells that a component affects."""
        if part.kind is None:
            return [(place, BOTH) for place in self.in_round.get(part.turn, ())]
        if part.kind == "boundary":
            inside = frozenset(part.members)
            return [
                (place, BOTH)
                for member in part.members
                for place in self.at_host[member]
                if not (self.cells[place].first in inside and self.cells[place].second in inside)
            ]
        first, last = part.members[0], part.members[-1]
        if part.kind == "link":
            places = self.at_pair.get((min(first, last), max(first, last)), ())
            slowed = ((first < last), (first > last)) if part.oneway else BOTH
            return [(place, slowed) for place in places]
        if part.kind == "host":
            return [(place, BOTH) for place in self.at_host[first]]
        sending = part.kind == "sending"
        return [
            (place, (True, False) if (self.cells[place].first == first) == sending else (False, True))
            for place in self.at_host[first]
        ]

    def fit(self, part: Component, prior: float) -> ComponentFit | None:
        """The fit of a component that is always slow; ``None`` if its median reading is not slow."""
        touched = self.touched(part)
        level = self._level(touched)
        if level is None or level > self.most_level:
            return None
        gain = sum(self.gain(place, slowed, level) for place, slowed in touched)
        price = prior + self._price(touched)
        return ComponentFit(part, level, gain - price, tuple(touched), price)

    def fit_at_times(self, part: Component, prior: float) -> ComponentFit | None:
        """The fit of a component that is slow in some rounds, each with probability 1/2; ``None`` unless in two."""
        touched = self.touched(part)
        slow = [(place, slowed) for place, slowed in touched if self.is_slow(place)]
        level = self._level(slow)
        if level is None or level > self.most_level or len(slow) < 2:
            return None
        gain, own = 0.0, []
        for place, slowed in touched:
            more = self.gain(place, slowed, level)
            gain += max(more, 0.0) + math.log1p(math.exp(-abs(more)))
            if more > 0:
                own.append((place, slowed))
        if len(own) < 2 or self._by_chance(touched, [self._slowest[place] for place, _ in own]) > SAME_FACTOR_BY_CHANCE:
            return None
        price = prior + self._price(own) + len(touched) * math.log(2)
        return ComponentFit(part, level, gain - price, tuple(own), price, True)

    def erratic_fits(self, part: Component, prior: float) -> Iterator[ComponentFit]:
        """The fits of a component that is slow in some cells, in any direction and with varying factors.

        An example is a NIC that loses its link now and then. Each factor has a price; a recurring one is paid once."""
        if self.count < FEWEST_FOR_ERRATIC:
            return
        touched = self.touched(part)
        slow = {place: self._slow_ways(place, slowed) for place, slowed in touched}
        values = [value for both in slow.values() for value in both if value < 0.0]
        if len(values) < LEAST_ERRATIC:
            return
        for common in (None, median(values)):
            if (fit := self._fit_erratic(part, prior, touched, slow, common)) is not None:
                yield fit

    def _fit_erratic(
        self,
        part: Component,
        prior: float,
        touched: Sequence[tuple[int, Slowed]],
        slow: Mapping[int, tuple[float, float]],
        common: float | None,
    ) -> ComponentFit | None:
        own: dict[int, _CellSlowdown] = {}
        for place, (ahead, back) in slow.items():
            best = max(self._ways(place, ahead, back, common), key=lambda way: way.worth, default=None)
            if best is not None and best.worth > 0:
                own[place] = best
        taken = [value for way in own.values() for value in (way.ahead, way.back) if value < 0.0]
        if len(taken) < LEAST_ERRATIC:
            return None
        if self._by_chance(touched, [min(way.ahead, way.back) for way in own.values()]) > BY_CHANCE:
            return None
        price = prior + len(touched) * math.log(2) + sum(way.price for way in own.values())
        if common is not None:
            price += self._price_of_level(sum(value == common for value in taken))
        gain = sum(way.gain for way in own.values())
        cells = tuple((place, (way.ahead < 0.0, way.back < 0.0)) for place, way in own.items())
        levels = tuple((way.ahead, way.back) for way in own.values())
        return ComponentFit(part, median(taken), gain - price, cells, price, True, levels)

    def _slow_ways(self, place: int, slowed: Slowed) -> tuple[float, float]:
        cell, expected = self.cells[place], self.expected[place]
        ahead, back = (
            value
            if is_affected and value is not None and value - now < self.slow_below and value < self.most_level
            else 0.0
            for value, is_affected, now in zip((cell.ahead, cell.back), slowed, expected, strict=True)
        )
        return ahead, back

    def _ways(self, place: int, ahead: float, back: float, common: float | None) -> Iterator[_CellSlowdown]:
        each = self._price_of_level(1)
        mean = (ahead + back) / 2 if ahead and back else 0.0
        # Of equal ways the last one wins, so those with fewer free parameters come later.
        ways = {(ahead, back): 2, (mean, mean): 1, (ahead, 0.0): 1, (0.0, back): 1}
        if common is not None:
            there, here = common if ahead else 0.0, common if back else 0.0
            ways |= {(there, back): 1, (ahead, here): 1} | {(there, here): 0, (there, 0.0): 0, (0.0, here): 0}
        for (one, other), paid in ways.items():
            if one or other:
                chance = OWN_WAY if common is None else OTHER_WAY if paid else COMMON_WAY
                yield _CellSlowdown(one, other, self._gain(place, one, other), paid * each - math.log(chance))

    def _by_chance(self, touched: Sequence[tuple[int, Slowed]], slow: Sequence[float]) -> float:
        """The probability that as many ``touched`` cells as ``slow`` values are that slow by chance (binomial tail)."""
        own = {place for place, _ in touched}
        left_out = own.union(place for place, causes in self._suspected.items() if causes)
        others = len(self.cells) - len(left_out)
        as_slow = bisect_right(self._in_order, max(slow)) - sum(self._slowest[place] <= max(slow) for place in left_out)
        rate = (as_slow + USUALLY * AS_MANY) / (others + AS_MANY)
        tail = (
            math.comb(len(own), many) * rate**many * (1 - rate) ** (len(own) - many)
            for many in range(len(slow), len(own) + 1)
        )
        return sum(tail)

    def _level(self, touched: Iterable[tuple[int, Slowed]]) -> float | None:
        """The median of the readings that nothing explains yet, or of all readings if all are explained."""
        free: list[float] = []
        taken: list[float] = []
        for place, slowed in touched:
            cell, expected = self.cells[place], self.expected[place]
            for value, is_slowed, now in zip((cell.ahead, cell.back), slowed, expected, strict=True):
                if is_slowed and value is not None:
                    (free if now == 0.0 else taken).append(value)
        values = free or taken
        return max(median(values), SLOWEST) if values else None

    def gain(self, place: int, slowed: Slowed, level: float) -> float:
        """The gain in log density of a cell if a component as slow as ``level`` affected it too."""
        return self._gain(place, level if slowed[0] else 0.0, level if slowed[1] else 0.0)

    def _gain(self, place: int, ahead: float, back: float) -> float:
        now = self.expected[place]
        return self._log_density(place, min(now[0], ahead), min(now[1], back)) - self._density_now[place]

    def _log_density(self, place: int, ahead: float, back: float) -> float:
        cell = self.cells[place]
        return self.noise.log_density(
            None if cell.ahead is None else cell.ahead - ahead, None if cell.back is None else cell.back - back
        )

    def _price(self, touched: Sequence[tuple[int, Slowed]]) -> float:
        return self._price_of_level(sum(ahead + back for _, (ahead, back) in touched))

    def _price_of_level(self, values: int) -> float:
        """Laplace's approximation of the evidence for a number of readings, whose limit is BIC."""
        left = self.noise.sigma * math.sqrt(2 * math.pi / max(values, 1))
        return max(0.0, math.log((self.most_level - SLOWEST) / left))

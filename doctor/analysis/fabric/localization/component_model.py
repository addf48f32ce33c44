"""What each part of a network would explain of the readings, and which readings are explained so far."""

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
"""Whether a part slows the way ahead and the way back of a cell."""

BOTH: Slowed = (True, True)

LEAST_ERRATIC = 3
"""Readings that are slow, each by a factor of its own, before they can have one cause: two are chance."""

OWN_WAY = 1 / 4
"""The probability of one of the ways to be slow, for a part that is so by another factor each time: there, back, both
alike, each way by its own."""

COMMON_WAY, OTHER_WAY = 1 / 6, 1 / 12
"""The same for a part that has one factor mostly, as a link that falls to a lower rate: there, back or both by that
one; and six ways in which a direction, or both, have a factor of their own."""

FEWEST_FOR_ERRATIC = 5
"""Hosts. Of four each has a hand in half of what is slow by chance."""

BY_CHANCE, ALIKE_BY_CHANCE = 1e-4, 0.05
"""The probability, below which it is no accident that so many pairs of a host were slow; and where they were so by the
same factor, which says something by itself. On a machine where something else is busy now and then one pair in six is
slow for that reason, so it is reckoned by the pairs of the others."""

USUALLY, AS_MANY = 0.06, 5
"""The share of pairs that are slow for a moment, by a guess that counts as much as five pairs do: of a few hosts there
are not many others to tell it from."""


class Component(NamedTuple):
    """A candidate. ``members``: as of a Suspect; of a link that is slow in one direction only (``oneway``) the source
    comes first. ``turn``: of a round that was slow as a whole, which is nobody's fault."""

    kind: Blame | None
    members: tuple[int, ...] = ()
    oneway: bool = False
    turn: int = -1


class ComponentFit(NamedTuple):
    """How well a part explains: ``level``, the logarithm of its share; ``score``, the logarithm of its odds against
    nothing being there; ``cells``, those that it slowed, with the directions; ``price``, what the score had to pay;
    ``levels``: of each of ``cells``, both ways, where they differ from time to time."""

    part: Component
    level: float
    score: float
    cells: tuple[tuple[int, Slowed], ...]
    price: float
    intermittent: bool = False
    levels: tuple[tuple[float, float], ...] = ()


class _CellSlowdown(NamedTuple):
    """How a cell may be slow: the logarithms of its shares there and back, what these gain, and their price."""

    ahead: float
    back: float
    gain: float
    price: float

    @property
    def worth(self) -> float:
        """What is left of the gain."""
        return self.gain - self.price


class ComponentModel:
    """Cells, and what is expected of them by the parts that were blamed so far."""

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
        self._blamed: Counter[int] = Counter()
        self._causes: list[dict[Component, tuple[float, float]]] = [{} for _ in cells]
        self.expected: list[tuple[float, float]] = [(0.0, 0.0)] * len(cells)
        self._density_now = [self._log_density(place, 0.0, 0.0) for place in range(len(cells))]

    # -- what is blamed

    def blame(self, fit: ComponentFit) -> None:
        """Expect the part to be slow from now on."""
        for number, (place, (ahead, back)) in enumerate(fit.cells):
            alike = (fit.level if ahead else 0.0, fit.level if back else 0.0)
            self._causes[place][fit.part] = fit.levels[number] if fit.levels else alike
            self._expect(place)
        if fit.part.kind is not None:
            self._blamed.update(place for place, _ in fit.cells)

    def clear(self, fit: ComponentFit) -> None:
        """Blame it no longer."""
        for place, _ in fit.cells:
            self._causes[place].pop(fit.part, None)
            self._expect(place)
        if fit.part.kind is not None:
            self._blamed.subtract(place for place, _ in fit.cells)

    def _expect(self, place: int) -> None:
        causes = self._causes[place].values()
        ahead = min((cause[0] for cause in causes), default=0.0)
        back = min((cause[1] for cause in causes), default=0.0)
        self.expected[place] = (ahead, back)
        self._density_now[place] = self._log_density(place, ahead, back)

    # -- what is left to explain

    def is_slow(self, place: int) -> bool:
        """Whether a reading of the cell is slower than what is expected of it by more than half of what matters."""
        cell, (ahead, back) = self.cells[place], self.expected[place]
        below = self.slow_below
        return (cell.ahead is not None and cell.ahead - ahead < below) or (
            cell.back is not None and cell.back - back < below
        )

    def unexplained(self) -> list[int]:
        """Places of the cells that are slow beyond what is expected."""
        return [place for place in range(len(self.cells)) if self.is_slow(place)]

    def residuals(self) -> list[PairCell]:
        """Cells without what is expected of them. What was slower than counts is equal to that, and scatters not."""

        def left(value: float | None, expected: float) -> float | None:
            return None if value is None or value <= SLOWEST else value - expected

        pairs = zip(self.cells, self.expected, strict=True)
        return [
            cell._replace(ahead=left(cell.ahead, ahead), back=left(cell.back, back)) for cell, (ahead, back) in pairs
        ]

    def log_density(self) -> float:
        """Of all cells, with what is expected of them."""
        return sum(self._density_now)

    # -- what a part explains

    def touched(self, part: Component) -> list[tuple[int, Slowed]]:
        """The cells that a part has a hand in."""
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
        """The part slow all the time; ``None`` where its readings are usual in the middle or there are none."""
        touched = self.touched(part)
        level = self._level(touched)
        if level is None or level > self.most_level:
            return None
        gain = sum(self.gain(place, slowed, level) for place, slowed in touched)
        price = prior + self._price(touched)
        return ComponentFit(part, level, gain - price, tuple(touched), price)

    def fit_at_times(self, part: Component, prior: float) -> ComponentFit | None:
        """The part slow in some rounds, each with probability one half; ``None`` unless in two at least."""
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
        if len(own) < 2 or self._by_chance(touched, [self._slowest[place] for place, _ in own]) > ALIKE_BY_CHANCE:
            return None
        price = prior + self._price(own) + len(touched) * math.log(2)
        return ComponentFit(part, level, gain - price, tuple(own), price, True)

    def erratic_fits(self, part: Component, prior: float) -> Iterator[ComponentFit]:
        """The part slow in some cells, in one direction or both, by one factor or another, as where a card loses its
        link now and then: each factor paid for, and one that comes again and again paid for once. None unless three
        readings are slow."""
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
        """The readings of a cell that are slower than expected, of these directions; 0 for the others."""
        cell, expected = self.cells[place], self.expected[place]
        ahead, back = (
            value if may and value is not None and value - now < self.slow_below and value < self.most_level else 0.0
            for value, may, now in zip((cell.ahead, cell.back), slowed, expected, strict=True)
        )
        return ahead, back

    def _ways(self, place: int, ahead: float, back: float, common: float | None) -> Iterator[_CellSlowdown]:
        """In which a cell may be slow that has such readings."""
        each = self._price_of_level(1)
        alike = (ahead + back) / 2 if ahead and back else 0.0
        # Of equal ways the last one counts, so those of which less has to be chosen come later.
        ways = {(ahead, back): 2, (alike, alike): 1, (ahead, 0.0): 1, (0.0, back): 1}
        if common is not None:
            there, here = common if ahead else 0.0, common if back else 0.0
            ways |= {(there, back): 1, (ahead, here): 1} | {(there, here): 0, (there, 0.0): 0, (0.0, here): 0}
        for (one, other), paid in ways.items():
            if one or other:
                chance = OWN_WAY if common is None else OTHER_WAY if paid else COMMON_WAY
                yield _CellSlowdown(one, other, self._gain(place, one, other), paid * each - math.log(chance))

    def _by_chance(self, touched: Sequence[tuple[int, Slowed]], slow: Sequence[float]) -> float:
        """The probability that as many of the ``touched`` cells as there are ``slow`` values are as slow as these by
        accident, as often as cells are for which nobody is blamed (binomial tail; the posterior mean of that rate)."""
        own = {place for place, _ in touched}
        left_out = own.union(place for place, causes in self._blamed.items() if causes)
        others = len(self.cells) - len(left_out)
        alike = bisect_right(self._in_order, max(slow)) - sum(self._slowest[place] <= max(slow) for place in left_out)
        rate = (alike + USUALLY * AS_MANY) / (others + AS_MANY)
        tail = (
            math.comb(len(own), many) * rate**many * (1 - rate) ** (len(own) - many)
            for many in range(len(slow), len(own) + 1)
        )
        return sum(tail)

    def _level(self, touched: Iterable[tuple[int, Slowed]]) -> float | None:
        """The median of readings that nothing explains yet; of all where all are explained."""
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
        """How much likelier a cell is (the logarithm) if something as slow as ``level`` had a hand in it, too."""
        return self._gain(place, level if slowed[0] else 0.0, level if slowed[1] else 0.0)

    def _gain(self, place: int, ahead: float, back: float) -> float:
        """The same for a level each way; 0: that way is as it was."""
        now = self.expected[place]
        return self._log_density(place, min(now[0], ahead), min(now[1], back)) - self._density_now[place]

    def _log_density(self, place: int, ahead: float, back: float) -> float:
        cell = self.cells[place]
        return self.noise.log_density(
            None if cell.ahead is None else cell.ahead - ahead, None if cell.back is None else cell.back - back
        )

    def _price(self, touched: Sequence[tuple[int, Slowed]]) -> float:
        """What choosing one level for all of these costs."""
        return self._price_of_level(sum(ahead + back for _, (ahead, back) in touched))

    def _price_of_level(self, values: int) -> float:
        """Its prior width over the width that so many readings leave (Laplace's approximation of the evidence, of which
        BIC is the limit)."""
        left = self.noise.sigma * math.sqrt(2 * math.pi / max(values, 1))
        return max(0.0, math.log((self.most_level - SLOWEST) / left))

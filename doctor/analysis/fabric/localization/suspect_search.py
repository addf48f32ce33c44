"""The set of components that explains the readings best, and their confidence."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from doctor.analysis.fabric.localization.boundaries import boundaries, smaller_side
from doctor.analysis.fabric.localization.component_model import Component, ComponentFit, ComponentModel
from doctor.analysis.fabric.localization.suspects import Blame

RARITY = {"host": 20.0, "sending": 40.0, "receiving": 40.0, "link": 40.0, "boundary": 40.0, None: 20.0}
"""One in this number of jobs has a slow component of the kind; an estimate, of which the logarithm counts."""

AT_TIMES = math.log(4)
"""The log price of being slow in some rounds only, which is rarer than in all."""

LEAST_LOG_ODDS = -3.0
"""The log odds from which a component is a suspect to be confirmed: 5 %."""

MOST_NEIGHBORS = 32
"""The maximum number of adjacent hosts that may each be slow for a reason of its own."""

MOST_BORDERS = 8
"""The maximum number of boundaries."""

_KINDS: tuple[Blame, ...] = ("host", "sending", "receiving")

PASSES = 4
"""The maximum number of searches: a component may reveal another one."""


def explain(model: Callable[[], ComponentModel], groups: Sequence[frozenset[int]]) -> SuspectSearch:
    """The best of several searches.

    A boundary explains so many readings that it would always come first, even if two unrelated neighbors are slow. A
    link of a host that is slow at times, which is the more specific claim, is tried before the host."""
    searches = [SuspectSearch(model(), groups, MOST_BORDERS)]
    if any(fit.part.kind == "link" for fit in searches[0].found):
        searches.append(SuspectSearch(model(), groups, MOST_BORDERS, links=False))
    borders = [fit.part.members for fit in searches[0].found if fit.part.kind == "boundary"]
    if any(len(members) <= MOST_NEIGHBORS for members in borders):
        searches += [SuspectSearch(model(), groups, fewer) for fewer in range(min(len(borders), 2))]
    return max(searches, key=lambda search: search.evidence)


class SuspectSearch:
    """A greedy search; ``found``: the fits of the components, in the order in which they were found."""

    def __init__(
        self, model: ComponentModel, groups: Sequence[frozenset[int]], most_borders: int, *, links: bool = True
    ) -> None:
        self.model, self.groups, self._borders_left, self._with_links = model, groups, most_borders, links
        self._known = {smaller_side(model.count, group) for group in groups}
        self._runs = model.count * model.count / 2
        self._pairs = max(len(model.at_pair), 1)
        self.borders: list[Component] = []
        self.found: list[ComponentFit] = []
        for _ in range(PASSES):
            if not self._pass():
                break
        self._drop_redundant()

    def prior(self, part: Component) -> float:
        """The log odds that a component has to overcome."""
        rarity = math.log(RARITY[part.kind])
        if part.kind == "link":
            return rarity + math.log(self._pairs * (2 if part.oneway else 1))
        if part.kind == "boundary":
            return rarity + math.log(len(self._known) if part.members in self._known else self._runs)
        return rarity + math.log(len(self.model.in_round) if part.kind is None else self.model.count)

    def fits(self, part: Component) -> Iterator[ComponentFit]:
        """The fits of a component that is always slow, slow at times, and slow at times by varying factors."""
        prior = self.prior(part)
        if (always := self.model.fit(part, prior)) is not None:
            yield always
        if part.kind in _KINDS:
            if (at_times := self.model.fit_at_times(part, prior + AT_TIMES)) is not None:
                yield at_times
            yield from self.model.erratic_fits(part, prior + AT_TIMES)

    def best(self, part: Component) -> ComponentFit | None:
        """The best of these fits."""
        return max(self.fits(part), key=lambda fit: fit.score, default=None)

    def _pass(self) -> bool:
        """Add components until none is likely enough.

        Scores only decrease as others are added, so old scores serve as bounds (lazy greedy, Minoux 1978)."""
        slow = self.model.unexplained()
        if self._borders_left:
            self.borders += boundaries(self.model, self.groups)
        known = {fit.part for fit in self.found}
        parts = [part for part in (*self.borders, *self._parts(slow)) if part not in known]
        queue = [(-fit.score, place, 0, fit) for place, part in enumerate(parts) if (fit := self.best(part))]
        heapq.heapify(queue)
        before = len(self.found)
        while queue and -queue[0][0] > LEAST_LOG_ODDS:
            _, place, age, fit = heapq.heappop(queue)
            if fit.part.kind == "boundary" and not self._borders_left:
                continue
            if age == len(self.found) - before:
                self.model.add(fit)
                self.found.append(fit)
                self._borders_left -= fit.part.kind == "boundary"
            elif (again := self.best(fit.part)) is not None:
                heapq.heappush(queue, (-again.score, place, len(self.found) - before, again))
        return len(self.found) > before

    def _parts(self, slow: Sequence[int]) -> list[Component]:
        """The components that may explain these cells: hosts in two of them, pairs measured in two rounds, and rounds.

        A single slow reading can't be distinguished from other load."""
        cells, at_pair = self.model.cells, self.model.at_pair
        hits = Counter(host for place in slow for host in (cells[place].first, cells[place].second))
        hosts = sorted(host for host, times in hits.items() if times > 1)
        links = sorted({(cells[place].first, cells[place].second) for place in slow})
        return [
            *(Component(None, turn=turn) for turn in sorted({cells[place].round for place in slow})),
            *(Component(kind, (host,)) for host in hosts for kind in _KINDS),
            *(link for pair in links if self._with_links and len(at_pair[pair]) > 1 for link in _links(*pair)),
        ]

    def _drop_redundant(self) -> None:
        for fit in sorted(self.found, key=lambda fit: fit.score):
            self.model.remove(fit)
            again = self.best(fit.part)
            self.found.remove(fit)
            if again is not None and again.score > LEAST_LOG_ODDS:
                self.model.add(again)
                self.found.append(again)

    @property
    def evidence(self) -> float:
        """The log probability of all readings given the components, up to a constant."""
        return self.model.log_density() - sum(fit.price for fit in self.found)

    def confidence(self, fit: ComponentFit) -> float:
        """The probability of a component against all alternatives and against no fault."""
        self.model.remove(fit)
        others = [0.0, *(other.score for part in self._alternatives(fit) for other in self.fits(part))]
        same = [other.score for part in _same_fault(fit) for other in self.fits(part)]
        self.model.add(fit)
        most = max(*others, *same)
        odds = sum(math.exp(score - most) for score in same)
        return odds / (odds + sum(math.exp(score - most) for score in others))

    def _alternatives(self, fit: ComponentFit) -> Iterable[Component]:
        others = {Component("boundary", part.members) for part in self.borders}
        cells = self.model.cells
        hosts = {host for place, _ in fit.cells for host in (cells[place].first, cells[place].second)}
        pairs = {(cells[place].first, cells[place].second) for place, _ in fit.cells}
        others |= {Component(None, turn=cells[place].round) for place, _ in fit.cells}
        if fit.part.kind == "boundary":
            others |= set(self._shifted(fit.part.members))
        else:
            others |= {Component(kind, (host,)) for host in hosts for kind in _KINDS}
            others |= {link for pair in pairs for link in _links(*pair)}
        return sorted(others.difference(_same_fault(fit)), key=repr)

    def _shifted(self, members: tuple[int, ...]) -> Iterator[Component]:
        first, last = members[0], members[-1] + 1
        if last - first != len(members):
            return
        for start, end in ((first - 1, last), (first + 1, last), (first, last - 1), (first, last + 1)):
            if start >= 0 and end <= self.model.count and end - start >= 2:
                yield Component("boundary", tuple(range(start, end)))


def _same_fault(fit: ComponentFit) -> list[Component]:
    """The components that are the same fault: a link in any direction, an intermittent host in any direction."""
    part = fit.part
    if part.kind == "link":
        return _links(*sorted(part.members))
    return [Component(kind, part.members) for kind in _KINDS] if fit.intermittent else [part]


def _links(low: int, high: int) -> list[Component]:
    return [
        Component("link", (low, high)),
        Component("link", (low, high), oneway=True),
        Component("link", (high, low), oneway=True),
    ]

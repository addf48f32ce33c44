"""The set of parts that explains the readings best, and how sure each of them is."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from doctor.analysis.fabric.localization.boundaries import boundaries, is_run, smaller_side
from doctor.analysis.fabric.localization.component_model import Component, ComponentFit, ComponentModel
from doctor.analysis.fabric.localization.suspects import Blame

RARITY = {"host": 20.0, "sending": 40.0, "receiving": 40.0, "link": 40.0, "boundary": 40.0, None: 20.0}
"""In one of so many jobs there is one such part that is slow; a guess, of which the logarithm counts."""

AT_TIMES = math.log(4)
"""Slow in some rounds is rarer than slow in all of them."""

WORTH_A_LOOK = -3.0
"""Log odds from which a part is a suspect, to be confirmed: five in a hundred."""

MOST_NEIGHBOURS = 32
"""Hosts in a row that may each be slow for a reason of its own."""

MOST_BORDERS = 8
"""Boundaries at once, at most."""

_KINDS: tuple[Blame, ...] = ("host", "sending", "receiving")

PASSES = 4
"""A part that is found can uncover another one; searches in all."""


def explain(model: Callable[[], ComponentModel], groups: Sequence[frozenset[int]]) -> SuspectSearch:
    """The better one of several searches: a boundary explains so much at once that it would always come first, even
    where two neighbours are slow that have nothing to do with one another; and a link of a host that is slow at times,
    which is a sharper claim, before the host."""
    searches = [_searched(model(), groups, MOST_BORDERS)]
    if any(fit.part.kind == "link" for fit in searches[0].found):
        searches.append(_searched(model(), groups, MOST_BORDERS, links=False))
    borders = [fit.part.members for fit in searches[0].found if fit.part.kind == "boundary"]
    if any(len(members) <= MOST_NEIGHBOURS for members in borders):
        searches += [_searched(model(), groups, fewer) for fewer in range(min(len(borders), 2))]
    return max(searches, key=lambda search: search.evidence)


def _searched(
    model: ComponentModel, groups: Sequence[frozenset[int]], most_borders: int, *, links: bool = True
) -> SuspectSearch:
    search = SuspectSearch(model, groups, most_borders, links=links)
    search.run()
    return search


class SuspectSearch:
    """Blames parts, the best first, until nothing is worth a look."""

    def __init__(
        self, model: ComponentModel, groups: Sequence[frozenset[int]], most_borders: int, *, links: bool = True
    ) -> None:
        self.model, self.groups, self._borders_left, self._with_links = model, groups, most_borders, links
        self._known = {smaller_side(model.count, group) for group in groups}
        self._runs = model.count * model.count / 2
        self._pairs = max(len(model.at_pair), 1)
        self.borders: list[Component] = []
        self.found: list[ComponentFit] = []

    def run(self) -> list[ComponentFit]:
        """The parts to blame, in the order in which they were found."""
        for _ in range(PASSES):
            if not self._pass():
                break
        self._drop_the_needless()
        return self.found

    def prior(self, part: Component) -> float:
        """What a part has to explain before it is believed in, in logarithms of odds."""
        rarity = math.log(RARITY[part.kind])
        if part.kind == "link":
            return rarity + math.log(self._pairs * (2 if part.oneway else 1))
        if part.kind == "boundary":
            return rarity + math.log(len(self._known) if part.members in self._known else self._runs)
        return rarity + math.log(len(self.model.in_round) if part.kind is None else self.model.count)

    def fits(self, part: Component) -> Iterator[ComponentFit]:
        """The part slow always, at times, and at times by another factor each time or mostly by one."""
        prior = self.prior(part)
        if (always := self.model.fit(part, prior)) is not None:
            yield always
        if part.kind in ("host", "sending", "receiving"):
            if (at_times := self.model.fit_at_times(part, prior + AT_TIMES)) is not None:
                yield at_times
            yield from self.model.erratic_fits(part, prior + AT_TIMES)

    def best(self, part: Component) -> ComponentFit | None:
        """The better one of these."""
        return max(self.fits(part), key=lambda fit: fit.score, default=None)

    def _pass(self) -> bool:
        """Blame what is worth a look, until nothing is left; scores only fall as others are blamed, so that the old
        ones serve as bounds (lazy greedy, Minoux 1978)."""
        slow = self.model.unexplained()
        if self._borders_left:
            self.borders += boundaries(self.model, self.groups)
        blamed = {fit.part for fit in self.found}
        parts = [part for part in (*self.borders, *self._parts(slow)) if part not in blamed]
        queue = [(-fit.score, place, 0, fit) for place, part in enumerate(parts) if (fit := self.best(part))]
        heapq.heapify(queue)
        before = len(self.found)
        while queue and -queue[0][0] > WORTH_A_LOOK:
            _, place, age, fit = heapq.heappop(queue)
            if fit.part.kind == "boundary" and not self._borders_left:
                continue
            if age == len(self.found) - before:
                self.model.blame(fit)
                self.found.append(fit)
                self._borders_left -= fit.part.kind == "boundary"
            elif (again := self.best(fit.part)) is not None:
                heapq.heappush(queue, (-again.score, place, len(self.found) - before, again))
        return len(self.found) > before

    def _parts(self, slow: Sequence[int]) -> list[Component]:
        """Whatever may explain these cells: a host, or a direction of it, that has a hand in two of them, a pair that
        was measured in two rounds, and the rounds themselves. What was slow once is not to be told from a busy moment.
        """
        cells, at_pair = self.model.cells, self.model.at_pair
        hits = Counter(host for place in slow for host in (cells[place].first, cells[place].second))
        hosts = sorted(host for host, times in hits.items() if times > 1)
        links = sorted({(cells[place].first, cells[place].second) for place in slow})
        return [
            *(Component(None, turn=turn) for turn in sorted({cells[place].round for place in slow})),
            *(Component(kind, (host,)) for host in hosts for kind in _KINDS),
            *(link for pair in links if self._with_links and len(at_pair[pair]) > 1 for link in _links(*pair)),
        ]

    def _drop_the_needless(self) -> None:
        """What another part, blamed later, explains as well."""
        for fit in sorted(self.found, key=lambda fit: fit.score):
            self.model.clear(fit)
            again = self.best(fit.part)
            self.found.remove(fit)
            if again is not None and again.score > WORTH_A_LOOK:
                self.model.blame(again)
                self.found.append(again)

    @property
    def evidence(self) -> float:
        """The logarithm of the probability of all readings under what is blamed, up to what is the same for all."""
        return self.model.log_density() - sum(fit.price for fit in self.found)

    # -- how sure

    def confidence(self, fit: ComponentFit) -> float:
        """The probability of a blamed part against all that could stand in its place, and against nothing."""
        self.model.clear(fit)
        rivals = [0.0, *(rival.score for part in self._rivals(fit) for rival in self.fits(part))]
        own = [alike.score for part in _alike(fit) for alike in self.fits(part)]
        self.model.blame(fit)
        most = max(*rivals, *own)
        mine = sum(math.exp(score - most) for score in own)
        return mine / (mine + sum(math.exp(score - most) for score in rivals))

    def _rivals(self, fit: ComponentFit) -> Iterable[Component]:
        """Other parts that touch what this one slowed."""
        alike = {*_alike(fit)}
        others = {Component("boundary", part.members) for part in self.borders}
        cells = self.model.cells
        hosts = {host for place, _ in fit.cells for host in (cells[place].first, cells[place].second)}
        pairs = {(cells[place].first, cells[place].second) for place, _ in fit.cells}
        turns = {cells[place].round for place, _ in fit.cells}
        others |= {Component(None, turn=turn) for turn in turns}
        if fit.part.kind == "boundary":
            others |= set(self._shifted(fit.part.members))
        else:
            others |= {Component(kind, (host,)) for host in hosts for kind in _KINDS}
            others |= {link for pair in pairs for link in _links(*pair)}
        return sorted(others - alike, key=repr)

    def _shifted(self, members: tuple[int, ...]) -> Iterator[Component]:
        """The same run with one end a host further out or in."""
        first, last = members[0], members[-1] + 1
        if not is_run(members):
            return
        for start, end in ((first - 1, last), (first + 1, last), (first, last - 1), (first, last + 1)):
            if start >= 0 and end <= self.model.count and end - start >= 2:
                yield Component("boundary", tuple(range(start, end)))


def _alike(fit: ComponentFit) -> list[Component]:
    """The same blame: a link, whichever of its directions is slow; a host that is slow at times, whichever of its
    directions were slow in these rounds."""
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

"""Candidate boundaries: contiguous ranges of hosts in the order of the job whose pairs with other hosts are slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import quantiles

from doctor.analysis.fabric.localization.component_model import BOTH, Component, ComponentModel

STARTS = 4
"""Start positions of the search for a range, in addition to the same number of ranges of hosts that look slow."""

FEWEST_HITS = 1 / 64
"""The fraction of pairs that must be slow before ranges are searched from positions where no host looks slow. A smaller
range has few pairs inside, so each of its hosts looks slow."""

FEWEST_SLOW = 3
"""The minimum number of slow pairs for a boundary search."""

Block = tuple[int, int]
"""A range of hosts: the first number, and the number after the last one."""


def boundaries(model: ComponentModel, groups: Sequence[frozenset[int]]) -> list[Component]:
    """The boundaries of ``groups`` and of host ranges that explain most; each side has at least two hosts."""
    slow = model.unexplained()
    if len(slow) < FEWEST_SLOW:
        return []
    known = {smaller_side(model.count, group) for group in groups}
    few = FEWEST_HITS * len(model.cells)
    for level in _levels(model, slow):
        border = _BoundaryFit(model, level)
        step = max(1, model.count // STARTS)
        spread = ((start, min(start + step, model.count)) for start in range(0, model.count, step))
        starts = {*_slow_ranges(model, slow), *(spread if len(slow) > few else ())}
        known.update(smaller_side(model.count, range(*border.climb(start))) for start in sorted(starts))
    return [Component("boundary", members) for members in sorted(known) if len(members) >= 2]


def smaller_side(count: int, side: Iterable[int]) -> tuple[int, ...]:
    """The side of a boundary with fewer hosts; of equal sides the one with host 0."""
    members = sorted(side)
    if len(members) * 2 > count or (len(members) * 2 == count and members[0] != 0):
        inside = frozenset(members)
        members = [host for host in range(count) if host not in inside]
    return tuple(members)


def _levels(model: ComponentModel, slow: Iterable[int]) -> list[float]:
    """Candidate levels of a boundary: the distinct quartiles of the slow readings."""
    values = [value for place in slow for value in model.cells[place][3:] if value is not None]
    values = [value for value in values if value <= model.most_level]
    found: list[float] = []
    for level in quantiles(values, n=4) if len(values) > 1 else values:
        if all(abs(level - other) > model.noise.sigma for other in found):
            found.append(level)
    return found


def _slow_ranges(model: ComponentModel, slow: Sequence[int]) -> list[Block]:
    hits = [0] * model.count
    for place in slow:
        hits[model.cells[place].first] += 1
        hits[model.cells[place].second] += 1
    found: list[Block] = []
    for host in range(model.count):
        if hits[host] and 2 * hits[host] >= len(model.at_host[host]):
            extends = bool(found) and found[-1][1] == host
            found[-1:] = [(found[-1][0], host + 1)] if extends else [*found[-1:], (host, host + 1)]
    return sorted(found, key=lambda block: block[0] - block[1])[:STARTS]


class _BoundaryFit:
    """The gain of a boundary around a range of hosts if the pairs across it were as slow as ``level``."""

    def __init__(self, model: ComponentModel, level: float) -> None:
        self._count = model.count
        self._peers: list[list[tuple[int, float]]] = [[] for _ in range(model.count)]
        for place, cell in enumerate(model.cells):
            gain = model.gain(place, BOTH, level)
            self._peers[cell.first].append((cell.second, gain))
            self._peers[cell.second].append((cell.first, gain))

    def climb(self, block: Block) -> Block:
        """The range after moving each end in turn to the best position, until neither moves."""
        for _ in range(4):
            before = block
            block = (block[0], self._best_end(block[0], range(block[0], self._count), 1))
            block = (self._best_end(block[1] - 1, range(block[1] - 1, -1, -1), -1), block[1])
            if block == before:
                break
        return block

    def _best_end(self, fixed: int, hosts: Iterable[int], step: int) -> int:
        """The border after the best of ``hosts``, which are added one by one from ``fixed``."""
        inside = [False] * self._count
        total, best, end = 0.0, float("-inf"), fixed
        for host in hosts:
            for peer, gain in self._peers[host]:
                total += -gain if inside[peer] else gain
            inside[host] = True
            if total > best:
                best, end = total, host
        return end + 1 if step > 0 else end

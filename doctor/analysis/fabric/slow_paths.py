"""Outliers among measured paths, and their cause: a host, a boundary between hosts or one link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from doctor.analysis.stats.outliers import MAD_TO_SIGMA


class MeasuredPath(NamedTuple):
    """A measured value of the path from host ``first`` to host ``second``."""

    first: str
    second: str
    value: float

    @property
    def pair(self) -> tuple[str, str]:
        """Both hosts, in sorted order."""
        return (self.first, self.second) if self.first <= self.second else (self.second, self.first)


class SlowPaths(NamedTuple):
    """Outliers by cause; every path has one cause.

    ``hosts``: name and slow paths; ``boundaries``: two groups of hosts between which every path is slow; ``links``:
    single paths."""

    typical: float
    hosts: tuple[tuple[str, tuple[MeasuredPath, ...]], ...]
    boundaries: tuple[tuple[Hashable, Hashable, tuple[MeasuredPath, ...]], ...]
    links: tuple[MeasuredPath, ...]


def slow_paths(
    paths: Sequence[MeasuredPath],
    *,
    lower_is_worse: bool,
    factor: float,
    sigmas: float,
    groups: Mapping[str, Hashable] | None = None,
    share: float = 0.6,
    least: float = 0.0,
) -> SlowPaths:
    """Find the outliers of ``paths`` and their causes.

    ``typical`` is the median of the better half: one slow host of three or four is in half of all paths or more, so the
    plain median may be a slow value. A path is slow if it is worse than that by ``factor``, by ``sigmas`` robust
    standard deviations of the better half, and by ``least``, all three.

    A host is the cause if at least ``share`` of its paths (and two or more) are slow. Among the rest, a boundary is the
    cause if ``share`` of the paths between two ``groups`` (such as a host's subnet) are slow and those within are not;
    the others are links. Linear in the number of paths."""
    if len(paths) < 3:
        return SlowPaths(median([path.value for path in paths]) if paths else 0.0, (), (), ())
    better = sorted((path.value for path in paths), reverse=lower_is_worse)[: (len(paths) + 1) // 2]
    typical = median(better)
    spread = max(sigmas * MAD_TO_SIGMA * median(abs(value - typical) for value in better), least)
    limit = min(typical * factor, typical - spread) if lower_is_worse else max(typical / factor, typical + spread)
    slow = [path for path in paths if (path.value < limit if lower_is_worse else path.value > limit)]
    boundaries, rest = _take_boundaries(paths, slow, groups or {}, share)
    hosts, rest = take_hosts(paths, rest, share)
    return SlowPaths(typical, hosts, boundaries, tuple(rest))


def take_hosts(
    paths: Iterable[MeasuredPath], slow: list[MeasuredPath], share: float
) -> tuple[tuple[tuple[str, tuple[MeasuredPath, ...]], ...], list[MeasuredPath]]:
    """The hosts with at least ``share`` of their paths, to two peers or more, among ``slow``, worst first, with these
    paths; and the remaining paths.

    A path counts only for the worse of its two hosts."""
    total = Counter(host for path in paths for host in path.pair)
    touching: dict[str, list[MeasuredPath]] = {}
    for path in slow:
        for host in path.pair:
            touching.setdefault(host, []).append(path)
    found: list[tuple[str, tuple[MeasuredPath, ...]]] = []
    taken: set[MeasuredPath] = set()
    for host in sorted(touching, key=lambda host: -len(touching[host]) / total[host]):
        own = tuple(path for path in touching[host] if path not in taken)
        if len({path.pair for path in own}) >= 2 and len(own) >= share * total[host]:
            found.append((host, own))
            taken.update(own)
    return tuple(found), [path for path in slow if path not in taken]


def _take_boundaries(
    paths: Iterable[MeasuredPath], slow: list[MeasuredPath], groups: Mapping[str, Hashable], share: float
) -> tuple[tuple[tuple[Hashable, Hashable, tuple[MeasuredPath, ...]], ...], list[MeasuredPath]]:
    """Pairs of groups, each of two or more measured hosts, whose paths to one another are mostly slow."""
    sizes = Counter(groups.get(host) for host in {host for path in paths for host in path.pair})
    total: Counter[tuple[Hashable, Hashable]] = Counter(_crossing(path, groups) for path in paths)
    between: dict[tuple[Hashable, Hashable], list[MeasuredPath]] = {}
    for path in slow:
        between.setdefault(_crossing(path, groups), []).append(path)
    found = {
        crossing: own
        for crossing, own in between.items()
        if crossing[0] != crossing[1]
        and min(sizes[crossing[0]], sizes[crossing[1]]) >= 2
        and len(own) >= max(2, share * total[crossing])
    }
    taken = {path for own in found.values() for path in own}
    return tuple((*crossing, tuple(own)) for crossing, own in found.items()), [one for one in slow if one not in taken]


def _crossing(path: MeasuredPath, groups: Mapping[str, Hashable]) -> tuple[Hashable, Hashable]:
    first, second = groups.get(path.first), groups.get(path.second)
    return (first, second) if repr(first) <= repr(second) else (second, first)

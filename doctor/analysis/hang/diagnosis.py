"""What is wrong with a run that stands still or ended: the one result of all reasoning about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from doctor.analysis.call_sites import CallSite, LocalWork
from doctor.analysis.hang.collective_mismatch import Divergence
from doctor.analysis.hang.exits import RunEnd, nature_of
from doctor.analysis.hang.one_sided_calls import OneSidedCall
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.hang.uneven_loaders import UnevenLoaders

Kind = Literal[
    "died",
    "unresponsive",
    "loader-ended",
    "differ",
    "one-sided",
    "behind",
    "missing",
    "deadlock",
    "busy",
    "elsewhere",
    "together",
    "untold",
]
"""``behind``: a device does not finish what those of others did. ``missing``: a rank has not come to where the others
wait, and nothing tells what it does instead. ``elsewhere``: a rank is not where the others wait.
``together``: all are in the same call. ``untold``: somebody waits, and for whom can't be seen."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, and with which ``ranks``. ``within_limit``: those that the others wait for are no longer about it
    than their own pace allows. The parts that a kind has: ``ending`` (died), ``uneven`` (loader-ended), ``parting``
    (differ, one-sided), ``side`` (one-sided), ``business`` (busy), ``behind`` (missing: those of the ranks that came,
    and whose device does not finish). ``confidence`` from 0 to 1."""

    scene: JobState
    kind: Kind
    ranks: tuple[int, ...]
    confidence: float
    within_limit: bool = False
    ending: RunEnd | None = None
    uneven: UnevenLoaders | None = None
    parting: Divergence | None = None
    side: OneSidedCall | None = None
    business: LocalWork | None = None
    behind: tuple[int, ...] = ()

    @property
    def first(self) -> RankState | None:
        """The first of the ranks to blame, where anything is known of it."""
        return next((self.scene.ranks[rank] for rank in self.ranks if rank in self.scene.ranks), None)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the ranks to blame, as far as they are known: what stands where nothing is, is no host name."""
        names = (self.scene.hosts.get(rank, "") for rank in self.ranks)
        return tuple(dict.fromkeys(name for name in names if name and " " not in name))

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait and are not to blame."""
        return tuple(rank for rank in self.scene.waiting if rank not in self.ranks)

    @property
    def waiting_at(self) -> CallSite | None:
        """Where most of these wait."""
        sites: dict[object, list[CallSite]] = {}
        for rank in self.waiting or self.scene.waiting:
            if (site := self.scene.ranks[rank].site) is not None:
                sites.setdefault((site.operation, site.place, site.words), []).append(site)
        return max(sites.values(), key=len)[0] if sites else None

    @property
    def seconds(self) -> float | None:
        """How long the first of the ranks to blame has made no progress."""
        return _longest([self.first] if self.first else [])

    @property
    def seconds_waited(self) -> float | None:
        """How long the others have made none."""
        return _longest([self.scene.ranks[rank] for rank in self.waiting])


def _longest(ranks: Iterable[RankState]) -> float | None:
    times = (_without_progress(one) for one in ranks)
    return max((time for time in times if time is not None), default=None)


def _without_progress(one: RankState) -> float | None:
    """Seconds without progress; of a rank that waited until its time was up, those until then."""
    failure = one.progress.failure if one.progress else None
    calls = one.recorder.collectives if one.recorder else ()
    if failure and failure.at is not None and nature_of(failure) == "timeout" and calls and calls[-1].at is not None:
        return round(max(0.0, failure.at - calls[-1].at), 3)
    return one.progress.idle if one.progress else None

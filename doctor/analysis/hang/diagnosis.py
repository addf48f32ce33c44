"""The diagnosis of a run that hangs or failed: the result of all rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from doctor.analysis.call_sites import CallSite, LocalWork
from doctor.analysis.hang.collective_mismatch import Divergence
from doctor.analysis.hang.exits import RunEnd, nature_of
from doctor.analysis.hang.left_loops import RanksThatLeft
from doctor.analysis.hang.one_sided_calls import OneSidedCall
from doctor.analysis.hang.rank_state import JobState, RankState
from doctor.analysis.hang.uneven_loaders import UnevenLoaders

Kind = Literal[
    "died",
    "unresponsive",
    "loader-ended",
    "left",
    "differ",
    "one-sided",
    "behind",
    "missing",
    "deadlock",
    "busy",
    "elsewhere",
    "together",
    "undetermined",
]
"""``left``: ranks left the training loop before their loader ended. ``behind``: a device has not finished a call that
the others completed. ``missing``: a rank did not reach the call that the others wait in, and what it does is unknown.
``elsewhere``: a rank is not where the others wait. ``together``: all ranks are in the same call. ``undetermined``:
ranks wait, but the missing peer could not be determined."""


class Diagnosis(msgspec.Struct, frozen=True):
    """What is wrong, and with which ``ranks``; ``confidence`` is from 0 to 1.

    ``within_limit``: the ranks that the others wait for have not exceeded their own limit. Some kinds have details:
    ``ending`` (died; left, if others lost a connection by it), ``uneven`` (loader-ended), ``left`` (left),
    ``divergence`` (differ, one-sided), ``one_sided`` (one-sided), ``work`` (busy), ``behind`` (missing: those of
    ``ranks`` that reached the call, which their device does not finish), ``awaited_by`` (deadlock: ranks in a send or
    receive for which one of ``ranks`` has no counterpart)."""

    states: JobState
    kind: Kind
    ranks: tuple[int, ...]
    confidence: float
    within_limit: bool = False
    ending: RunEnd | None = None
    uneven: UnevenLoaders | None = None
    left: RanksThatLeft | None = None
    divergence: Divergence | None = None
    one_sided: OneSidedCall | None = None
    work: LocalWork | None = None
    behind: tuple[int, ...] = ()
    awaited_by: tuple[int, ...] = ()

    @property
    def known(self) -> tuple[RankState, ...]:
        """The known states of the faulty ranks."""
        return tuple(self.states.ranks[rank] for rank in self.ranks if rank in self.states.ranks)

    @property
    def first(self) -> RankState | None:
        """The first of the known states of the faulty ranks."""
        return next(iter(self.known), None)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The known hosts of the faulty ranks; placeholders for unknown hosts contain a space."""
        names = (self.states.hosts.get(rank, "") for rank in self.ranks)
        return tuple(dict.fromkeys(name for name in names if name and " " not in name))

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait and are not faulty."""
        return tuple(rank for rank in self.states.waiting if rank not in self.ranks)

    @property
    def waiting_sites(self) -> tuple[tuple[tuple[int, ...], CallSite], ...]:
        """Where the ranks wait that are not faulty: call sites with their ranks, those of most ranks first."""
        sites: dict[str, tuple[list[int], CallSite]] = {}
        for rank in self.waiting:
            if (site := self.states.ranks[rank].site) is not None:
                sites.setdefault(site.text, ([], site))[0].append(rank)
        found = sorted(sites.values(), key=lambda item: (-len(item[0]), item[0]))
        return tuple((tuple(ranks), site) for ranks, site in found)

    @property
    def waiting_at(self) -> CallSite | None:
        """Where most of these wait: the call site of most of them."""
        sites: dict[object, list[CallSite]] = {}
        for rank in self.waiting or self.states.waiting:
            if (site := self.states.ranks[rank].site) is not None:
                sites.setdefault((site.operation, site.place, site.words), []).append(site)
        return max(sites.values(), key=len)[0] if sites else None

    @property
    def holds_lock(self) -> bool:
        """Whether native code of the faulty ranks holds the interpreter's lock, as their stacks show."""
        first = self.first
        if self.kind != "unresponsive" or first is None or first.state != "silent" or not first.stack:
            return False
        return first.is_sampled

    @property
    def driver(self) -> str:
        """The function of a GPU driver that the first faulty rank is blocked in, as the kernel shows; else empty."""
        first = self.first
        if self.kind not in ("elsewhere", "busy") or first is None or first.progress is None:
            return ""
        return first.progress.driver

    @property
    def data_ended(self) -> bool:
        """Whether stacks show that the data of some ranks ended while others still train."""
        return self.uneven is not None and self.uneven.by_data

    @property
    def places_apart(self) -> str:
        """``rank 2 waits in barrier at train.py:48 (train); rank 0 waits in …``: one rank on each side of a loop."""
        if self.uneven is None:
            return ""
        firsts = (self.states.ranks[ranks[0]] for ranks in (self.uneven.ended, self.uneven.continuing))
        return "; ".join(f"rank {one.rank} waits in {one.site.text}" for one in firsts if one.site is not None)

    @property
    def seconds(self) -> float | None:
        """Seconds that the first faulty rank has made no progress."""
        return _longest([self.first] if self.first else [])

    @property
    def seconds_waited(self) -> float | None:
        """Seconds that the others have made no progress."""
        return _longest([self.states.ranks[rank] for rank in self.waiting])


def _longest(ranks: Iterable[RankState]) -> float | None:
    """The longest time without progress in seconds; for a rank whose collective timed out, until that timeout."""
    times = []
    for one in ranks:
        failure, begun = one.failure, one.collectives[-1].at if one.collectives else None
        if failure and failure.at is not None and nature_of(failure) == "timeout" and begun is not None:
            times.append(round(max(0.0, failure.at - begun), 3))
        elif one.progress and one.progress.idle is not None:
            times.append(one.progress.idle)
    return max(times, default=None)

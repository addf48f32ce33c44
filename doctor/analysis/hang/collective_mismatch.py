"""The first collective of a group in which its ranks made different calls.

The backend matches collectives of a group by sequence number. Different calls with the same number cause an error or a
hang or, if the sizes fit, are matched silently, as are all later ones. So the collectives are compared backwards from
the one that the ranks wait in, to the oldest one that still differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Literal

import msgspec

from doctor.analysis.call_sites import CallSite, SiteKey, site_key, site_of
from doctor.analysis.hang.rank_state import WITH_ALL, JobState
from doctor.core.facts import Collective

GAP = 4
"""Consecutive collectives that may be equal within a shifted sequence: neighbors called from one line."""
LOOK_BACK = 64
"""Sequence numbers before the newest one that are compared; recorders keep call sites for about as many."""

Aspect = Literal["operation", "size", "type", "shape", "site", "root", "members"]

_ANY_SIZE = frozenset(
    {
        "all_to_all",
        "alltoall",
        "all_to_all_single",
        "alltoall_base",
        "gather",
        "scatter",
        "barrier",
        "coalesced",
    }
)
"""Operations whose sizes may differ between ranks, or are recorded for some ranks only."""
_SAME_ON_ALL = frozenset({"all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"})
"""Operations in which all ranks pass the same number of elements of the same type."""
OF_GLOO = _SAME_ON_ALL | {"all_gather"}
"""The same over Gloo, which gathers into one buffer (``gloo/allgather.cc``)."""


class MismatchGroup(msgspec.Struct, frozen=True):
    """Ranks that made the same call at a divergence."""

    ranks: tuple[int, ...]
    entry: Collective
    site: CallSite
    key: SiteKey
    is_usual: bool
    """Other ranks made this call, or these ranks made it more than once."""


class Divergence(msgspec.Struct, frozen=True):
    """Ranks of a process ``group`` made different calls with number ``sequence``: ``variants``, largest first.

    ``aspect``: the most important difference. ``usual_next``: the call that usually follows their last common call, if
    the history shows it.
    """

    group: str
    sequence: int
    aspect: Aspect
    variants: tuple[MismatchGroup, ...]
    usual_next: SiteKey | None = None

    @property
    def is_even(self) -> bool:
        """Whether the two largest variants have the same number of ranks, and neither names rank 0 as the root.

        Most programs collect and send on rank 0, which has the place of the majority then."""
        return self.is_tie and not (self.aspect == "root" and self.variants[0].entry.root == 0)

    @property
    def is_tie(self) -> bool:
        """Whether the two largest variants have the same number of ranks."""
        return len(self.variants[0].ranks) == len(self.variants[1].ranks)

    @property
    def odd(self) -> tuple[MismatchGroup, ...]:
        """All variants but the largest; all of them if none is the largest."""
        return self.variants if self.is_even else self.variants[1:]

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """The ranks of the odd variants."""
        return tuple(sorted(rank for one in self.odd for rank in one.ranks))


def largest_first(variants: Iterable[MismatchGroup]) -> tuple[MismatchGroup, ...]:
    """Variants by decreasing number of ranks."""
    return tuple(sorted(variants, key=lambda variant: (-len(variant.ranks), variant.ranks[0])))


class _SequenceRow(msgspec.Struct, frozen=True):
    sequence: int
    entries: Mapping[int, Collective]


class _CallSiteHistory:
    def __init__(self, rows: Mapping[int, Mapping[int, Collective]]) -> None:
        self.keys = {
            (sequence, rank): site_key(entry) for sequence, entries in rows.items() for rank, entry in entries.items()
        }
        self.counts: dict[SiteKey, Counter[int]] = {}
        for (_, rank), key in self.keys.items():
            self.counts.setdefault(key, Counter())[rank] += 1

    def is_role(self, key: SiteKey, ranks: Iterable[int]) -> bool:
        """Whether only these ranks call from there, and regularly: a branch for their role in a collective."""
        counts = self.counts[key]
        own = set(ranks)
        return counts.keys() <= own and all(counts[rank] > 1 for rank in own)

    def is_usual(self, key: SiteKey, ranks: Iterable[int]) -> bool:
        """Whether other ranks made this call too, or these ranks made it more than once."""
        counts = self.counts[key]
        own = set(ranks)
        return bool(counts.keys() - own) or any(counts[rank] > 1 for rank in own)


def divergences(states: JobState) -> Iterator[Divergence]:
    """The divergence of every group with waiting ranks; the group with most ranks first."""
    groups = {group for one in states.ranks.values() for group in one.pending}
    for group in sorted(groups, key=lambda name: (-len(states.members.get(name, ())), name)):
        rows = _rows(states, group)
        history = _CallSiteHistory(rows)
        origin, aspect = _origin(_shared(rows), history)
        if origin is not None:
            following = _usual_next(history, origin.sequence, rows.get(origin.sequence - 1, {}))
            yield Divergence(group, origin.sequence, aspect, _variants(origin, history), following)


def mismatches(states: JobState, operations: frozenset[str] = _SAME_ON_ALL) -> Iterator[Divergence]:
    """The newest call of each group in which ranks passed different sizes or types, whether or not it failed.

    Backends match such calls if the bytes fit, and some even if they do not."""
    for group in sorted(states.calls):
        for row in _shared(states.calls[group]):
            aspect = _mismatch(row, operations)
            if aspect is not None:
                variants = _variants(row, _CallSiteHistory(states.calls[group]), by_line=False)
                yield Divergence(group, row.sequence, aspect, variants)
                break


def reshaped(states: JobState) -> Iterator[Divergence]:
    """The newest call of each group with different shapes of the same number of elements, which backends accept."""
    for group in sorted(states.calls):
        for row in _shared(states.calls[group]):
            shapes: dict[object, list[int]] = {}
            for rank, entry in row.entries.items():
                if entry.operation in _SAME_ON_ALL:
                    shapes.setdefault(entry.input_sizes, []).append(rank)
            if len(shapes) > 1 and _mismatch(row) is None:
                history = _CallSiteHistory({row.sequence: row.entries})
                variants = largest_first(_variant(row, ranks, history) for ranks in shapes.values())
                yield Divergence(group, row.sequence, "shape", variants)
                break


def calls_differ(states: JobState, group: str, sequence: int) -> bool:
    """Whether the ranks of a group made calls of different kinds under one number, which no backend completes."""
    entries = states.calls.get(group, {}).get(sequence, {})
    return len({entry.operation for entry in entries.values()}) > 1


def gloo_timeouts(states: JobState) -> dict[int, str]:
    """Ranks whose newest call over Gloo timed out, which its recorder records as it does completed calls."""
    if not states.is_from_dumps:
        return {}
    found: set[int] = set()
    for group, rows in states.calls.items():
        newest = _SequenceRow(max(rows), rows[max(rows)])
        if any(entry.backend != "gloo" or not entry.retired for entry in newest.entries.values()):
            continue
        if _hard_aspect(newest) is not None or _lacks_members(states, group, newest):
            found.update(newest.entries)
    last = {rank: states.ranks[rank].collectives[-1] for rank in found}
    return {rank: "timeout" for rank, one in last.items() if one.sequence == max(states.calls[one.group])}


def _lacks_members(states: JobState, group: str, row: _SequenceRow) -> bool:
    members = states.members.get(group, ())
    entered = {entry.operation for entry in row.entries.values()} <= WITH_ALL
    return entered and any(rank in states.ranks and rank not in row.entries for rank in members)


def _mismatch(row: _SequenceRow, operations: frozenset[str] = _SAME_ON_ALL) -> Aspect | None:
    called = {entry.operation for entry in row.entries.values()}
    if len(called) > 1 or not called <= operations:
        return None
    aspect = _hard_aspect(row)
    return aspect if aspect != "operation" else None


def _rows(states: JobState, group: str) -> Mapping[int, Mapping[int, Collective]]:
    """The last calls of a group by number and rank, up to the newest one that a rank waits in.

    Later calls, which hosts have only enqueued, are left out. In a monitored run, up to the newest one entered."""
    waits = [one.pending[group].sequence for one in states.ranks.values() if group in one.pending]
    if not states.is_from_dumps or not waits:
        waits = [one.entered(group) for one in states.ranks.values()]
    newest, calls = max(waits), states.calls.get(group, {})
    return {sequence: entries for sequence, entries in calls.items() if newest - LOOK_BACK < sequence <= newest}


def _shared(rows: Mapping[int, Mapping[int, Collective]]) -> list[_SequenceRow]:
    return [
        _SequenceRow(sequence, rows[sequence]) for sequence in sorted(rows, reverse=True) if len(rows[sequence]) > 1
    ]


def _origin(rows: Sequence[_SequenceRow], history: _CallSiteHistory) -> tuple[_SequenceRow | None, Aspect]:
    """The oldest row of the newest sequence of rows that differ, and the difference in it.

    ``None`` unless a row differs in a way that can't be by design. If the beginning of the sequence is not recorded,
    the newest such row."""
    differing: list[tuple[_SequenceRow, Aspect]] = []
    equal = 0
    for row in rows:
        aspect = _hard_aspect(row) or ("site" if _differs_in_site(row, history) else None)
        equal = equal + 1 if aspect is None else 0
        if equal > GAP:
            break
        if aspect is not None:
            differing.append((row, aspect))
    hard = next(((row, aspect) for row, aspect in differing if aspect != "site"), None)
    if hard is None:
        return None, "site"
    has_beginning = equal > 0 or rows[-1].sequence == 1 or len(rows) == 1
    return differing[-1] if has_beginning else hard


def _hard_aspect(row: _SequenceRow) -> Aspect | None:
    entries = list(row.entries.values())
    if len({entry.operation for entry in entries}) > 1:
        return "operation"
    if len({entry.types for entry in entries if entry.types}) > 1:
        return "type"
    if len({_numbers(entry) for entry in entries}) > 1:
        return "size"
    return None


def _numbers(entry: Collective) -> tuple[int, int]:
    """The numbers of input and output elements, or 0 if they may differ between ranks, as in lists."""
    given, taken = (sum(map(prod, sizes)) for sizes in (entry.input_sizes, entry.output_sizes))
    if entry.operation in _ANY_SIZE:
        return (0, 0)
    return (0 if entry.operation == "all_gather" else given, 0 if entry.operation == "reduce_scatter" else taken)


def _differs_in_site(row: _SequenceRow, history: _CallSiteHistory) -> bool:
    ranks_of: dict[SiteKey, list[int]] = {}
    for rank, entry in row.entries.items():
        if entry.frames:
            ranks_of.setdefault(history.keys[row.sequence, rank], []).append(rank)
    return len(ranks_of) > 1 and not all(history.is_role(key, ranks) for key, ranks in ranks_of.items())


def _variants(row: _SequenceRow, history: _CallSiteHistory, *, by_line: bool = True) -> tuple[MismatchGroup, ...]:
    """The ranks that made the same call, and with ``by_line`` from the same line."""
    calls: dict[tuple[object, ...], dict[SiteKey, list[int]]] = {}
    for rank, entry in row.entries.items():
        given = (entry.operation, entry.types, _numbers(entry))
        calls.setdefault(given, {}).setdefault(history.keys[row.sequence, rank], []).append(rank)
    groups = [_by_line(lines) for lines in calls.values()]
    if not by_line:
        groups = [[[rank for ranks in lines for rank in ranks]] for lines in groups]
    return largest_first(_variant(row, ranks, history) for lines in groups for ranks in lines)


def _by_line(lines: Mapping[SiteKey, list[int]]) -> list[list[int]]:
    """The ranks of each line, most ranks first. Ranks with an unknown line are at the end of the first group."""
    known = sorted((ranks for key, ranks in lines.items() if len(key) > 1), key=len, reverse=True)
    unknown = [rank for key, ranks in lines.items() if len(key) == 1 for rank in ranks]
    return [[*known[0], *unknown], *known[1:]] if known else [unknown]


def _variant(row: _SequenceRow, ranks: Sequence[int], history: _CallSiteHistory) -> MismatchGroup:
    entry, key = row.entries[ranks[0]], history.keys[row.sequence, ranks[0]]
    site = site_of(entry.operation, entry.frames)
    return MismatchGroup(tuple(sorted(ranks)), entry, site, key, history.is_usual(key, ranks))


def _usual_next(history: _CallSiteHistory, sequence: int, before: Mapping[int, Collective]) -> SiteKey | None:
    """The call that always followed the last common call earlier; ``None`` if several did."""
    wanted = {history.keys[sequence - 1, rank] for rank in before}
    if len(wanted) != 1:
        return None
    (key,) = wanted
    following = {
        history.keys[number + 1, rank]
        for (number, rank), found in history.keys.items()
        if found == key and number + 1 < sequence and (number + 1, rank) in history.keys
    }
    return following.pop() if len(following) == 1 else None

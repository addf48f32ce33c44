"""Where the ranks of a group parted: the first collective at which they did not do the same thing.

Collectives of a group pair by their number. Ranks that number different calls alike are paired by the back end, with
an error, a hang, or, where sizes happen to fit, in silence and shifted from then on. So the collectives are compared
backwards from where the ranks wait, to the oldest one that still differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

from doctor.analysis.call_sites import CallSite, SiteKey, site_key, site_of
from doctor.analysis.hang.rank_state import WITH_ALL, JobState
from doctor.core.facts import Collective

GAP = 4
"""Collectives in a row that may look alike within a shift: neighbours called from one line."""
LOOK_BACK = 64
"""Numbers before the newest one that are compared: recorders keep call sites for about as many."""

Aspect = Literal["operation", "size", "type", "shape", "site"]

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
"""Operations in which ranks may give and take different sizes, or the recorder shows them for some ranks alone."""
_ALIKE_ON_ALL = frozenset({"all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"})
"""Operations in which all ranks give as many elements of one type."""


class MismatchGroup(NamedTuple):
    """Ranks that made the same call at the point where they parted."""

    ranks: tuple[int, ...]
    entry: Collective
    site: CallSite
    key: SiteKey
    is_usual: bool
    """Others made this call before, or they themselves did more than once."""


class Divergence(NamedTuple):
    """Ranks of ``group`` parted at ``sequence``: ``parties``, largest first. ``aspect``: what differs most.
    ``usual_next``: the call that usually follows the one that they still made together, where history shows it."""

    group: str
    sequence: int
    aspect: Aspect
    parties: tuple[MismatchGroup, ...]
    usual_next: SiteKey | None = None

    @property
    def is_even(self) -> bool:
        """Whether no party is larger than the others."""
        return len(self.parties[0].ranks) == len(self.parties[1].ranks)

    @property
    def odd(self) -> tuple[MismatchGroup, ...]:
        """All parties but the largest; all of them where none is."""
        return self.parties if self.is_even else self.parties[1:]


class _SequenceRow(NamedTuple):
    """The entries of one number, by rank."""

    sequence: int
    entries: Mapping[int, Collective]


class _CallSiteHistory:
    """How often each call site occurs on each rank of a group."""

    def __init__(self, rows: Mapping[int, Mapping[int, Collective]]) -> None:
        self.keys = {
            (sequence, rank): site_key(entry) for sequence, entries in rows.items() for rank, entry in entries.items()
        }
        self.counts: dict[SiteKey, Counter[int]] = {}
        for (_, rank), key in self.keys.items():
            self.counts.setdefault(key, Counter())[rank] += 1

    def is_role(self, key: SiteKey, ranks: Iterable[int]) -> bool:
        """Whether these ranks, and only they, call from there regularly: a branch for their part in a collective."""
        counts = self.counts[key]
        own = set(ranks)
        return counts.keys() <= own and all(counts[rank] > 1 for rank in own)

    def is_usual(self, key: SiteKey, ranks: Iterable[int]) -> bool:
        """Whether others made this call too, or they themselves did more than once."""
        counts = self.counts[key]
        own = set(ranks)
        return bool(counts.keys() - own) or any(counts[rank] > 1 for rank in own)


def divergences(scene: JobState) -> Iterator[Divergence]:
    """Every group whose ranks wait and have parted; the group of most ranks first."""
    groups = {group for standing in scene.ranks.values() for group in standing.pending}
    for group in sorted(groups, key=lambda name: (-len(scene.members.get(name, ())), name)):
        if (found := _divergence(scene, group)) is not None:
            yield found


def mismatches(scene: JobState) -> Iterator[Divergence]:
    """The newest call of each group in which ranks exchanged tensors of different sizes or types, whatever came of it:
    back ends pair them where the bytes fit, and some where they do not."""
    for group in sorted(scene.calls):
        rows = _rows(scene, group, look_back=None)
        for row in _shared(rows):
            aspect = _mismatch(row)
            if aspect is not None:
                parties = _groups_by_call(row, _CallSiteHistory({row.sequence: row.entries}), by_line=False)
                yield Divergence(group, row.sequence, aspect, parties)
                break


def reshaped(scene: JobState) -> Iterator[Divergence]:
    """The newest call of each group in which ranks gave as many elements in other shapes: no back end minds."""
    for group in sorted(scene.calls):
        for row in _shared(scene.calls[group]):
            shapes: dict[object, list[int]] = {}
            for rank, entry in row.entries.items():
                if entry.operation in _ALIKE_ON_ALL:
                    shapes.setdefault(entry.input_sizes, []).append(rank)
            if len(shapes) > 1 and _mismatch(row) is None:
                yield Divergence(group, row.sequence, "shape", _ordered(row, shapes.values()))
                break


def _ordered(row: _SequenceRow, groups: Iterable[Sequence[int]]) -> tuple[MismatchGroup, ...]:
    history = _CallSiteHistory({row.sequence: row.entries})
    parties = (_mismatch_group(row, ranks, history) for ranks in groups)
    return tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks[0])))


def timed_out_by_gloo(scene: JobState) -> dict[int, str]:
    """Ranks whose newest call over Gloo ran out of time, by what others have: they were not in it, or in another one.
    Its recorder tells of calls that time-outs ended as of those that went well."""
    if not scene.is_left_behind:
        return {}
    found: dict[int, str] = {}
    for group, rows in scene.calls.items():
        newest = _SequenceRow(max(rows), rows[max(rows)])
        if any(entry.backend != "gloo" or not entry.retired for entry in newest.entries.values()):
            continue
        in_vain = _hard_aspect(newest) is not None or _misses_somebody(scene, group, newest)
        found.update(dict.fromkeys(newest.entries, "timeout") if in_vain else {})
    return {rank: why for rank, why in found.items() if _is_last(scene, rank, found)}


def _misses_somebody(scene: JobState, group: str, row: _SequenceRow) -> bool:
    members = scene.members.get(group, ())
    entered = {entry.operation for entry in row.entries.values()} <= WITH_ALL
    return entered and any(rank in scene.ranks and rank not in row.entries for rank in members)


def _is_last(scene: JobState, rank: int, found: Mapping[int, str]) -> bool:
    """Whether the newest call of all of a rank's is that of a group that was cut off."""
    recorder = scene.ranks[rank].recorder
    last = recorder.collectives[-1] if recorder and recorder.collectives else None
    return last is not None and last.sequence == max(scene.calls[last.group]) and rank in found


def _mismatch(row: _SequenceRow) -> Aspect | None:
    """What differs between calls of one operation that can't be by design."""
    operations = {entry.operation for entry in row.entries.values()}
    if len(operations) > 1 or not operations <= _ALIKE_ON_ALL:
        return None
    aspect = _hard_aspect(row)
    return aspect if aspect != "operation" else None


def _divergence(scene: JobState, group: str) -> Divergence | None:
    rows = _rows(scene, group)
    shared = _shared(rows)
    if not shared:
        return None
    history = _CallSiteHistory(rows)
    origin, aspect = _origin(shared, history)
    if origin is None:
        return None
    before = rows.get(origin.sequence - 1, {})
    return Divergence(
        group,
        origin.sequence,
        aspect,
        _groups_by_call(origin, history),
        _usual_next(history, origin.sequence, before),
    )


def _rows(scene: JobState, group: str, look_back: int | None = LOOK_BACK) -> Mapping[int, Mapping[int, Collective]]:
    """A group's calls by number and rank, of the last ``look_back`` numbers before the one that ranks wait in
    (``None``: all). What hosts enqueued behind that tells nothing."""
    calls = scene.calls.get(group, {})
    if look_back is None:
        return calls
    newest = _newest(scene, group)
    return {sequence: entries for sequence, entries in calls.items() if newest - look_back < sequence <= newest}


def _newest(scene: JobState, group: str) -> int:
    """The number of the newest call of a group that a rank waits in; of a run that is watched, that one has entered."""
    if scene.is_left_behind:
        waits = [one.pending[group].sequence for one in scene.ranks.values() if group in one.pending]
        if waits:
            return max(waits)
    return max(standing.entered(group) for standing in scene.ranks.values())


def _shared(rows: Mapping[int, Mapping[int, Collective]]) -> list[_SequenceRow]:
    """The numbers that two or more ranks tell of, newest first."""
    return [
        _SequenceRow(sequence, rows[sequence]) for sequence in sorted(rows, reverse=True) if len(rows[sequence]) > 1
    ]


def _origin(rows: Sequence[_SequenceRow], history: _CallSiteHistory) -> tuple[_SequenceRow | None, Aspect]:
    """The oldest row of the stretch that differs and leads up to the newest one, and what differs in it; ``None``
    unless something in the stretch differs that can't be by design. Where its beginning is out of sight, the newest
    such row."""
    stretch: list[tuple[_SequenceRow, Aspect]] = []
    alike = 0
    for row in rows:
        aspect = _aspect(row, history)
        alike = alike + 1 if aspect is None else 0
        if alike > GAP:
            break
        if aspect is not None:
            stretch.append((row, aspect))
    hard = next(((row, aspect) for row, aspect in stretch if aspect != "site"), None)
    if hard is None:
        return None, "site"
    has_beginning = alike > 0 or rows[-1].sequence == 1 or len(rows) == 1
    return stretch[-1] if has_beginning else hard


def _aspect(row: _SequenceRow, history: _CallSiteHistory) -> Aspect | None:
    """What differs between the ranks of a row."""
    return _hard_aspect(row) or ("site" if _differs_in_site(row, history) else None)


def _hard_aspect(row: _SequenceRow) -> Aspect | None:
    """What differs of what the back end sees."""
    entries = list(row.entries.values())
    if len({entry.operation for entry in entries}) > 1:
        return "operation"
    if len({entry.types for entry in entries if entry.types}) > 1:
        return "type"
    if len({_numbers(entry) for entry in entries}) > 1:
        return "size"
    return None


def _numbers(entry: Collective) -> tuple[int, int]:
    """Elements that go in and come out, as far as they have to be equal: shapes may differ as long as these do not, and
    gathering lists and scattering them take what each rank has."""
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


def _groups_by_call(row: _SequenceRow, history: _CallSiteHistory, *, by_line: bool = True) -> tuple[MismatchGroup, ...]:
    """Those who made the same call, and from the same line where it counts (``by_line``)."""
    calls: dict[tuple[object, ...], dict[SiteKey, list[int]]] = {}
    for rank, entry in row.entries.items():
        given = (entry.operation, entry.types, _numbers(entry))
        calls.setdefault(given, {}).setdefault(history.keys[row.sequence, rank], []).append(rank)
    groups = [ranks for lines in calls.values() for ranks in (_by_line(lines) if by_line else _as_one(lines))]
    parties = [_mismatch_group(row, ranks, history) for ranks in groups]
    return tuple(sorted(parties, key=lambda party: (-len(party.ranks), party.ranks[0])))


def _as_one(lines: Mapping[SiteKey, list[int]]) -> list[list[int]]:
    return [[rank for ranks in _by_line(lines) for rank in ranks]]


def _by_line(lines: Mapping[SiteKey, list[int]]) -> list[list[int]]:
    """The ranks of each line, most ranks first. Those whose line is not known are with the first, behind the others."""
    known = sorted((ranks for key, ranks in lines.items() if len(key) > 1), key=len, reverse=True)
    unknown = [rank for key, ranks in lines.items() if len(key) == 1 for rank in ranks]
    return [[*known[0], *unknown], *known[1:]] if known else [unknown]


def _mismatch_group(row: _SequenceRow, ranks: Sequence[int], history: _CallSiteHistory) -> MismatchGroup:
    """Of ``ranks``, the first of which shows the call best."""
    entry, key = row.entries[ranks[0]], history.keys[row.sequence, ranks[0]]
    site = site_of(entry.operation, entry.frames)
    return MismatchGroup(tuple(sorted(ranks)), entry, site, key, history.is_usual(key, ranks))


def _usual_next(history: _CallSiteHistory, sequence: int, before: Mapping[int, Collective]) -> SiteKey | None:
    """The call that followed the one before wherever it was made earlier, if it was always the same one."""
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

"""The sections of all ranks as columns, and groups of ranks that share sections.

Checks request dozens of combinations of sections, but nearly all of these divide the ranks in the same few ways (by
process, by host, by image). Each division is computed once per job, so that a check pays for its groups and not for the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, wraps
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, cast

import msgspec

from doctor.core.facts import Missing, Section

if TYPE_CHECKING:
    from doctor.core.job import Rank

S = TypeVar("S", bound=Section)
T = TypeVar("T")
V = TypeVar("V", Section, Missing)
Ranks = Union["Rank", "IdenticalRanks"]

Labels = tuple[int, ...]
"""The number of its group for every rank or host. Groups are numbered in the order of their first member."""

_NOT_COMPUTED = object()


def once_per_rank(function: Callable[[Ranks], T]) -> Callable[[Ranks], T]:
    """Make a function of a rank, or of identical ranks, keep its result with the (first) rank: dozens of checks request
    the same value of every rank, and sections do not change once a job is built."""

    @wraps(function)
    def remembered(ranks: Ranks) -> T:
        memo = ranks.memo
        result: T = memo.get(function, _NOT_COMPUTED)
        if result is _NOT_COMPUTED:
            result = memo[function] = function(ranks)
        return result

    return remembered


class IdenticalRanks:
    """Ranks for which the requested sections are the same objects."""

    __slots__ = ("_ranks", "members", "memo")

    def __init__(self, members: tuple[Rank, ...]) -> None:
        self.members = members
        self.memo = members[0].memo
        self._ranks: tuple[int, ...] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers."""
        if self._ranks is None:
            self._ranks = tuple([rank.number for rank in self.members])
        return self._ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of their hosts, each once."""
        return tuple(dict.fromkeys(rank.host.name for rank in self.members))

    def find(self, section: type[S]) -> S | None:
        """An ``also`` section of these ranks, or ``None`` if it is missing."""
        return self.members[0].find(section)

    def missing(self, section: type[Section]) -> Missing | None:
        """Why an ``also`` section of these ranks is missing."""
        return self.members[0].missing(section)


Row = tuple["Section | IdenticalRanks | None", ...]
"""The requested sections, and the ranks that share them."""


class Division:
    """A division of the ranks into groups. ``labels``: the number of its group for every rank."""

    def __init__(self, ranks: Sequence[Rank], labels: Labels) -> None:
        self._ranks = ranks
        self.labels = labels

    @cached_property
    def first(self) -> list[int]:
        """The position of the first rank of each group."""
        if len(self.labels) and self.labels[-1] == len(self.labels) - 1:  # numbered in order: all differ
            return list(range(len(self.labels)))
        first: dict[int, int] = {}
        for position, label in enumerate(self.labels):
            first.setdefault(label, position)
        return list(first.values())

    @cached_property
    def groups(self) -> list[IdenticalRanks]:
        """The ranks of each group."""
        if len(self.first) == len(self._ranks):
            return list(map(IdenticalRanks, zip(self._ranks, strict=True)))
        members: list[list[Rank]] = [[] for _ in self.first]
        for rank, label in zip(self._ranks, self.labels, strict=True):
            members[label].append(rank)
        return [IdenticalRanks(tuple(group)) for group in members]


class Column(msgspec.Struct, Generic[V], frozen=True):
    """One section of every rank (``None``: missing there), or why that section is missing."""

    values: Sequence[V | None]
    division: Division
    has_gaps: bool


class SectionTable:
    """The columns of the ranks of one job. Sections must not change after the first request."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._ranks = ranks
        hosts = {id(rank.host): rank.host for rank in ranks}
        self._hosts = tuple(hosts.values())
        positions = {host: position for position, host in enumerate(hosts)}
        self._host_of = [positions[id(rank.host)] for rank in ranks]
        self._sections = [rank.sections for rank in ranks]
        self._known_to_ranks = frozenset().union(*(rank.sections for rank in ranks))
        self._columns: dict[str, Column[Section]] = {}
        self._reasons: dict[str, Column[Missing]] = {}
        self._divisions: dict[Labels, Division] = {}
        self._host_divisions: dict[Labels, Division] = {}
        self._combined: dict[frozenset[Division], Division] = {}
        self._undivided = self._divide((0,) * len(ranks))

    def rows(self, sections: Sequence[type[Section]], also: Sequence[type[Section]]) -> list[Row]:
        """Every distinct combination of ``sections`` and ``also``: the ``sections``, and the ranks that have it."""
        columns = [self.column(section) for section in sections]
        shared = self.divide((*sections, *also))
        values = [column.values for column in columns]
        if len(shared.first) < len(self._ranks):
            values = [[column[position] for position in shared.first] for column in values]
        rows: Iterable[Row] = zip(*values, shared.groups, strict=True)
        return [row for row in rows if None not in row] if any(one.has_gaps for one in columns) else list(rows)

    def divide(self, sections: Sequence[type[Section]]) -> Division:
        """The ranks, grouped by ``sections``."""
        return self._combine([self.column(section) for section in sections])

    def column(self, section: type[Section]) -> Column[Section]:
        """One section of every rank."""
        if section.key not in self._columns:
            self._columns[section.key] = self._read(section)
        return self._columns[section.key]

    def lacking(
        self, needs: Sequence[type[Section]], instead: Sequence[type[Section]] = ()
    ) -> list[tuple[IdenticalRanks, tuple[Missing, ...]]]:
        """Groups of ranks that lack one of ``needs``, and one of ``instead`` if there are any, with the reasons."""
        with_gaps = [section for section in needs if self.column(section).has_gaps]
        if not with_gaps:
            return []
        needed, other = (
            [self._reasons.get(section.key) or self._read_reasons(section) for section in asked]
            for asked in (with_gaps, instead)
        )
        shared = self._combine([*needed, *other])
        found = []
        for group, first in zip(shared.groups, shared.first, strict=True):
            reasons = tuple(column.values[first] for column in needed)
            served = bool(other) and all(column.values[first] is None for column in other)
            if not served and any(reasons):
                found.append((group, tuple(filter(None, reasons))))
        return found

    def _read_reasons(self, section: type[Section]) -> Column[Missing]:
        """Why the section is missing, for every rank."""
        if section.key in self._known_to_ranks:
            own = self._own(section)
            if set(map(type, own)) == {Missing}:
                column = self._of_ranks(_interned(cast("list[Missing | None]", own)))
            else:
                column = self._of_ranks(_interned([rank.missing(section) for rank in self._ranks]))
        elif section.level == "host":
            column = self._of_hosts(_interned([host.missing(section) for host in self._hosts]))
        else:
            column = self._same_for_all(self._ranks[0].missing(section) if self._ranks else None)
        self._reasons[section.key] = column
        return column

    def _same_for_all(self, value: V | None) -> Column[V]:
        return Column([value] * len(self._ranks), self._undivided, value is None and bool(self._ranks))

    def _read(self, section: type[Section]) -> Column[Section]:
        if section.key in self._known_to_ranks:
            return self._of_ranks(self._read_ranks(section))
        if section.level == "host":
            return self._of_hosts([host.find(section) for host in self._hosts])
        return self._same_for_all(None)

    def _read_ranks(self, section: type[Section]) -> list[Section | None]:
        own = self._own(section)
        kinds = set(map(type, own))
        if section.level == "rank" and kinds <= {section, type(None)}:
            return cast("list[Section | None]", own)
        if section.level == "rank" and not any(issubclass(kind, section) for kind in kinds):
            return [None] * len(own)
        return [rank.find(section) for rank in self._ranks]

    def _own(self, section: type[Section]) -> list[Section | Missing | None]:
        """What the ranks themselves have of a section; nearly always all of them have it."""
        try:
            return list(map(itemgetter(section.key), self._sections))
        except KeyError:
            return [sections.get(section.key) for sections in self._sections]

    def _of_ranks(self, values: list[V | None]) -> Column[V]:
        labels, has_gaps = _labels(values)
        return Column(values, self._divide(labels), has_gaps)

    def _of_hosts(self, values: list[V | None]) -> Column[V]:
        """The column of values that all ranks of a host share: only the hosts are compared."""
        labels, has_gaps = _labels(values)
        if labels not in self._host_divisions:
            self._host_divisions[labels] = self._divide(tuple([labels[host] for host in self._host_of]))
        return Column([values[host] for host in self._host_of], self._host_divisions[labels], has_gaps)

    def _divide(self, labels: Labels) -> Division:
        return self._divisions.setdefault(labels, Division(self._ranks, labels))

    def _combine(self, columns: Iterable[Column[Any]]) -> Division:
        parts = frozenset(column.division for column in columns) - {self._undivided}
        if parts not in self._combined:
            self._combined[parts] = self._cross(parts)
        return self._combined[parts]

    def _cross(self, parts: frozenset[Division]) -> Division:
        if not parts:
            return self._undivided
        finest = max(parts, key=lambda part: len(part.first))
        if len(parts) == 1 or len(finest.first) == len(self._ranks):
            return finest
        return self._divide(_numbered(list(zip(*(part.labels for part in parts), strict=True))))


def _interned(reasons: list[Missing | None]) -> list[Missing | None]:
    """The same reasons, equal ones as one object, so that they can be compared by identity."""
    equal: dict[Missing | None, Missing | None] = {}
    distinct = {id(reason): reason for reason in reasons}  # few, and hashing a reason is slow
    chosen = {identity: equal.setdefault(reason, reason) for identity, reason in distinct.items()}
    return [chosen[id(reason)] for reason in reasons]


def _labels(values: Sequence[object]) -> tuple[Labels, bool]:
    """The group of each value by identity, because hashing sections is slow, and whether ``None`` is among them."""
    identities = list(map(id, values))
    if identities and identities.count(identities[0]) == len(identities):
        return (0,) * len(identities), values[0] is None
    return _numbered(identities), id(None) in identities


def _numbered(keys: Sequence[Hashable]) -> Labels:
    distinct = dict.fromkeys(keys)
    if len(distinct) == len(keys):
        return tuple(range(len(keys)))
    numbers: dict[Hashable, int] = {key: number for number, key in enumerate(distinct)}
    return tuple([numbers[key] for key in keys])

"""Which ranks differ from the majority or the baseline, and what these ranks have in common.

A thing that is absent is a value too, an even split is reported as one, and :func:`correlates` names what the minority
has in common. Everything is linear in the ranks of a job, however many groups there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from doctor.analysis.stats.baseline import BaselineDifference, BaselineValue
from doctor.core.facts import (
    DriverFacts,
    GpuFacts,
    HostFacts,
    LaunchFacts,
    MissingReason,
    Section,
    SlurmFacts,
    SoftwareFacts,
)
from doctor.core.job import UNKNOWN_HOST, Group, Host, Job, Rank
from doctor.core.text import counted, ranks_in_words

S = TypeVar("S", bound=Section)

SHOWN_GROUPS = 4
"""Groups that :func:`describe` spells out."""

NAMED_RANKS = 8
"""Ranks of a split that :func:`describe` names; of more ranks it only gives the number per value."""

SHOWN_NAMES = 4
"""Host names, or ranges of them, that one line shows."""


class MajoritySplit(NamedTuple):
    """Ranks by a value.

    ``common``: the largest group, ``None`` if the largest ones are of equal size. ``minorities``: every other group,
    largest first; in an even split all groups. ``expected``: the baseline value, which decides instead of the sizes:
    ``common`` is then the group that has it, ``None`` if no rank has, and no split is ``even``."""

    common: Group[Any] | None
    minorities: tuple[Group[Any], ...]
    even: bool
    expected: BaselineValue | None = None

    @property
    def groups(self) -> tuple[Group[Any], ...]:
        """All groups, largest first."""
        return tuple(sorted(((self.common,) if self.common else ()) + self.minorities, key=_by_size))

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks of all minorities."""
        return tuple(sorted(rank for group in self.minorities for rank in group.ranks))

    @property
    def drifted(self) -> bool:
        """Whether all ranks agree with one another, but not with the baseline."""
        return self.expected is not None and self.common is None and len(self.minorities) == 1

    def unlike(self, what: str, word: Callable[[Any], str], *groups: Group[Any]) -> BaselineDifference:
        """The value of ``groups`` (default: all minorities) against the baseline; ``word`` returns a value as text."""
        value, source = self.expected or (None, "")
        found = ", ".join(word(group.value) for group in (groups or self.minorities)[:SHOWN_GROUPS])
        return BaselineDifference(what, word(value), found, source)


def split(
    job: Job, section: type[S], key: Callable[[S], Hashable], *, expected: BaselineValue | None = None
) -> MajoritySplit:
    """Ranks by ``key`` of their section; if the machine does not have the section, by ``None``.

    Ranks whose section could not be read (hidden, failed, timed out, not measured) are in no group. ``expected``: see
    :class:`MajoritySplit`."""
    groups: dict[Hashable, list[int]] = {}
    for facts, same in job.facts(section):
        groups.setdefault(key(facts), []).extend(same.ranks)
    for same, reasons in job.lacking((section,)):
        if reasons[0].lack is MissingReason.ABSENT:
            groups.setdefault(None, []).extend(same.ranks)
    return split_groups(groups, expected=expected)


def split_groups(groups: Mapping[Hashable, Iterable[int]], *, expected: BaselineValue | None = None) -> MajoritySplit:
    """:func:`split` for ranks that are already grouped by a value."""
    ordered = sorted((Group(value, tuple(sorted(ranks))) for value, ranks in groups.items()), key=_by_size)
    if expected is not None:
        common = next((group for group in ordered if group.value == expected.value), None)
        return MajoritySplit(
            common, tuple(group for group in ordered if group is not common), even=False, expected=expected
        )
    if len(ordered) > 1 and len(ordered[0].ranks) == len(ordered[1].ranks):
        return MajoritySplit(None, tuple(ordered), even=True)
    return MajoritySplit(ordered[0] if ordered else None, tuple(ordered[1:]), even=False)


def _by_size(group: Group[Any]) -> tuple[int, int]:
    return (-len(group.ranks), group.ranks[0])


def split_values(values: Mapping[int, Hashable]) -> MajoritySplit:
    """:func:`split` for ranks that have one value each."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return split_groups(groups)


def describe(
    split: MajoritySplit, at: Callable[[Iterable[int]], tuple[int, ...]] = tuple, *, absent: str = "none"
) -> str:
    """The groups as text, such as ``63 ranks: 2.27.3; rank 5: 2.21.5``; empty without ranks.

    An even split is written as ``no majority (…)``, and a few ranks are named: ``rank 0: 20; rank 1: 21``. With a
    baseline: ``expected 2.21.5 (capture of node0, 2026-11-20), found 63 ranks: …``. ``at``: the ranks that a group
    stands for. ``absent``: the text for the value ``None``."""

    def word(value: object) -> str:
        return absent if value is None else _word(value)

    groups = tuple(Group(group.value, at(group.ranks)) for group in split.groups)
    are_few = sum(len(group.ranks) for group in groups) <= NAMED_RANKS
    parts = [
        f"{ranks_in_words(group.ranks) if are_few or len(group.ranks) == 1 else counted(len(group.ranks), 'rank')}: "
        f"{word(group.value)}"
        for group in groups[:SHOWN_GROUPS]
    ]
    if len(groups) > SHOWN_GROUPS:
        rest = groups[SHOWN_GROUPS:]
        ranks = sum(len(group.ranks) for group in rest)
        parts.append(f"{counted(ranks, 'rank')}: {counted(len(rest), 'other value')}")
    even = not are_few and len(groups) > 1 and len(groups[0].ranks) == len(groups[1].ranks)
    found = f"no majority ({'; '.join(parts)})" if even else "; ".join(parts)
    expected = split.expected
    return f"expected {word(expected.value)} ({expected.source}), found {found}" if expected else found


def _word(value: object) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, tuple):
        return " ".join(_word(part) for part in value if part is not None and part != "") or "none"
    return str(value)


def correlates(job: Job, ranks: Iterable[int]) -> tuple[str, ...]:
    """What exactly these ranks and no others have in common, the most telling first.

    Such as ``all on node3``, ``hosts node4-node7``, ``local rank 0 of every host``, ``driver 550.54``, ``image X``.
    Empty if there is nothing, or if ``ranks`` are all there are."""
    members = [rank for number in dict.fromkeys(ranks) for rank in job.by_number.get(number, ())]
    if not members or len(members) == len(job.ranks):
        return ()
    # One table for all groups of a job, so that asking about every group stays linear.
    if job not in _TABLES:
        _TABLES[job] = _TraitTable(job)
    return tuple(_shared(_TABLES[job], members))


def _shared(table: _TraitTable, members: Sequence[Rank]) -> Iterator[str]:
    hosts = list({rank.host.index: rank.host for rank in members}.values())
    are_known = all(host.name != UNKNOWN_HOST for host in hosts)
    if are_known and sum(table.on_host[host.index] for host in hosts) == len(members):
        yield f"all on {hosts[0].name}" if len(hosts) == 1 else f"hosts {_host_names(hosts)}"
    for trait, counts in table.counts.items():
        values = {_TRAITS[trait].read(rank) for rank in members}
        value = values.pop()
        if not values and value is not None and counts[value] == len(members):
            yield f"local rank {value} of every host" if trait == "local rank" else f"{trait} {value}"


class _TraitTable:
    def __init__(self, job: Job) -> None:
        self.on_host = {local.hosts[0].index: len(local.members) for local in job.by_host() if local.members}
        self.counts: dict[str, dict[Hashable, int]] = {trait: {} for trait in _TRAITS}
        for trait, counts in self.counts.items():
            for same in job.identical(*_TRAITS[trait].sections):
                value = _TRAITS[trait].read(same.members[0])
                counts[value] = counts.get(value, 0) + len(same.members)
        if len(self.on_host) == 1:
            del self.counts["local rank"]


_TABLES: WeakKeyDictionary[Job, _TraitTable] = WeakKeyDictionary()


class _Trait(msgspec.Struct, frozen=True):
    read: Callable[[Rank], Hashable]
    sections: tuple[type[Section], ...]


def _driver(rank: Rank) -> str | None:
    gpus = rank.find(GpuFacts)
    if gpus is not None and gpus.driver_version:
        return gpus.driver_version
    drivers = rank.find(DriverFacts)
    return drivers.kernel_driver if drivers else None


def _gpu_model(rank: Rank) -> str | None:
    gpus = rank.find(GpuFacts)
    return gpus.gpus[0].name or None if gpus and gpus.gpus else None


def _trait(section: type[Section], field: str) -> _Trait:
    def read(rank: Rank) -> Hashable:
        facts = rank.find(section)
        return getattr(facts, field) if facts else None

    return _Trait(read, (section,))


_TRAITS = {
    "image": _trait(HostFacts, "image"),
    "partition": _trait(SlurmFacts, "partition"),
    "driver": _Trait(_driver, (GpuFacts, DriverFacts)),
    "GPU": _Trait(_gpu_model, (GpuFacts,)),
    "Python environment": _trait(SoftwareFacts, "prefix"),
    "container": _trait(HostFacts, "container"),
    "distribution": _trait(HostFacts, "distribution"),
    "kernel": _trait(HostFacts, "kernel"),
    "local rank": _Trait(lambda rank: rank.local_rank, (LaunchFacts,)),
}
"""Traits by which ranks may differ, by their names in reports."""


def _host_names(hosts: Sequence[Host]) -> str:
    """Host names with consecutive numbers folded: ``node4-node7, gpu12``."""
    ordered = sorted({host.name: _numbered(host.name) for host in hosts}.items(), key=lambda item: item[1])
    runs = [
        [name for _, (name, _) in run]
        for _, run in groupby(enumerate(ordered), key=lambda item: (item[1][1][0], item[1][1][1] - item[0]))
    ]
    words = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = len(words) - SHOWN_NAMES
    return ", ".join(words[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _numbered(name: str) -> tuple[str, int]:
    """The host name without its number (the last digits of the first label), and that number; -1 without digits."""
    match = re.fullmatch(r"([^.]*?)(\d+)([^.\d]*(?:\..*)?)", name)
    return (f"{match[1]}#{match[3]}", int(match[2])) if match else (name, -1)

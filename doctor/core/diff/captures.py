"""Compares two captures or two runs, and lists the most likely causes of trouble first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from doctor.core.diff.runs import OF_THE_MOMENT, figures_of, is_alike
from doctor.core.facts import SECTIONS, Section
from doctor.core.job import Job, Rank

Weight = Literal["high", "medium", "low"]

ORDER: dict[str, int] = {"high": 0, "medium": 1, "low": 2}

_VOLATILE = {
    "host": {"ram_available", "memory_used", "pids_used", "cpu_periods", "cpu_throttled_periods", "seconds"}
    | {"clock_error", "nccl_shm_bytes", "free"},
    "interfaces": {"segments_sent", "segments_retransmitted"},
    "gpus": {"memory_used", "memory_free", "utilization", "temperature", "power", "clock", "clock_reasons", "processes"}
    | {"memory", "errors", "pcie_generation"},
    "process": {"pid", "identity", "shm_device"},
    "launch": {"rank", "local_rank", "node_rank", "variables", "claims"},
    "master": {"seconds", "pid"},
    "storage": {"free", "free_inodes", "age"},
    "kernel-log": {"job_started", "time"},
    "slurm": {"job_id", "node_list"},
    "rdma": {"value"},
}
"""Fields that differ between two healthy moments; they are ignored."""

_HIGH = frozenset({"software", "nccl", "environment", "gpus", "interfaces", "rdma", "master", "drivers"}) | {
    *("progress", "training", "loaders", "model", "replica")
}
_MEDIUM = frozenset({"launch", "slurm", "trainer", "steps", "run-memory", "process", "host"})
"""Sections of high and of medium importance; the others are of low importance."""
_LOUD_FIELDS = {"names", "shm", "memory_limit", "cpu_quota", "kernel", "limits", "boot_id"}
"""Fields of a section of medium importance that are often the cause."""

_PAIRS = (("first", "second"), ("package", "requires"))
_NAMES = ("index", "name", "variable", "path", "number", "kind", "source", "destination", "address")
"""Fields by which the items of a list are matched, in this order; the index precedes the name because the GPUs of one
host have equal names."""


class Difference(msgspec.Struct, frozen=True):
    """One fact that differs. ``path`` is within the section, such as ``interfaces[eth0].mtu``; ``ranks``: those that
    differ."""

    section: str
    path: str
    before: object
    after: object
    weight: Weight
    ranks: tuple[int, ...]


def compare(before: Job, after: Job) -> list[Difference]:
    """The differences between ranks of both jobs, equal ones merged; then the ranks that only one of them has."""
    old = {rank.number: rank for rank in before.ranks}
    new = {rank.number: rank for rank in after.ranks}
    found: dict[tuple[str, str, str], Difference] = {}
    flat = _Flattener()
    for number in sorted(old.keys() & new.keys()):
        for difference in _compare_ranks(old[number], new[number], flat):
            key = (difference.section, difference.path, repr((difference.before, difference.after)))
            known = found.get(key)
            ranks = (*(known.ranks if known else ()), number)
            found[key] = msgspec.structs.replace(difference, ranks=ranks)
    differences = list(found.values())
    if gone := sorted(old.keys() - new.keys()):
        differences.append(Difference("job", "ranks", "there", None, "high", tuple(gone)))
    if came := sorted(new.keys() - old.keys()):
        differences.append(Difference("job", "ranks", None, "there", "high", tuple(came)))
    return sorted(differences, key=lambda d: (ORDER[d.weight], d.section, d.path))


def _compare_ranks(old: Rank, new: Rank, flat: _Flattener) -> Iterator[Difference]:
    for key, section in SECTIONS.items():
        if key in OF_THE_MOMENT:
            continue
        before, after = flat.of(old.find(section), key), flat.of(new.find(section), key)
        if before is after:
            continue
        for path in sorted(before.keys() | after.keys()):
            if not is_alike(path, before.get(path), after.get(path)):
                is_loud = key in _HIGH or not _LOUD_FIELDS.isdisjoint(path.replace("[", ".").split("."))
                weight: Weight = "high" if is_loud else "medium" if key in _MEDIUM else "low"
                yield Difference(key, path, before.get(path), after.get(path), weight, ())


class _Flattener:
    """Sections as ``{path: value}``; each distinct section once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Section | None, dict[str, object]]] = {}

    def of(self, section: Section | None, key: str) -> dict[str, object]:
        if id(section) not in self._done:
            figures = figures_of(section) if section else {}
            shown = msgspec.to_builtins(section) if figures is None else figures
            self._done[id(section)] = (section, dict(_flatten(shown, "", _VOLATILE.get(key, set()))))
        return self._done[id(section)][1]


def _flatten(value: Any, path: str, volatile: set[str]) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in volatile and name != "hidden":
                yield from _flatten(inner, f"{path}.{name}" if path else name, volatile)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for name, item in zip(_names_of(value), value, strict=True):
            yield from _flatten(item, f"{path}[{name}]", volatile)
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def _names_of(items: Sequence[Any]) -> Iterator[str]:
    """A unique name for each item: a second route to one destination is ``0.0.0.0/0#2``."""
    counts: dict[str, int] = {}
    for position, item in enumerate(items):
        name = _name_of(item, position)
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name}#{counts[name]}"


def _name_of(item: Any, position: int) -> str:
    if not isinstance(item, Mapping):
        return str(position)
    for first, second in _PAIRS:
        if first in item and second in item:
            return f"{item[first]}-{item[second]}"
    return next((str(item[name]) for name in _NAMES if name in item), str(position))

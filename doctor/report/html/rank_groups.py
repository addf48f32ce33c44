"""The rows of the page's table of ranks: of many ranks, those in the same state share a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from doctor.core.text import ranges
from doctor.report.formatting import some
from doctor.report.rank_table import RankRow, TableCell

EACH = 32
"""Ranks up to which each has a row."""
MOST_GROUPS = 64
"""Rows of more ranks: those that findings name, then the smallest."""
_SAME = ("state", "collective", "batch", "error", "findings")
"""Fields that ranks of a row share."""


class RankGroup(NamedTuple):
    """Ranks that share a row. ``hosts``: all names, for the filter, if the cell shows only some."""

    ranks: tuple[int, ...]
    cells: Mapping[str, TableCell]
    findings: tuple[str, ...]
    hosts: str = ""

    @property
    def name(self) -> str:
        """The numbers of the ranks."""
        return ranges(self.ranks)


class RankGroups(NamedTuple):
    """The rows of the table, by rank; ``left_out``: ranks without a row."""

    rows: tuple[RankGroup, ...]
    ranks: int
    left_out: int


def rank_groups(rows: Sequence[RankRow], columns: Iterable[str]) -> RankGroups:
    """Return a row for each rank, or of many ranks, for all with the same state, last collective and error."""
    shared: dict[object, list[RankRow]] = {}
    for row in rows:
        key = row.rank if len(rows) <= EACH else tuple(getattr(row, name) for name in _SAME)
        shared.setdefault(key, []).append(row)
    groups = [_group(ranks, tuple(columns)) for ranks in shared.values()]
    kept = sorted(groups, key=lambda group: (not group.findings, len(group.ranks)))[: max(EACH, MOST_GROUPS)]
    shown = sum(len(group.ranks) for group in kept)
    return RankGroups(tuple(sorted(kept, key=lambda group: group.ranks)), len(rows), len(rows) - shown)


def _group(rows: Sequence[RankRow], columns: Iterable[str]) -> RankGroup:
    hosts = list(dict.fromkeys(row.host.text for row in rows))
    cells = {name: _cell([getattr(row, name) for row in rows]) for name in columns}
    if len(hosts) > 1 and "host" in cells:
        cells["host"] = TableCell(some(hosts), hosts[0])
    names = " ".join(hosts) if len(hosts) > 1 else ""
    return RankGroup(tuple(row.rank for row in rows), cells, rows[0].findings, names)


def _cell(cells: Sequence[TableCell]) -> TableCell:
    """Return a value that all ranks have, or the lowest and the highest."""
    texts = dict.fromkeys(cell.text for cell in sorted(cells, key=lambda cell: (str(type(cell.order)), cell.order)))
    if len(texts) == 1:
        return cells[0]
    return TableCell(f"{next(iter(texts))} to {next(reversed(texts))}", cells[0].order)

"""Parser of torchrun's table of failed processes (``ChildFailedError``), one entry each.

Format: ``ChildFailedError.format_msg`` in torch/distributed/elastic/multiprocessing/errors; before torch 1.10 with
fields such as ``rank: 0 (local_rank: 0)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from doctor.postmortem.logs.prefixes import LineOrigin

CUES = ("Failures:", "Root Cause")
"""Texts in every such table."""
FRAGMENT = "(local_rank: "
"""Text of the line with the rank in an entry, with which a copied part of a table may begin."""
MOST_TABLES = 256
"""Maximum number of tables of different processes that are read at the same time."""
PATIENCE = 400
"""Maximum number of lines of other processes between two lines of one table."""
MOST_MESSAGE = 2000
"""Maximum characters of the message of an entry."""
TAG = "elastic"
"""Tag of origins that are taken from a table."""

_FIELD = re.compile(r"\s*(time|host|rank|exitcode|error_file|traceback|msg) *: ?(.*)$", re.DOTALL)
_NUMBER = re.compile(r"\s*\[(\d{1,9})\]:\s*$")
_BORDER = re.compile(r"\s*(?:=|\*){20,}\s*$")
_RULE = re.compile(r"\s*-{20,}\s*$")
_RANK = re.compile(r"(\d{1,7}) \(local_rank: (\d{1,7})\)")
_FRAGMENT = re.compile(r"\s*rank *: \d{1,7} \(local_rank: \d{1,7}\)\s*$")
_FLAT = re.compile(
    r"(?:\bhost {0,20}: (?P<host>\S{1,255}) {1,20})?\brank {0,20}: (?P<rank>\d{1,7}) \(local_rank: "
    r"(?P<local_rank>\d{1,7})\) {1,20}exitcode {0,20}: (?P<exitcode>-?\d{1,9}) \(pid: (?P<pid>\d{1,9})\)"
)
"""An entry whose lines a log collector joined."""
_NO_TRACEBACK = "To enable traceback see: "
"""Begins what an entry has in place of a traceback if the script does not record it."""
_CODE = re.compile(r"(-?\d{1,9}) \(pid: (\d{1,9})\)")

Entry = dict[str, str]
Note = Callable[[LineOrigin, Entry, int], None]
"""Called with an entry: the process that printed it; its fields ``rank``, ``local_rank``, ``host``, ``exitcode``,
``pid``, ``time``, ``root`` (yes or no), ``error_file`` and ``message``; the line of its exit code."""


@dataclass(slots=True)
class _ElasticTable:
    root: bool = False
    line: int = 0
    last: str = ""
    entry: Entry = field(default_factory=dict)


class ElasticTables:
    """Parses the tables of all processes in a log."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._open: dict[LineOrigin, _ElasticTable] = {}
        self._patience = 0

    @property
    def waiting(self) -> Collection[LineOrigin]:
        """The processes whose next lines must be read, whatever they contain."""
        return self._open.keys()

    def read(self, origin: LineOrigin, body: str, line: int) -> tuple[LineOrigin, str] | None:
        """Process a line; for one in the traceback of an entry, return its process and the line as it wrote it."""
        if body.startswith(CUES):
            self._begin(origin, body)
            return None
        if FRAGMENT in body and (flat := _FLAT.search(body)):
            self._note(origin, {**{k: v for k, v in flat.groupdict().items() if v}, "root": "no"}, line)
            return None
        table = self._open.get(origin)
        if table is None and _FRAGMENT.match(body):
            self._begin(origin, body)
            table = self._open.get(origin)
        if table is None:
            self.pass_over()
            return None
        self._patience = 0
        return self._read(origin, table, body, line)

    def process_of(self, origin: LineOrigin) -> LineOrigin | None:
        """Return the process of the entry that is being printed, if it was named."""
        table = self._open.get(origin)
        return self._of(table) if table is not None and "rank" in table.entry else None

    def close(self) -> None:
        """Report the open entries when the log ends."""
        for origin, table in self._open.items():
            self._flush(origin, table)
        self._open.clear()

    def pass_over(self) -> None:
        """Count a line of another process; close tables without a new line for too long."""
        self._patience += 1
        if self._patience > PATIENCE:
            self.close()

    def _begin(self, origin: LineOrigin, body: str) -> None:
        if table := self._open.get(origin):
            self._flush(origin, table)
        elif len(self._open) >= MOST_TABLES:
            return
        table = self._open.setdefault(origin, _ElasticTable())
        table.root = body.startswith("Root Cause")
        self._patience = 0

    def _read(self, origin: LineOrigin, table: _ElasticTable, body: str, line: int) -> tuple[LineOrigin, str] | None:
        if _BORDER.match(body):
            self._flush(origin, table)
            del self._open[origin]
            return None
        if _NUMBER.match(body) or _RULE.match(body):
            self._flush(origin, table)
            return None
        field = _FIELD.match(body)
        if field and not (table.last == "traceback" and field[1] not in ("time", "msg")):
            return self._field(table, field, line)
        if table.last != "traceback":
            return None
        if body.strip() and not body.startswith("   "):
            table.entry["message"] = body.strip()[:MOST_MESSAGE]  # the last line of a traceback is the reason
        return self._of(table), body.removeprefix("  ")

    def _field(self, table: _ElasticTable, field: re.Match[str], line: int) -> tuple[LineOrigin, str] | None:
        name, value = field[1], field[2].strip()
        table.last = "traceback" if name == "msg" else name
        if name == "rank" and (found := _RANK.match(value)):
            table.entry.update(rank=found[1], local_rank=found[2])
            table.line = table.line or line
        elif name == "exitcode" and (found := _CODE.match(value)):
            table.entry.update(exitcode=found[1], pid=found[2])
            table.line = line
        elif name in ("time", "host", "error_file"):
            table.entry[name] = value
        elif table.last == "traceback" and not value.startswith(_NO_TRACEBACK):
            table.entry["message"] = value.strip('"')
            return (self._of(table), value) if "Traceback" in value else None
        return None

    @staticmethod
    def _of(table: _ElasticTable) -> LineOrigin:
        entry = table.entry
        rank, local_rank, pid = (int(entry[name]) if name in entry else None for name in ("rank", "local_rank", "pid"))
        return LineOrigin(rank, local_rank, entry.get("host"), pid, None, TAG)

    def _flush(self, origin: LineOrigin, table: _ElasticTable) -> None:
        if "exitcode" in table.entry:
            self._note(origin, {**table.entry, "root": "yes" if table.root else "no"}, table.line)
        table.entry, table.line, table.last = {}, 0, ""

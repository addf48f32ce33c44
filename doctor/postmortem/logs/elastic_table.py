"""The table of failed processes that torchrun prints (``ChildFailedError``): one entry a process.

See ``ChildFailedError.format_msg`` in torch/distributed/elastic/multiprocessing/errors; before torch 1.10 fields were
written ``rank: 0 (local_rank: 0)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from doctor.postmortem.logs.prefixes import LineOrigin

CUES = (
    "Failures:",
    "Root Cause",
)
"""Texts that stand in every such table."""
MOST_TABLES = 256
"""Tables of different processes that are read at the same time."""
PATIENCE = 400
"""Lines of others that come between two lines of one table."""
MOST_MESSAGE = 2000
"""Characters of what an entry says."""
TAG = "elastic"
"""Marks what a table says of a process."""

_FIELD = re.compile(r"\s*(time|host|rank|exitcode|error_file|traceback|msg) *: ?(.*)$", re.DOTALL)
_NUMBER = re.compile(r"\s*\[(\d{1,9})\]:\s*$")
_BORDER = re.compile(r"\s*(?:=|\*){20,}\s*$")
_RULE = re.compile(r"\s*-{20,}\s*$")
_RANK = re.compile(r"(\d{1,7}) \(local_rank: (\d{1,7})\)")
_CODE = re.compile(r"(-?\d{1,9}) \(pid: (\d{1,9})\)")

Entry = dict[str, str]
Note = Callable[[LineOrigin, Entry, int], None]
"""Takes an entry: who printed it; ``rank``, ``local_rank``, ``host``, ``exitcode``, ``pid``, ``time``, ``root`` (yes or
no), ``error_file``, ``message``; line of its exit code."""


class _ElasticTable:
    __slots__ = ("entry", "last", "line", "root")

    def __init__(self) -> None:
        self.root = False
        self.line = 0
        self.last = ""
        self.entry: Entry = {}


class ElasticTables:
    """Follows the tables of all processes that write a log."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._open: dict[LineOrigin, _ElasticTable] = {}
        self._patience = 0

    @property
    def waiting(self) -> Collection[LineOrigin]:
        """Whose next lines matter whatever stands in them."""
        return self._open.keys()

    def read(self, speaker: LineOrigin, body: str, line: int) -> tuple[LineOrigin, str] | None:
        """Take a line; where it belongs to the traceback of an entry, the process of that entry and the line as that
        process wrote it."""
        if body.startswith(("Failures:", "Root Cause")):
            self._begin(speaker, body)
            return None
        table = self._open.get(speaker)
        if table is None:
            self.pass_over()
            return None
        self._patience = 0
        return self._read(speaker, table, body, line)

    def process_of(self, speaker: LineOrigin) -> LineOrigin | None:
        """The process of the entry that is being printed, as far as it was named."""
        table = self._open.get(speaker)
        return self._of(table) if table is not None and "rank" in table.entry else None

    def close(self) -> None:
        """Note what is left when the log ends."""
        for speaker, table in self._open.items():
            self._flush(speaker, table)
        self._open.clear()

    def pass_over(self) -> None:
        """A line of another process came. Tables that nothing was added to for too long are closed."""
        self._patience += 1
        if self._patience > PATIENCE:
            self.close()

    def _begin(self, speaker: LineOrigin, body: str) -> None:
        if table := self._open.get(speaker):
            self._flush(speaker, table)
        elif len(self._open) >= MOST_TABLES:
            return
        table = self._open.setdefault(speaker, _ElasticTable())
        table.root = body.startswith("Root Cause")
        self._patience = 0

    def _read(self, speaker: LineOrigin, table: _ElasticTable, body: str, line: int) -> tuple[LineOrigin, str] | None:
        if _BORDER.match(body):
            self._flush(speaker, table)
            del self._open[speaker]
            return None
        if _NUMBER.match(body) or _RULE.match(body):
            self._flush(speaker, table)
            return None
        field = _FIELD.match(body)
        if field and not (table.last == "traceback" and field[1] not in ("time", "msg")):
            return self._field(table, field, line)
        return self._more(table, body)

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
        elif table.last == "traceback":
            table.entry["message"] = value.strip('"')
            return (self._of(table), value) if "Traceback" in value else None
        return None

    def _more(self, table: _ElasticTable, body: str) -> tuple[LineOrigin, str] | None:
        """A line of the traceback of an entry: its last line says why."""
        if table.last != "traceback":
            return None
        if body.strip() and not body.startswith("   "):
            table.entry["message"] = body.strip()[:MOST_MESSAGE]
        return self._of(table), body.removeprefix("  ")

    @staticmethod
    def _of(table: _ElasticTable) -> LineOrigin:
        entry = table.entry
        rank, local_rank, pid = (int(entry[name]) if name in entry else None for name in ("rank", "local_rank", "pid"))
        return LineOrigin(rank, local_rank, entry.get("host"), pid, None, TAG)

    def _flush(self, speaker: LineOrigin, table: _ElasticTable) -> None:
        if "exitcode" in table.entry:
            self._note(speaker, {**table.entry, "root": "yes" if table.root else "no"}, table.line)
        table.entry, table.line, table.last = {}, 0, ""

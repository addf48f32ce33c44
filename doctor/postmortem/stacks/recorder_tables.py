"""The tables of torch's debug server about the flight recorders of all ranks (``fr_trace_*.txt``).

torch/distributed/debug/_debug_handlers.py writes them by ``tabulate`` in the format ``plain``, from the fields of
torch/distributed/flight_recorder/components/types.py: a row for each collective, with the ranks that were expected in
it and those that did not enter it. Columns are separated by two spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from doctor.core.facts import Collective, ProcessGroup, RecorderFacts
from doctor.core.masking import mask_text
from doctor.core.stack_dumps.recorder_dump import operation_of

VERSION = "fr_trace"
"""Version of the facts: the tables show none."""
MOST_ROWS = 20_000
MOST_RANKS = 1 << 17
LONGEST = 200
"""Characters of a name that are kept."""
_TITLE = re.compile(r"=== (?:TorchComms )?FR Trace ===$", re.MULTILINE)
_SECTION = re.compile(r"--- (?P<name>[A-Za-z ]{1,40}) ---$")
_CELL = re.compile(r"\S+(?: \S+)*")
_NUMBER = re.compile(r"\d{1,18}")
_HEADER_LINES = 200
"""Lines within which the title is expected: ranks that did not answer are listed before it."""

Row = Mapping[str, str]


def looks_like_recorder_tables(head: str) -> bool:
    """Return whether a text with this beginning is a file of these tables."""
    first = "\n".join(head.splitlines()[:_HEADER_LINES])
    return bool(_TITLE.search(first)) and "--- Groups ---" in first


def read_recorder_tables(text: str) -> dict[int, RecorderFacts]:
    """Return the collectives that each rank has entered. Other text has none."""
    calls: dict[int, list[Collective]] = {}
    groups: dict[int, dict[str, ProcessGroup]] = {}
    for row in _rows(_section(text, "Collectives")):
        members, missing = _ranks(row.get("expected_ranks", "")), _ranks(row.get("missing_ranks", ""))
        call = _collective(row)
        if call is None:
            continue
        group = ProcessGroup(call.group, _description(row), members=tuple(sorted(members)))
        for rank in members:
            groups.setdefault(rank, {}).setdefault(call.group, group)
            if rank not in missing:
                calls.setdefault(rank, []).append(call)
    return {
        rank: RecorderFacts(version=VERSION, groups=tuple(own.values()), collectives=tuple(calls.get(rank, ())))
        for rank, own in groups.items()
    }


def _section(text: str, name: str) -> list[str]:
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if title := _SECTION.match(line):
            if inside:
                break
            inside = title["name"] == name
        elif inside and line.strip() and len(found) <= MOST_ROWS:
            if line.startswith("==="):
                break
            found.append(line)
    return found


def _rows(lines: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table; a column is where any row has text."""
    cells = [[(found.start(), found.end(), found[0]) for found in _CELL.finditer(line)] for line in lines]
    columns: list[list[int]] = []
    for start, end in sorted({(start, end) for row in cells for start, end, _ in row}):
        if columns and start <= columns[-1][1]:
            columns[-1][1] = max(columns[-1][1], end)
        else:
            columns.append([start, end])
    starts = [start for start, _ in columns]
    header, *rest = [_placed(row, starts) for row in cells] or [{}]
    for row in rest:
        yield {name: row.get(place, "") for place, name in header.items()}


def _placed(row: Sequence[tuple[int, int, str]], starts: Sequence[int]) -> dict[int, str]:
    placed: dict[int, str] = {}
    place = 0
    for start, _, text in row:
        while place + 1 < len(starts) and starts[place + 1] <= start:
            place += 1
        placed[place] = text
    return placed


def _collective(row: Row) -> Collective | None:
    name = row.get("collective_name", "")[:LONGEST]
    backend, operation, pair = operation_of(name)
    sequence = _number(row.get("p2p_seq_id" if pair else "collective_seq_id", ""))
    if not name or sequence is None:
        return None
    return Collective(
        mask_text(row.get("group_id", "")[:LONGEST]),
        sequence,
        mask_text(operation),
        backend=mask_text(backend),
        is_p2p=pair is not None,
        source=pair[0] if pair else None,
        peer=pair[1] if pair else None,
        state=row.get("collective_state", "")[:LONGEST] or "scheduled",
    )


def _description(row: Row) -> str:
    """``TENSOR_MODEL_PARALLEL_GROUP`` of ``42:TENSOR_MODEL_PARALLEL_GROUP``."""
    return mask_text(row.get("pg_desc", "")[:LONGEST].partition(":")[2])


def _ranks(cell: str) -> frozenset[int]:
    """The ranks in ``{0, 8, 4}``."""
    found = (int(number) for number in _NUMBER.findall(cell[: 8 * MOST_RANKS]))
    return frozenset(rank for rank in found if rank < MOST_RANKS) if cell.startswith("{") else frozenset()


def _number(cell: str) -> int | None:
    return int(cell) if _NUMBER.fullmatch(cell) else None

"""Parser of findings printed into a log by :func:`doctor.report.finding_lines.draw_findings`.

The lines of such a block are not messages themselves. A block can only add a finding: no line of a log can make a
report healthier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from doctor.postmortem.logs.event_store import StoredEvent
from doctor.postmortem.logs.prefixes import LineOrigin, PrefixedLine

KIND = "doctor.finding"
CUES = ("error   ", "warning ")
"""The first line of every block contains one of these: the columns are as wide as the longest word."""
LONGEST = 120
"""Maximum number of lines of a block."""
MOST_ORIGINS = 64

# A terminal without UTF-8 prints another symbol, or none.
_HEAD = re.compile(
    r"\s*\S{0,3}\s?\b(?P<severity>error|warning)\s+(?P<id>[A-Z]{2,8}\d{3}) (?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)\s*$"
)
_LABEL = re.compile(r"\s+(?P<label>where|source|evidence|ignored|because|effect|fix|more)\s+(?P<text>\S.*)")
_RANKS = re.compile(r"ranks? (?P<ranks>\d[\d,-]{0,200})")


Note = Callable[[PrefixedLine, int, dict[str, str]], StoredEvent]
"""Called with a finding: its first line, the number of that line, and the fields in it. Later lines are added to the
stored event."""


@dataclass(slots=True)
class _OpenFindingBlock:
    event: StoredEvent
    labelled: bool = False
    left: int = LONGEST


class OwnFindings:
    """Parses the blocks of all processes in a log."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._open: dict[LineOrigin, _OpenFindingBlock] = {}

    @property
    def waiting(self) -> Collection[LineOrigin]:
        """The processes whose next lines must be read, whatever they contain."""
        return self._open.keys()

    def read(self, parsed: PrefixedLine, number: int) -> bool:
        """Process a line; return whether it is part of a block."""
        head = _HEAD.match(parsed.text)
        if head:
            if len(self._open) < MOST_ORIGINS:
                self._open[parsed.origin] = _OpenFindingBlock(self._note(parsed, number, head.groupdict()))
            return True
        block = self._open.get(parsed.origin)
        if block is None:
            # A line of another process: blocks without a new line for too long end.
            for origin, other in list(self._open.items()):
                other.left -= 1
                if other.left <= 0:
                    del self._open[origin]
            return False
        block.left -= 1
        if not parsed.text[:1].isspace() or block.left <= 0:
            del self._open[parsed.origin]
            return False
        values = block.event.values
        if (label := _LABEL.match(parsed.text)) is None:
            if not block.labelled:
                values["summary"] = f"{values.get('summary', '')} {parsed.text.strip()}".strip()[:1000]
            return True
        block.labelled = True
        if label["label"] == "where" and (found := _RANKS.match(label["text"])):
            values["ranks"] = found["ranks"]
        return True

"""Findings that the callback, or a preflight check, printed into a log: read back from the blocks of
:func:`doctor.report.terminal.draw_findings`.

What stands in such a block was judged already, so none of its lines is a message by itself. A block can only add a
finding: nothing that a log claims about the doctor makes a report healthier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Protocol

from doctor.postmortem.logs.prefixes import LineOrigin, PrefixedLine

KIND = "doctor.finding"
CUES = ("error   ", "warning ")
"""Texts of which one stands in each first line of a block: the columns are as wide as the longest word."""
LONGEST = 120
"""Lines of one block."""
MOST_SPEAKERS = 64

# A terminal without UTF-8 prints another mark, or none.
_HEAD = re.compile(
    r"\s*\S{0,3}\s?\b(?P<severity>error|warning)\s+(?P<id>[A-Z]{2,8}\d{3}) (?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)\s*$"
)
_LABEL = re.compile(r"\s+(?P<label>where|source|evidence|ignored|because|effect|fix|more)\s+(?P<text>\S.*)")
_RANKS = re.compile(r"ranks? (?P<ranks>\d[\d,-]{0,200})")


class FindingBlock(Protocol):
    """A finding that was noted; what the lines after its first one tell is added."""

    values: dict[str, str]


Note = Callable[[PrefixedLine, int, dict[str, str]], FindingBlock]
"""Takes a finding down: who printed it, in which line, and what it names."""


class _OpenFindingBlock:
    """A block whose lines come."""

    __slots__ = ("block", "labelled", "left")

    def __init__(self, block: FindingBlock) -> None:
        self.block = block
        self.labelled = False
        self.left = LONGEST


class OwnFindings:
    """Follows the blocks of all processes that write a log."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._open: dict[LineOrigin, _OpenFindingBlock] = {}

    @property
    def waiting(self) -> Collection[LineOrigin]:
        """Whose next lines matter whatever stands in them."""
        return self._open.keys()

    def read(self, said: PrefixedLine, number: int) -> bool:
        """Take a line; whether it is part of a block."""
        head = _HEAD.match(said.text)
        if head:
            if len(self._open) < MOST_SPEAKERS:
                self._open[said.speaker] = _OpenFindingBlock(self._note(said, number, head.groupdict()))
            return True
        block = self._open.get(said.speaker)
        if block is None:
            self._pass_over()
            return False
        block.left -= 1
        if not said.text[:1].isspace() or block.left <= 0:
            del self._open[said.speaker]
            return False
        self._inside(block, said.text)
        return True

    def _inside(self, block: _OpenFindingBlock, text: str) -> None:
        values = block.block.values
        label = _LABEL.match(text)
        if label is None:
            if not block.labelled:
                values["summary"] = f"{values.get('summary', '')} {text.strip()}".strip()[:1000]
            return
        block.labelled = True
        if label["label"] == "where" and (found := _RANKS.match(label["text"])):
            values["ranks"] = found["ranks"]

    def _pass_over(self) -> None:
        """A line of another process came. Nobody is waited for without end."""
        for speaker, block in list(self._open.items()):
            block.left -= 1
            if block.left <= 0:
                del self._open[speaker]

"""Removal of lists of possible causes printed with an error, which were not observed.

Ray, for example, ends the report of every lost worker with "There are some potential root causes. (1) The process is
killed by SIGKILL by OOM killer due to high memory usage. (2) …", whatever happened.
"""

from __future__ import annotations

import re

CUES = ("otential", "ossible ", "robable ", "ommon ", "ikely ", "ollowing ")
"""Every line that begins such a list contains one of these."""
MOST_LINES = 12
"""Maximum number of lines of a list below its heading."""

_HEADING = re.compile(
    r"(?i)\b(?:(?:(?:there are )?(?:some |several |the )?"
    r"(?:potential|possible|probable|common|likely|most likely) (?:root )?"
    r"|(?:may|might|could|can) be (?:caused by|due to) (?:one of )?the following )"
    r"(?:causes?|reasons?|culprits?|explanations?|issues?|problems?))\b(?:[^.:\n]{0,60})"
    r"(?:[.:](?=\s|$)|$|(?=\s{0,9}\(?1[).]))"
)
_ENTRY = re.compile(r"\s*(?:\|\s*)?(?:\(?[0-9a-z][).]|[-*•])\s")


class Possibilities:
    """Removes lists of possible causes from the lines of one log."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._left = 0

    def without(self, line: str, number: int) -> str:
        """Return the line up to such a list; ``""`` for an entry of one."""
        if self._last is not None and number != self._last:
            if self._left > 0 and number - self._last <= MOST_LINES and _ENTRY.match(line):
                self._last, self._left = number, self._left - 1
                return ""
            self._last = None
        heading = _HEADING.search(line) if any(cue in line for cue in CUES) else None
        if heading is None:
            return line
        rest = line[heading.end() :].strip()
        if rest and not _ENTRY.match(rest + " "):
            return line
        self._last, self._left = number, MOST_LINES
        return line[: heading.start()].rstrip()

"""Lines that show a bug to readers of a page."""

from __future__ import annotations

import re
from pathlib import PurePath

from doctor.lint.python.script import Script

_SAYS_BUG = re.compile(r"#\s*(?i:intentional |deliberate )?BUG\b")
_SHOWS_BUGS = re.compile(
    r"\b(?:buggy|broken|faulty|wrong) (?:script|program|example|code|version)\b|"
    r"\b(?:demonstrat|reproduc|illustrat|show)\w*\b[^.\n]{0,60}\b(?:bug|hang|deadlock|mistake|fault)",
    re.IGNORECASE,
)


def shows_bug(script: Script, line: int) -> bool:
    """Whether a comment on a line calls it a bug, and a page of the project presents the file as one with a bug: a
    comment alone may be of an author who has not repaired it yet."""
    lines = script.text.splitlines()
    if script.modules is None or not 0 < line <= len(lines) or _SAYS_BUG.search(lines[line - 1]) is None:
        return False
    name = PurePath(script.path).name
    told = (one for text in script.modules.pages(script.location) if name in text for one in text.splitlines())
    return any(name in one and _SHOWS_BUGS.search(one) is not None for one in told)

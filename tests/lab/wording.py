"""Whether a finding is worded by the rules for findings: a short summary, and one sentence or commands as its fix."""

from __future__ import annotations

import re

from doctor.report.formatting import fix_parts

LONGEST = 100
"""Characters of a summary, with each word counted as at most :data:`WORD`: paths and names of users may be long."""
LONGEST_WITH_CODE = 110
"""The same for a summary that quotes code."""
WORD = 16

_VALUES = re.compile(r"(?<=: expected ).* found .*|\(elsewhere [^)]*\)")
"""Values that are compared, of which there may be several."""
_CODE = re.compile(r"`[^`]*`")
_SENTENCES = re.compile(r"[a-z)\d`][.!?] +(?=[A-Z`])")
_CALQUE = re.compile(r"\b(?:is|are|was|were) no (?!longer|more)")


def fault_of_summary(summary: str, longest: int = LONGEST) -> str:
    """What is wrong with a summary; empty if nothing is."""
    if "\n" in summary or (summary.endswith(".") and not summary.endswith("..")):
        return "a summary is one line without a full stop"
    if _CALQUE.search(_CODE.sub("", summary)):
        return "write 'is not a'"
    length = sum(min(len(word), WORD) + 1 for word in _VALUES.sub("", summary).split(" ")) - 1
    return f"{length} characters: move details to the evidence" if length > longest else ""


def fault_of_prose(fix: str) -> str:
    """What is wrong with the prose of a fix; empty if nothing is."""
    prose = _CODE.sub("`x`", fix_parts(fix)[0])
    if _SENTENCES.search(prose):
        return "a fix is commands or one sentence"
    return "write 'is not a'" if _CALQUE.search(prose) else ""

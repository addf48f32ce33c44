"""Index of the cues of relevant lines: of known messages, tracebacks and tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.knowledge.linear_regex import Pattern, linear
from doctor.knowledge.log_patterns import known_patterns
from doctor.postmortem.logs import elastic_table, printed_findings, rank_attribution, tracebacks
from doctor.postmortem.logs.event_store import NEWEST
from doctor.postmortem.logs.multi_match import CueMatcher
from doctor.postmortem.logs.outcome_marks import cue_budget
from doctor.postmortem.logs.software_messages import line_components

SUPERSEDED = frozenset({"py.exc", "elastic.child_failed"})
"""Kinds for which the parsers of tracebacks and tables create better events."""


class IndexedPattern(NamedTuple):
    """A known message. ``loose``: matches a superset of its lines with prefixes, or ``None``."""

    kind: str
    pattern: Pattern
    loose: Pattern | None

    def may_be(self, line: str) -> bool:
        """Return whether a line with its prefixes may match. In JSON, quotation marks are escaped."""
        return self.loose is None or "\\" in line or self.loose.search(line) is not None


class PatternIndex(NamedTuple):
    """The cues to search for, and messages by the number of their cue.

    The other fields hold numbers of cues. ``structure``: of tracebacks, tables and findings; ``alone``: those of them
    that are no part of an exception's name; ``types``: parts of exception names; ``bars``: of progress bars; ``marks``:
    only of marks; ``may_mark``: of marks and possibly others; ``software``: of lines of components whose messages are
    known from their source code; ``declared``: the kinds that declare the check which reports them.
    """

    cues: CueMatcher
    messages: tuple[tuple[IndexedPattern, ...], ...]
    structure: frozenset[int]
    alone: frozenset[int]
    types: frozenset[int]
    bars: frozenset[int]
    marks: frozenset[int]
    may_mark: frozenset[int]
    software: frozenset[int]
    declared: frozenset[str]

    def hits(self, block: bytes, cues: CueMatcher) -> Iterator[tuple[int, int]]:
        """Yield the numbers and offsets of the cues in a block, ordered by their ends.

        Cues in ``types`` count only within the name of an exception. ``cues``: those of the index, or fewer.
        """
        types = self.types
        for cue, start, end in cues.find(block):
            if cue in types and not (_PART_OF_NAME[block[start - 1]] and block[end : end + 1] in _AFTER_NAME):
                continue
            yield cue, start


_TYPES = ("Error", "Exception")
_PART_OF_NAME = bytes(chr(code).isalnum() or chr(code) == "_" for code in range(128)) + bytes(128)
_AFTER_NAME = (b"", b":", b"\n", b"\r", b'"', b"'", b"\\", b"G", b" ")
"""Names of exceptions are in camel case and nearly always end in these; a colon or the end of the line follows."""


@functools.cache
def index() -> PatternIndex:
    """Return the index, which is built once."""
    by_cue: dict[str, list[IndexedPattern]] = {}
    for message in known_patterns():
        if message.kind not in SUPERSEDED:
            known = IndexedPattern(message.kind, message.compiled, _loose(message.pattern))
            for cue in message.cues:
                for text in {cue, cue.replace('"', '\\"')}:
                    by_cue.setdefault(text, []).append(known)
    software = tuple(line_components())
    others = {*by_cue, *software}
    structure = (
        *tracebacks.CUES,
        *elastic_table.CUES,
        elastic_table.FRAGMENT,
        *rank_attribution.CUES,
        *printed_findings.CUES,
    )
    cues = CueMatcher([*by_cue, *structure, *cue_budget.CUES, *software])
    number = {text: position for position, text in enumerate(cues.texts)}
    return PatternIndex(
        cues,
        tuple(tuple(by_cue.get(text, ())) for text in cues.texts),
        frozenset(number[text] for text in structure),
        frozenset(number[text] for text in structure if text not in _TYPES),
        frozenset(number[text] for text in _TYPES if text not in by_cue),
        frozenset(number[text] for text, patterns in by_cue.items() if {one.kind for one in patterns} <= NEWEST),
        frozenset(number[text] for text in cue_budget.CUES if text not in others and text not in structure),
        frozenset(number[text] for text in cue_budget.CUES),
        frozenset(number[text] for text in software),
        frozenset(message.kind for message in known_patterns() if message.check),
    )


def _loose(pattern: str) -> Pattern | None:
    """Return the pattern for lines with prefixes, where anchors of the message do not hold."""
    pattern = pattern.removeprefix("^")
    if re.search(r"(?<!\[)(?<!\\)\^|\\A|\(\?<", pattern.replace("(?P<", "(")):
        return None
    try:
        return linear(pattern)
    except re.error:
        return None

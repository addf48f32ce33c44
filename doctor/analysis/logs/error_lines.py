"""Lines that look like errors and that no finding explains, and the orderly ends that contradict them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from doctor.analysis.logs.root_event import (
    CRASH,
    EXCEPTION,
    LOST_PEERS,
    ROOTS,
    TIMED_OUT,
    LaterEvents,
    nature_of_exception,
)
from doctor.core.facts import Event, LogEvidence

Place = tuple[str, int]
"""File and line."""

STEP, END, ERROR, NAN = "mark.step", "mark.end", "mark.error", "mark.nan"
"""Kinds of marks: the last step of a process, an orderly end, a line like an error, a loss that is not finite."""
CONTINUED_LINES = 10
"""Lines after an error from which on a training step shows that the run continued: ranks that lost one log a few."""
_TROUBLE = frozenset({*ROOTS, *TIMED_OUT, *LOST_PEERS})
_STEMS = tuple(kind for kind in _TROUBLE if kind.endswith("."))


def unexplained_lines(evidence: LogEvidence, quoted: Collection[Place]) -> list[Event]:
    """Lines that look like errors, by file and line, without what a line of ``quoted`` says: findings quote only a few
    lines of a kind."""
    places = set(quoted)
    said = {_what(one) for one in evidence.events if (one.file, one.line) in places}
    places |= {(one.file, one.line) for one in evidence.events if _what(one) in said}
    later = LaterEvents(evidence)
    found: dict[Place, Event] = {}
    for one in (*(one for one in evidence.events if _is_trouble(one, later)), *evidence.marks):
        if one.kind not in (STEP, END) and (one.file, one.line) not in places:
            found.setdefault((one.file, one.line), one)
    order = {file.path: number for number, file in enumerate(evidence.files)}
    return sorted(found.values(), key=lambda one: (order.get(one.file, 0), one.line))


def _what(one: Event) -> tuple[str | None, ...]:
    """What an event says: its kind, and of messages of other software, which share kinds, the message."""
    if one.kind.startswith("software."):
        return one.kind, one.value("component"), one.value("message")
    return (one.kind,)


def _is_trouble(one: Event, later: LaterEvents) -> bool:
    if one.kind in (EXCEPTION, CRASH):
        return nature_of_exception(one) != "outside" and not later.outlived(one)
    return one.kind in _TROUBLE or one.kind.startswith(_STEMS)


def is_strong(error: Event) -> bool:
    """Whether a line is an error by its level or form, and not only by a word such as "failed"."""
    return error.kind != ERROR or error.value("strong") is not None


def errors_in(evidence: LogEvidence, lines: Iterable[Event]) -> list[Event]:
    """Those of the unexplained lines that are errors, by time, without those that the run survived.

    A known message that is a failure in some contexts only ("Detected 0 oom_kill events") has to look like an error."""
    strong = {(one.file, one.line) for one in evidence.marks if is_strong(one)}
    certain = (EXCEPTION, CRASH, *TIMED_OUT, *LOST_PEERS)
    found = (one for one in lines if one.kind in certain or (one.file, one.line) in strong)
    later = LaterEvents(evidence)
    return _in_time(
        evidence, (one for one in found if not (later.preceded_restart(one) or has_continued(evidence, one)))
    )


def ends(evidence: LogEvidence) -> list[Event]:
    """All signs of an orderly end, in the order in which they happened."""
    marks = (one for one in evidence.marks if one.kind == END)
    return sorted((*evidence.of("run.ended_well"), *marks), key=lambda one: (one.at or 0.0, one.line))


def orderly_ends(evidence: LogEvidence, errors: Iterable[Event]) -> list[Event]:
    """The orderly ends that no error contradicts."""
    found = ends(evidence)
    ended = {one.file for one in found}
    strong = [one for one in errors if is_strong(one)]
    return [one for one in found if not _is_contradicted(one, strong, ended)]


def _is_contradicted(end: Event, errors: Iterable[Event], ended: Collection[str]) -> bool:
    """Whether an error came later: in the same file, or in one without an end and not certainly before it."""
    for error in errors:
        if error.file == end.file:
            if error.line > end.line:
                return True
        elif error.file not in ended and (error.at is None or end.at is None or error.at >= end.at):
            return True
    return False


def has_continued(evidence: LogEvidence, error: Event) -> bool:
    """Whether the process of an error, or its log if the process is unknown, trained on after it."""
    steps = (one for one in evidence.marks if one.kind == STEP and one.file == error.file)
    return any(
        one.line - error.line >= CONTINUED_LINES and (one.rank is None or error.rank is None or one.rank == error.rank)
        for one in steps
    )


def _in_time(evidence: LogEvidence, lines: Iterable[Event]) -> list[Event]:
    """The lines by time; one without a timestamp happened after the line before it in its file."""
    order = {file.path: number for number, file in enumerate(evidence.files)}
    last: dict[str, float] = {file.path: file.first_at or 0.0 for file in evidence.files}
    keyed = []
    for one in sorted(lines, key=lambda one: (order.get(one.file, 0), one.line)):
        at = last[one.file] = one.at if one.at is not None else last.get(one.file, 0.0)
        keyed.append((at, order.get(one.file, 0), one.line, one))
    return [one for *_, one in sorted(keyed, key=lambda key: key[:3])]

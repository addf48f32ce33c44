"""Lays out results and their findings in a terminal: summary, place, evidence, impact and fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from doctor.core.finding import Severity
from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.core.text import ranges
from doctor.report.evidence_text import evidence_lines
from doctor.report.formatting import (
    INLINE_CODE,
    explaining,
    fix_parts,
    place,
    printable,
    shortened,
    state_of,
)
from doctor.report.styled_text import (
    StyledLine,
    TerminalLook,
    beside,
    columns,
    escape_sequences,
    indented,
    wrapped,
)

NARROW = 72
"""Columns below which findings have a smaller indent."""

MOST_IDENTICAL = 3
"""Findings of one check that are shown in full; the others are counted, except with ``verbose``."""

_STATES = {
    "error": ("✗", "bold red"),
    "warning": ("!", "yellow"),
    "info": ("i", "cyan"),
    "pass": ("✓", "green"),
    "unknown": ("?", "magenta"),
    "skip": ("-", "dim"),
    "crashed": ("✗", "bold magenta"),
    "ignored": ("-", "dim"),
}
STATE_STYLES = {state: style for state, (_, style) in _STATES.items()}
_STATE = 10
"""Columns of the mark and the state before a result."""
_LABEL = 9
"""Columns of the labels of a finding, with the blank after them."""
_BLANK, _BEGIN, _END = "\ue000", "\ue001", "\ue002"
"""Private-use characters for a blank within code, and for the start and end of code, while lines are wrapped."""


class FindingStyle(msgspec.Struct, frozen=True):
    """How the findings of ``report`` are laid out. ``verbose``: all of them, with all evidence."""

    report: Report
    verbose: bool
    width: int

    @property
    def indent(self) -> int:
        """Return the columns before the text of a finding."""
        return 10 if self.width >= NARROW else 2


def draw_findings(report: Report, look: TerminalLook) -> str:
    """Return only the findings of ``report``, in full, as ``look`` shows them."""
    report = printable(report)
    style = FindingStyle(report, verbose=True, width=look.width)
    lines = (line for result in report.results if result.findings for line in result_lines(result, style))
    return "".join(f"{escape_sequences(line, look)}\n" for line in lines)


def result_lines(result: CheckResult, style: FindingStyle) -> Iterator[StyledLine]:
    """Yield the state of a check, and its findings."""
    line = [(result.id, "bold"), (f" {result.name}", "")]
    if result.reason and not result.findings:
        line.append((f": {result.reason}", "dim"))
    yield from state_row(state_of(result), line, style.width)
    shown = result.findings if style.verbose else result.findings[:MOST_IDENTICAL]
    for finding in shown:
        yield from _finding(result, finding, style)
        yield []
    if rest := result.findings[len(shown) :]:
        ranks = ranges(rank for finding in rest for rank in finding.ranks)
        more = f"and {len(rest)} more findings of this check{ranks and ', ranks '}{ranks} (--verbose shows all)"
        yield from _padded([(more, "dim")], style)
        yield []
    if result.crash is not None:
        crash = f" {result.name}: then it failed to run: {result.crash}"
        yield from state_row("crashed", [(result.id, "bold"), (crash, "")], style.width)


def state_row(state: str, line: StyledLine, width: int) -> Iterator[StyledLine]:
    """Yield a line next to the mark and the name of a state."""
    mark, style = _STATES[state]
    yield from beside([(f"{mark} {state}", style)], _STATE, line, width)


def _finding(result: CheckResult, finding: ReportFinding, style: FindingStyle) -> Iterator[StyledLine]:
    yield from _padded(
        [(finding.summary, STATE_STYLES[finding.severity.value if finding.stands else "ignored"])], style
    )
    is_short = finding.severity is Severity.INFO or bool(finding.explained_by)
    for label, text in _parts(finding, style):
        if style.verbose or not is_short or label not in ("evidence", "impact"):
            rows = beside([(label, "dim")], _LABEL, text, style.width - style.indent)
            yield from indented(rows, style.indent)
    if finding.ignored is not None:
        return
    if finding.explained_by and not style.verbose:  # fixed by the fix of its cause
        return
    label = f"{' ' * style.indent}{'fix':{_LABEL}}"
    yield from fix_lines(finding.fix, label, style.indent + _LABEL, style.width)
    if finding.severity is not Severity.INFO:
        more = [(f"{' ' * style.indent}{'more':{_LABEL}}{explaining(result)}", "dim")]
        yield from wrapped(more, style.width)


def _padded(line: StyledLine, style: FindingStyle) -> Iterator[StyledLine]:
    return indented(wrapped(line, style.width - style.indent), style.indent)


def _parts(finding: ReportFinding, style: FindingStyle) -> Iterator[tuple[str, StyledLine]]:
    yield "where", [(place(finding, style.report), "")]
    if finding.source is not None:
        line = f":{finding.source.line}" if finding.source.line else ""
        yield "source", [(f"{finding.source.file}{line}", "")]
    if finding.evidence:
        lines = evidence_lines(finding.evidence, finding.ranks)
        yield "evidence", [("\n".join(lines if style.verbose else map(shortened, lines)), "")]
    if finding.ignored is not None:
        yield "ignored", [(f"{finding.ignored.reason} ({finding.ignored.by})", "")]
        return
    if finding.explained_by:
        yield "cause", [(f"caused by {finding.explained_by}", "")]
    if finding.effect:
        yield "impact", prose_spans(finding.effect)


def prose_spans(text: str) -> StyledLine:
    """Return a sentence with its commands in bold, without backticks, which a shell would interpret."""
    return [(part, "bold" if position % 2 else "") for position, part in enumerate(INLINE_CODE.split(text))]


def fix_lines(fix: str, label: str, indent: int, width: int) -> Iterator[StyledLine]:
    """Yield the prose of a fix, wrapped between words and never within a command, and its commands, one per line."""
    if not fix:  # of a plugin's check without a docstring
        return
    prose, below = fix_parts(fix)
    lines: Iterable[StyledLine] = [
        *_prose_lines(prose, max(width - indent, 1)),
        *([(command, "bold")] for command in below),
    ]
    for number, line in enumerate(lines):
        yield [(" " * indent if number else label, "dim"), *line]


def _prose_lines(prose: str, width: int) -> Iterator[StyledLine]:
    plain = re.sub(f"[{_BLANK}-{_END}]", "\ufffd", prose)
    marked = INLINE_CODE.sub(lambda match: f"{_BEGIN}{match[1].replace(' ', _BLANK)}{_END}", plain)
    lines: list[str] = []
    for word in marked.split():
        if lines and _marked_columns(lines[-1]) + 1 + _marked_columns(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return map(_unmarked, lines)


def _marked_columns(marked: str) -> int:
    return columns(marked.replace(_BEGIN, "").replace(_END, "").replace(_BLANK, " "))


def _unmarked(marked: str) -> StyledLine:
    """Return a line with its commands in bold, without backticks."""
    line: StyledLine = []
    for part in marked.replace(_BLANK, " ").split(_BEGIN):
        code, end, rest = part.partition(_END)
        line += [(code, "bold" if end else ""), (rest, "")]
    return line

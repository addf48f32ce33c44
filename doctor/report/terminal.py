"""Draws the report in a terminal: findings in full, all else folded; narrow or wide, with or without color."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import IO, TYPE_CHECKING, NamedTuple

from doctor.core.finding import Status
from doctor.core.report_document import CheckResult, LostTime, RankStacks, Report
from doctor.report.finding_lines import FindingStyle, fix_lines, prose_spans, result_lines, state_row
from doctor.report.formatting import (
    NO_FINDING,
    UNEXPLAINED,
    counts_line,
    coverage_line,
    families,
    job_words,
    printable,
    shortened,
    some,
    spelt_out,
    unclear_outcome,
    why_inconclusive,
)
from doctor.report.lost_time import TITLE, cause_rows, largest_lines, lost_headline, lost_notes
from doctor.report.narrative import (
    EvidenceOverview,
    LogQuote,
    confidence,
    evidence_overview_of,
    headline,
    narrative_of,
    quotes,
    shown_candidates,
    to_collect,
)
from doctor.report.rich_names import Console, Group, Padding, RenderableType, Rule, Table, Text
from doctor.report.stacks import (
    MOST_INDENT,
    MOST_ROWS,
    CallRow,
    call_rows,
    group_text,
    groups_title,
    ranks_text,
    skipped_text,
)
from doctor.report.styled_text import StyledLine, TerminalLook, columns_of, is_piped

if TYPE_CHECKING:
    from doctor.report.multi_run import JudgedRuns

_TRAILING = re.compile(r"(?<! )[ ]+(?=(\x1b\[0?m)?$)", re.MULTILINE)

_EMPTY = re.compile(r"\n{3,}")

_VERDICTS = {"pass": "Passed", "fail": "Failed", "inconclusive": "Inconclusive"}
VERDICT_COLORS = {"pass": "green", "fail": "red", "inconclusive": "magenta"}


def make_console(stream: IO[str], *, width: int | None = None) -> Console:
    """Return a console for ``stream``, without color if it is not a terminal or NO_COLOR is set."""
    piped = is_piped(stream)
    return Console(
        file=_DiscardingStream(stream),
        width=width or columns_of(stream),
        highlight=False,
        emoji=False,
        markup=False,
        no_color=piped or None,
        force_terminal=False if piped and stream.isatty() else None,
        # rich reads COLUMNS and LINES without limits.
        _environ={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
    )


def look_of_console(console: Console) -> TerminalLook:
    """Return how findings look next to what ``console`` shows."""
    styled = console.color_system is not None
    return TerminalLook(console.width, styled, styled and not console.no_color)


class _DiscardingStream(io.StringIO):
    """Discards what a console writes outside of a capture, with the properties of ``stream``: only the caller, who
    prints what was captured, meets a stream that is not writable."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()


class _TerminalStyle(NamedTuple):
    """What is drawn, and how."""

    report: Report
    verbose: bool
    quiet: bool
    width: int

    @property
    def findings(self) -> FindingStyle:
        return FindingStyle(self.report, self.verbose, self.width)


class _Unwrapped(NamedTuple):
    """A line that is never wrapped: a wrapped command can't be pasted."""

    text: Text


_Line = RenderableType | _Unwrapped


def _drawn(console: Console, lines: Iterable[_Line]) -> str:
    """Return the lines as ``console`` shows them, without trailing blanks and repeated empty lines."""
    with console.capture() as paper:
        for line in lines:
            if isinstance(line, _Unwrapped):
                console.print(line.text, soft_wrap=True)
            else:
                console.print(line)
    return _EMPTY.sub("\n\n", _TRAILING.sub("", paper.get()))


def draw_report(report: Report, console: Console, *, verbose: bool = False, quiet: bool = False) -> str:
    """Return the report as ``console`` shows it.

    ``verbose``: every check on its own line; ``quiet``: only findings and the verdict."""
    report = printable(report)
    style = _TerminalStyle(report, verbose, quiet, width=console.width)
    lines: list[_Line] = []
    if not quiet:
        lines.append(Text(" · ".join([f"rankdoctor {report.tool.version}", *job_words(report)]), style="bold"))
    if report.stacks is not None:
        lines += _stacks(report.stacks, style)
    if report.inputs:
        lines += _verdict(report, style)
    lines += _candidates(report)
    if report.stacks is not None and not verbose:
        style = style._replace(quiet=True)  # most checks are about what attaching does not read
    if style.quiet:  # without headings of families: what to fix first is first
        lines += _family("", sorted(report.results, key=partial(_urgency, report)), style)
    else:
        for family, results in families(report).items():
            lines += _family(family, results, style)
    if report.lost_time is not None and not quiet:
        lines += _lost_time(report.lost_time)
    drawn = _drawn(console, [*lines, _summary(report)])
    return drawn.lstrip("\n") if quiet else drawn  # nothing stands above it


def draw_several(judged: JudgedRuns, console: Console, *, verbose: bool = False, quiet: bool = False) -> str:
    """Return the verdict of each run in a line, then its findings; with ``verbose``, its whole report."""
    title = [Text(judged.title(), style="bold"), *(Text(line, overflow="fold") for line in judged.lines())]
    parts = [_drawn(console, title)]
    for run in judged.document.runs:
        rule = Rule(Text(spelt_out(run.name), style="bold"), align="left", characters="━")
        parts.append(_drawn(console, (Text(), rule)))
        parts.append(draw_report(run.report, console, verbose=verbose, quiet=quiet or not verbose))
    return "".join(parts)


def _stacks(stacks: RankStacks, style: _TerminalStyle) -> Iterable[_Line]:
    """Return the groups of ranks by where they are, and the merged stacks if the groups differ."""
    if style.report.outcome is not None:
        yield Text(style.report.outcome.reason)
    if (unclear := unclear_outcome(style.report)) is not None:
        yield from (Text.assemble("  ", _prose(way), overflow="fold") for way in unclear.collect)
    if stacks.groups:
        yield Text(f"\n{groups_title(stacks)}", style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group in stacks.groups:
        table.add_row(f"  {ranks_text(group.ranks)}", Text(group_text(group)))
    yield table
    yield from (Text(note, style="magenta") for note in stacks.notes)
    if len(stacks.groups) > 1 or style.verbose:
        yield Text("\nmerged stacks, outermost call first", style="bold")
        rows = list(call_rows(stacks))
        shown = rows if style.verbose else rows[:MOST_ROWS]
        yield from (_call_row(row) for row in shown)
        if left := len(rows) - len(shown):
            yield Text(f"  and {left} more calls (--verbose shows all)", style="dim")
    yield Text()


def _lost_time(lost: LostTime) -> Iterable[_Line]:
    yield Text(f"\n{TITLE}", style="bold")
    yield Text(f"  {lost_headline(lost)}", overflow="fold")
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for cause, seconds, share in cause_rows(lost):
        table.add_row(f"  {cause}", seconds, share)
    yield table
    for what, help_text in largest_lines(lost):
        yield Padding(Text(what, overflow="fold"), (0, 0, 0, 2))
        yield Padding(_prose(help_text), (0, 0, 0, 4))
    yield from (Padding(Text(note, style="dim", overflow="fold"), (0, 0, 0, 2)) for note in lost_notes(lost))
    yield Text()


def _call_row(row: CallRow) -> Text:
    return Text.assemble(
        "  " * (1 + min(row.depth, MOST_INDENT)),
        (f"{row.ranks}  ", "dim"),
        (row.place, "bold" if row.user else ""),
        (f"  {skipped_text(row)}".rstrip(), "dim"),
    )


def _verdict(report: Report, style: _TerminalStyle) -> Iterable[_Line]:
    story = narrative_of(report)
    sentence = Text(f"\n{headline(report)}", style=f"bold {VERDICT_COLORS[report.verdict]}")
    reading = evidence_overview_of(report)
    if story.primary is None and reading is not None:
        yield Group(sentence, *_read(reading))
        return
    if story.primary is None:
        ways = to_collect(report) if report.verdict != "pass" else []
        yield Group(sentence, *(Text(f"next time: {way} ({ids})", style="dim") for ids, way in ways))
        return
    primary, finding = story.primary, story.primary.finding
    sure = f"{primary.id} {primary.result.name}, confidence {confidence(finding)}"
    followed = sorted({one.id for one in story.followed})
    yield Group(
        sentence,
        Text(sure + (f"; consequences: {some(followed)}" if followed else ""), style="dim"),
        *(_quoted(quote) for quote in quotes(finding)[: 2 if reading is None else None]),
        *(_read(reading) if reading is not None else ()),
    )
    yield from _laid_out(fix_lines(finding.fix, "fix: ", 5, style.width))


def _candidates(report: Report) -> Iterable[_Line]:
    """Return the candidate causes: confidence and title, the evidence for and against it, and the command."""
    heading, causes = shown_candidates(report, narrative_of(report))
    if not causes:
        return
    yield Text(f"\n{heading}:", style="bold")
    for one in causes:
        yield Text.assemble((f"  {one.confidence:.2f} ", "bold"), f"{one.title} ({one.id})", overflow="fold")
        for label, reasons in (("for", one.supports), ("against", one.against)):
            if reasons:
                text = Text.assemble((f"{label}: ", "dim"), shortened("; ".join(reasons)), overflow="fold")
                yield Padding(text, (0, 0, 0, 7))
        yield _Unwrapped(Text.assemble("       ", ("try: ", "dim"), (one.next_command, "bold")))
        yield Padding(Text.assemble(("confirmed if ", "dim"), _prose(one.confirmed_by), overflow="fold"), (0, 0, 0, 7))


def _read(reading: EvidenceOverview) -> Iterable[RenderableType]:
    yield from (Text(fact, style="dim") for fact in reading.facts)
    yield from map(_quoted, reading.lines)
    if reading.more > 0:
        yield Padding(Text(f"and {reading.more} more lines that look like errors", style="dim"), (0, 0, 0, 2))
    for way in reading.collect:
        yield Text.assemble("collect: ", _prose(way), overflow="fold")


def _quoted(quote: LogQuote) -> RenderableType:
    text = f"{quote.who}: {quote.text}" if quote.who else quote.text
    line = Text.assemble((f"{quote.place}: " if quote.place else "", "dim"), shortened(text), overflow="fold")
    return Padding(line, (0, 0, 0, 2))


def _family(family: str, results: list[CheckResult], style: _TerminalStyle) -> Iterable[_Line]:
    folded = Counter(result.status for result in results if _is_quiet(result))
    shown = [result for result in results if style.verbose or not _is_quiet(result)]
    if style.quiet:
        shown = [result for result in shown if result.findings or result.status is Status.ERROR]
    elif shown or folded:
        yield Text()
        yield Rule(Text(family, style="bold"), align="left", style="dim", characters="─")
    for result in shown:
        yield from _laid_out(result_lines(result, style.findings))
    if folded and not style.verbose and not style.quiet:
        counts = [f"{folded[status]} {status.value}" for status in (Status.PASS, Status.SKIP) if folded[status]]
        state = "pass" if folded[Status.PASS] else "skip"
        yield from _laid_out(state_row(state, [(", ".join(counts), "dim")], style.width))


def _laid_out(lines: Iterable[StyledLine]) -> Iterable[_Unwrapped]:
    return (_Unwrapped(Text.assemble(*line)) for line in lines)


def _prose(text: str) -> Text:
    return Text.assemble(*prose_spans(text))


def _urgency(report: Report, result: CheckResult) -> tuple[bool, bool, int]:
    """The order of findings: the primary one, then root causes by severity, then consequences."""
    standing = [finding for finding in result.findings if finding.stands]
    weight = max((finding.severity.weight for finding in standing), default=-1)
    is_consequence = bool(standing) and all(finding.explained_by for finding in standing)
    return result.id != report.primary, is_consequence, -weight


def _is_quiet(result: CheckResult) -> bool:
    return result.status in (Status.PASS, Status.SKIP) and not result.findings


def _summary(report: Report) -> RenderableType:
    lines: list[RenderableType] = [Text(), Rule(style="dim", characters="─")]
    verdict = verdict_text(report)
    if report.verdict == "inconclusive":
        verdict.append(f"; {why_inconclusive(report)}")
    elif unknown := report.coverage.checks["unknown"]:
        verdict.append(f"; {unknown} check{'' if unknown == 1 else 's'} could not be evaluated")
    lines.append(verdict.append(f".{_first_fix(report)}"))
    lines.append(Text(f"{coverage_line(report)}; {report.seconds:.2f} s", style="dim"))
    lines += [Text(f"Skipped {one.path}: {one.skipped}", style="magenta") for one in report.inputs if one.skipped]
    lines += [Text(note, style="magenta") for one in report.inputs for note in one.notes or ()]
    return Group(*lines)


def verdict_text(report: Report) -> Text:
    """Return the verdict in its color, and the counts of findings: ``Failed: 1 error``, ``No problems found``."""
    counts = counts_line(report)
    word = _VERDICTS[report.verdict]
    if report.verdict == "pass" and counts.startswith(NO_FINDING):
        word, counts = "No problems found", counts.removeprefix(NO_FINDING)
    else:
        counts = f": {counts}"
    return Text.assemble((word, f"bold {VERDICT_COLORS[report.verdict]}"), counts)


def _first_fix(report: Report) -> str:
    """Return `` Fix NET007 first; RUN004 is a consequence.``; empty without a primary finding."""
    if not report.primary:
        return ""
    if report.primary == UNEXPLAINED:
        return f" See {UNEXPLAINED}."
    results = (result for result in report.results if result.id != report.primary)
    caused = {one.id for one in results if any(f.explained_by == report.primary and f.stands for f in one.findings)}
    if not caused:
        return f" Fix {report.primary} first."
    verb = "is a consequence" if len(caused) == 1 else "are consequences"
    return f" Fix {report.primary} first; {some(sorted(caused))} {verb}."

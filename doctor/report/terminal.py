"""The report that people read in a terminal: findings in full, the rest folded; narrow or wide, with colour or not."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, NamedTuple

from doctor.core.finding import Severity, Status
from doctor.core.job import UNKNOWN_HOST
from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.report.formatting import (
    counts_line,
    coverage_line,
    evidence_lines,
    explaining,
    families,
    fix_parts,
    place,
    printable,
    processes,
    ranges,
    shortened,
    some,
    spelt_out,
    state_of,
    why_inconclusive,
)
from doctor.report.narrative import (
    EvidenceOverview,
    LogQuote,
    confidence,
    evidence_overview_of,
    headline,
    narrative_of,
    quotes,
    to_collect,
)
from doctor.report.rich_names import Console, Group, Padding, RenderableType, Rule, Table, Text, cell_len

if TYPE_CHECKING:
    from doctor.report.multi_run import JudgedRuns

PIPED_WIDTH = 120
"""Columns where the output is no terminal and COLUMNS is not set: log viewers scroll."""

NARROW = 72
"""Columns below which findings are hardly indented."""

LEAST_WIDTH, MOST_WIDTH = 20, 1000
"""Columns that are believed."""

MOST_IDENTICAL = 3
"""Findings of one check that are shown in full; more are counted, unless all are asked for."""

_TRAILING = re.compile(r"(?<! )[ ]+(?=(\x1b\[0?m)?$)", re.MULTILINE)

_EMPTY = re.compile(r"\n{3,}")
_CODE = re.compile(r"`([^`]+)`")

_STYLE = {
    "error": "bold red",
    "warning": "yellow",
    "info": "cyan",
    "pass": "green",
    "unknown": "magenta",
    "skip": "dim",
    "crashed": "bold magenta",
    "ignored": "dim",
}
_MARK = {
    "error": "✗",
    "warning": "!",
    "info": "i",
    "pass": "✓",
    "unknown": "?",
    "skip": "-",
    "crashed": "✗",
    "ignored": "-",
}


def make_console(stream: IO[str], *, width: int | None = None) -> Console:
    """A console for ``stream``: no colour where it is no terminal or NO_COLOR is set.

    Open MPI gives its ranks a terminal whatever mpirun's own output is (``orte_iof``): theirs counts as a pipe.
    """
    piped = not stream.isatty() or "OMPI_COMM_WORLD_RANK" in os.environ
    if width is None:
        width = _stated_width() or (PIPED_WIDTH if piped else None)
    return Console(
        file=_DiscardingStream(stream),
        width=width,
        highlight=False,
        emoji=False,
        markup=False,
        no_color=piped or None,
        force_terminal=False if piped and stream.isatty() else None,
        # Read from COLUMNS and LINES without a look at what they hold, if they are there.
        _environ={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
    )


class _DiscardingStream(io.StringIO):
    """Where a console leaves what is not captured: nothing of value. It answers for ``stream``, so that a stream which
    can't be written is met in one place, by whoever prints what was captured."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream: what it can't show is replaced by signs that it can."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()


def _stated_width() -> int | None:
    """COLUMNS, where it is a number, within what can be read."""
    stated = os.environ.get("COLUMNS", "")
    return min(max(int(stated), LEAST_WIDTH), MOST_WIDTH) if re.fullmatch("[0-9]{1,9}", stated) else None


class _TerminalStyle(NamedTuple):
    """What is drawn, and how: ``indent`` columns before the text of a finding."""

    report: Report
    verbose: bool
    quiet: bool
    indent: int
    width: int


class _Unwrapped(NamedTuple):
    """A line that is printed as it is, however long: a command that is broken in two can't be pasted."""

    text: Text


_Line = RenderableType | _Unwrapped


def _print(console: Console, line: _Line) -> None:
    if isinstance(line, _Unwrapped):
        console.print(line.text, soft_wrap=True)
    else:
        console.print(line)


def draw_report(report: Report, console: Console, *, verbose: bool = False, quiet: bool = False) -> str:
    """The report as ``console`` would show it. ``verbose``: every check on a line of its own; ``quiet``: only findings
    and the verdict."""
    report = printable(report)
    look = _TerminalStyle(report, verbose, quiet, indent=_indent(console), width=console.width)
    with console.capture() as paper:
        if not quiet:
            console.print(_title(report))
        for line in _verdict(report, look) if report.inputs else ():
            _print(console, line)
        for family, results in families(report).items():
            for line in _family(family, results, look):
                _print(console, line)
        console.print(_summary(report))
    return _tidy(paper.get())


def draw_several(judged: JudgedRuns, console: Console, *, verbose: bool = False, quiet: bool = False) -> str:
    """The verdict of each run in a line, then its findings; its report in full only where it is to be ``verbose``."""
    with console.capture() as paper:
        console.print(Text(judged.title(), style="bold"))
        for line in judged.lines():
            console.print(Text(line, overflow="fold"))
    parts = [_tidy(paper.get())]
    for run in judged.document.runs:
        with console.capture() as paper:
            console.print(Text())
            console.print(Rule(Text(spelt_out(run.name), style="bold"), align="left", characters="━"))
        parts += [_tidy(paper.get()), draw_report(run.report, console, verbose=verbose, quiet=quiet or not verbose)]
    return "".join(parts)


def draw_findings(report: Report, console: Console) -> str:
    """All findings of ``report`` in full, as :func:`draw_report` shows them, and nothing else."""
    report = printable(report)
    look = _TerminalStyle(report, verbose=True, quiet=True, indent=_indent(console), width=console.width)
    with console.capture() as paper:
        for result in report.results:
            for line in _check(result, look) if result.findings else ():
                _print(console, line)
    return _tidy(paper.get())


def _indent(console: Console) -> int:
    return 10 if console.width >= NARROW else 2


def _tidy(text: str) -> str:
    """Tables pad their last column; nobody wants to copy that."""
    return _EMPTY.sub("\n\n", _TRAILING.sub("", text))


def _title(report: Report) -> RenderableType:
    words = [f"rankdoctor {report.tool.version}"]
    if report.job is not None:
        hosts = [host.name for host in report.job.hosts if host.name != UNKNOWN_HOST]
        launcher = "no launcher" if report.job.launcher == "none" else report.job.launcher
        words += [processes(report), launcher, *([some(hosts, 3)] if hosts else [])]
    return Text(" · ".join(words), style="bold")


def _verdict(report: Report, look: _TerminalStyle) -> Iterable[_Line]:
    """What happened first, in a sentence; for what was read after the event, where that is the question."""
    story = narrative_of(report)
    sentence = Text(f"\n{headline(report)}", style=f"bold {_COLOUR[report.verdict]}")
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
        Text(sure + (f"; explains {some(followed)}" if followed else ""), style="dim"),
        *(_quoted(quote) for quote in quotes(finding)[:_FIRST_QUOTES]),
    )
    yield from _fix(finding.fix, "fix: ", 5, look.width)


def _read(reading: EvidenceOverview) -> Iterable[RenderableType]:
    """What was read of a run whose outcome is unclear, and what to collect next."""
    yield from (Text(fact, style="dim") for fact in reading.facts)
    yield from map(_quoted, reading.lines)
    if reading.more > 0:
        yield Padding(Text(f"and {reading.more} more lines that look like errors", style="dim"), (0, 0, 0, 2))
    for way in reading.collect:
        yield Text.assemble("collect: ", _prose(way), overflow="fold")


_FIRST_QUOTES = 2
"""Lines that the verdict rests on, shown with it."""


def _quoted(quote: LogQuote) -> RenderableType:
    text = f"{quote.who}: {quote.text}" if quote.who else quote.text
    line = Text.assemble((f"{quote.place}: " if quote.place else "", "dim"), shortened(text), overflow="fold")
    return Padding(line, (0, 0, 0, 2))


_COLOUR = {"pass": "green", "fail": "red", "inconclusive": "magenta"}


def _family(family: str, results: list[CheckResult], look: _TerminalStyle) -> Iterable[_Line]:
    folded = Counter(result.status for result in results if _is_quiet(result))
    shown = [result for result in results if look.verbose or not _is_quiet(result)]
    if look.quiet:
        shown = [result for result in shown if result.findings or result.status is Status.ERROR]
    elif shown or folded:
        yield Text()
        yield Rule(Text(family, style="bold"), align="left", style="dim", characters="─")
    for result in shown:
        yield from _check(result, look)
    if folded and not look.verbose and not look.quiet:
        yield _row("pass" if folded[Status.PASS] else "skip", Text(_fold(folded), style="dim"))


def _is_quiet(result: CheckResult) -> bool:
    return result.status in (Status.PASS, Status.SKIP) and not result.findings


def _fold(counts: Counter[Status]) -> str:
    return ", ".join(f"{counts[status]} {status.value}" for status in (Status.PASS, Status.SKIP) if counts[status])


def _row(state: str, text: RenderableType, word: str | None = None) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, width=9)
    table.add_column(overflow="fold")
    table.add_row(Text(f"{_MARK[state]} {word or state}", style=_STYLE[state]), text)
    return table


def _check(result: CheckResult, look: _TerminalStyle) -> Iterable[_Line]:
    state = state_of(result)
    line = Text.assemble((result.id, "bold"), f" {result.name}")
    if result.reason and not result.findings:
        line.append(f": {result.reason}", style="dim")
    yield _row(state, line)
    shown = result.findings if look.verbose else result.findings[:MOST_IDENTICAL]
    for finding in shown:
        yield from _finding(result, finding, look)
        yield Text()
    rest = result.findings[len(shown) :]
    if rest:
        yield Padding(Text(_more(rest), style="dim"), (0, 0, 1, look.indent))
    if result.crash is not None:
        yield _row("crashed", Text.assemble((result.id, "bold"), f" {result.name}: then it crashed: {result.crash}"))


def _more(rest: tuple[ReportFinding, ...]) -> str:
    ranks = ranges(rank for finding in rest for rank in finding.ranks)
    return f"and {len(rest)} more findings like it" + (f", ranks {ranks}" if ranks else "") + " (--verbose shows all)"


_MORE = ("evidence", "effect")
"""What is left out of findings that are only good to know, unless everything is asked for."""


def _finding(result: CheckResult, finding: ReportFinding, look: _TerminalStyle) -> Iterable[_Line]:
    summary = Text(finding.summary, style=_STYLE[finding.severity.value if finding.stands else "ignored"])
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, width=_LABEL - 1, style="dim")
    grid.add_column(overflow="fold")
    for label, text in _parts(finding, look):
        if look.verbose or finding.severity is not Severity.INFO or label not in _MORE:
            grid.add_row(label, text)
    yield Padding(Group(summary, grid), (0, 0, 0, look.indent))
    if finding.ignored is not None:
        return
    yield from _fix(finding.fix, f"{' ' * look.indent}{'fix':{_LABEL}}", look.indent + _LABEL, look.width)
    if finding.severity is not Severity.INFO:
        yield Text(f"{' ' * look.indent}{'more':{_LABEL}}{explaining(result)}", style="dim")


_LABEL = 9
"""Columns of the labels of a finding, the one after them counted."""


def _fix(fix: str, label: str, indent: int, width: int) -> Iterable[_Unwrapped]:
    """The prose of a fix, wrapped between words and never within a command, and its commands, one a line."""
    if not fix:  # as a plugin's check without a docstring
        return
    prose, below = fix_parts(fix)
    lines = [*_wrapped(prose, max(width - indent, 1)), *(Text(command, style="bold") for command in below)]
    for number, line in enumerate(lines):
        yield _Unwrapped(Text.assemble((" " * indent if number else label, "dim"), line))


_BLANK, _BEGIN, _END = "\ue000", "\ue001", "\ue002"
"""A blank within code, and where code begins and ends, while lines are filled: private signs that no font shows."""


def _wrapped(prose: str, width: int) -> list[Text]:
    plain = re.sub(f"[{_BLANK}-{_END}]", "\ufffd", prose)
    marked = _CODE.sub(lambda match: f"{_BEGIN}{match[1].replace(' ', _BLANK)}{_END}", plain)
    lines: list[str] = []
    for word in marked.split():
        if lines and _columns(lines[-1]) + 1 + _columns(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [_styled(line) for line in lines]


def _columns(marked: str) -> int:
    return cell_len(marked.replace(_BEGIN, "").replace(_END, "").replace(_BLANK, " "))


def _styled(marked: str) -> Text:
    """A line with its commands in bold; the backticks go, because a shell would take them for its own."""
    line = Text()
    for part in marked.replace(_BLANK, " ").split(_BEGIN):
        code, end, rest = part.partition(_END)
        line.append(code, style="bold" if end else "")
        line.append(rest)
    return line


def _parts(finding: ReportFinding, look: _TerminalStyle) -> Iterable[tuple[str, Text]]:
    yield "where", Text(place(finding, look.report))
    if finding.source is not None:
        line = f":{finding.source.line}" if finding.source.line else ""
        yield "source", Text(f"{finding.source.file}{line}")
    if finding.evidence:
        lines = evidence_lines(finding.evidence)
        yield "evidence", Text("\n".join(lines if look.verbose else map(shortened, lines)))
    if finding.ignored is not None:
        yield "ignored", Text(f"{finding.ignored.reason} ({finding.ignored.by})")
        return
    if finding.explained_by:
        yield "because", Text(f"explained by {finding.explained_by}")
    if finding.effect:
        yield "effect", _prose(finding.effect)


def _prose(text: str) -> Text:
    """A sentence with its commands in bold; the backticks go, because a shell would take them for its own."""
    prose = Text()
    for position, part in enumerate(_CODE.split(text)):
        prose.append(part, style="bold" if position % 2 else "")
    return prose


def _summary(report: Report) -> RenderableType:
    colour = _COLOUR[report.verdict]
    lines: list[RenderableType] = [Text(), Rule(style="dim", characters="─")]
    headline = Text.assemble((report.verdict, f"bold {colour}"), f": {counts_line(report)}")
    if report.verdict == "inconclusive":
        headline.append(f"; {why_inconclusive(report)}")
    elif report.coverage.checks["unknown"]:
        headline.append(f"; {report.coverage.checks['unknown']} checks could not be judged")
    lines.append(headline)
    if report.primary:
        lines.append(_primary(report))
    lines.append(Text(f"{coverage_line(report)}; {report.seconds:.2f} s", style="dim"))
    lines += [Text(f"passed over {one.path}: {one.skipped}", style="magenta") for one in report.inputs if one.skipped]
    lines += [Text(note, style="magenta") for one in report.inputs for note in one.notes or ()]
    return Group(*lines)


def _primary(report: Report) -> RenderableType:
    explained = [
        result.id for result in report.results for f in result.findings if f.explained_by == report.primary and f.stands
    ]
    text = Text.assemble("start with ", (str(report.primary), "bold"))
    result = report.result(str(report.primary))
    if result is not None:
        text.append(f" {result.name}")
    if explained:
        text.append(f" (explains {some(sorted(set(explained)))})")
    return text

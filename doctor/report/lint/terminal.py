"""Draws findings in files in a terminal: a location that editors can open, the code, the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.core.text import counted
from doctor.report.evidence_text import evidence_lines
from doctor.report.finding_lines import STATE_STYLES
from doctor.report.formatting import (
    CODE_EVIDENCE,
    code_excerpt,
    crash_of,
    explaining,
    hidden_previews,
    left_out_in_tests,
    other_places,
    printable,
    some,
)
from doctor.report.rich_names import Console, Padding, Text
from doctor.report.terminal import verdict_text

_SHOWN_ELSEWHERE = (*CODE_EVIDENCE, "also", "foreshadows")
"""Evidence that is not listed, because it is shown in another form."""
_MOST_SKIPPED = 10
"""Skipped files that make the report inconclusive and are named, except with ``verbose``."""
_MOST_PLACES = 5
"""Other places of a finding that are named, except with ``verbose``."""


class _FileFinding(NamedTuple):
    result: CheckResult
    finding: ReportFinding

    @property
    def where(self) -> tuple[str, int]:
        source = self.finding.source
        return (source.file, source.line or 0) if source is not None else ("", 0)

    def number(self, name: str) -> int:
        """Return an integer of the evidence, or 0."""
        value = self.finding.evidence.get(name)
        return value if isinstance(value, int) else 0


def draw_lint(
    report: Report, console: Console, *, verbose: bool = False, quiet: bool = False, flow: bool = False
) -> str:
    """Return the report as ``console`` shows it.

    ``quiet``: a line per finding, and the verdict; ``verbose``: ignored findings, too, with all evidence, and every
    rule on its own line; ``flow``: the steps of the control flow that lead to each finding."""
    report = printable(report)
    with console.capture() as paper:
        shown: set[tuple[str, str]] = set()
        for hit in _in_order(report, ignored_too=verbose):
            _draw_hit(hit, console, brief=quiet, shown=set() if verbose else shown, verbose=verbose)
            if flow and not quiet:
                _draw_flow(hit, console)
            shown |= {(hit.result.id, ""), (hit.result.id, hit.finding.fix)}
        if verbose:
            for result in report.results:
                reason = f": {result.reason}" if result.reason else ""
                seen = f"{result.seen} of {counted(result.expected, 'file')}"
                line = f"{result.status.value:8}{result.id} {result.name}, {seen}{reason}"
                console.print(Text(line), soft_wrap=True)
            console.print()
        _draw_summary(report, console, verbose=verbose, quiet=quiet)
    return "\n".join(line.rstrip() for line in paper.get().split("\n"))


def _in_order(report: Report, *, ignored_too: bool) -> list[_FileFinding]:
    """Return the findings in the order of the inputs, and by line."""
    files = {one.path: place for place, one in enumerate(report.inputs)}
    hits = [
        _FileFinding(result, one) for result in report.results for one in result.findings if ignored_too or one.stands
    ]
    return sorted(hits, key=lambda hit: (files.get(hit.where[0], 0), hit.where, hit.number("column")))


def _draw_hit(hit: _FileFinding, console: Console, *, brief: bool, shown: set[tuple[str, str]], verbose: bool) -> None:
    """Draw one finding. ``shown``: pairs of id and fix that need not be repeated."""
    finding = hit.finding
    word = finding.severity.value if finding.stands else "ignored"
    file, line = hit.where
    cell = f" (cell {hit.number('cell')}, line {hit.number('line_in_cell')})" if hit.number("cell") else ""
    place = [file, *([str(line)] if line else []), *([str(hit.number("column"))] if line and not cell else [])]
    where = ":".join(place) + f"{cell}:"
    head = Text.assemble((where, "bold"), " ", (word, STATE_STYLES[word]), " ", (hit.result.id, "bold"), " ")
    head.append("(preview) " if hit.finding.evidence.get("preview") else "", "dim")
    head.append(_plain(finding.summary))
    console.print(head, soft_wrap=True)
    if brief:
        return
    for excerpt in _excerpt(hit):
        console.print(excerpt, soft_wrap=True)
    for label, text in _parts(hit, shown, verbose=verbose):
        console.print(Padding(Text.assemble((f"{label}: ", "dim"), _plain(text)), (0, 0, 0, 4)))
    console.print()


def _draw_flow(hit: _FileFinding, console: Console) -> None:
    """Draw each step with its place, the code and the note on it."""
    steps = hit.finding.evidence.get("flow")
    if not isinstance(steps, (list, tuple)) or not steps:
        return
    console.print(Text("    flow:", style="dim"))
    for number, step in enumerate(steps, 1):
        line = Text.assemble(f"    {number}. ", (f"{step['file']}:{step['line']}", "bold"), f"  {step['code']}")
        console.print(line, soft_wrap=True)
        if step["note"]:
            console.print(Padding(Text(_plain(step["note"]), style="dim"), (0, 0, 0, 7)))
    console.print()


def _excerpt(hit: _FileFinding) -> Iterator[Text]:
    excerpt = code_excerpt(hit.finding)
    if excerpt is None:
        return
    yield Text.assemble((excerpt.margin, "dim"), excerpt.code)
    if excerpt.mark:
        yield Text.assemble((excerpt.blank, "dim"), excerpt.lead, (excerpt.mark, "red"))


def _parts(hit: _FileFinding, shown: set[tuple[str, str]], *, verbose: bool) -> Iterator[tuple[str, str]]:
    finding = hit.finding
    if finding.ignored is not None:
        yield "ignored", f"{finding.ignored.reason} ({finding.ignored.by})"
        return
    if also := other_places(finding):
        yield "also", some([f"{file}:{line}" for file, line in also], most=len(also) if verbose else _MOST_PLACES)
    is_new = (hit.result.id, "") not in shown
    if is_new and finding.effect:
        yield "impact", finding.effect
    if finding.fix and (hit.result.id, finding.fix) not in shown:
        yield "fix", finding.fix.rstrip(".") + (". Apply with --fix." if finding.evidence.get("fixable") else ".")
    if not is_new:
        return
    rest = {name: value for name, value in finding.evidence.items() if name not in _SHOWN_ELSEWHERE}
    if verbose and rest:
        yield "evidence", "; ".join(evidence_lines(rest))
    foreshadows = finding.evidence.get("foreshadows")
    if verbose and foreshadows and isinstance(foreshadows, (list, tuple)):
        yield "in a run", ", ".join(map(str, foreshadows))
    yield "more", explaining(hit.result)


def _plain(text: str) -> str:
    """Remove backticks, which a shell would interpret."""
    return text.replace("`", "")


def _draw_summary(report: Report, console: Console, *, verbose: bool, quiet: bool) -> None:
    read = [one for one in report.inputs if one.skipped is None]
    findings = [one for result in report.results for one in result.findings if one.stands]
    hit = {one.source.file for one in findings if one.source}
    hit |= {file for one in findings for file, _ in other_places(one)}
    head = verdict_text(report)
    head.append(f" in {len(hit)} of {counted(len(read), 'file')}" if hit else f" in {counted(len(read), 'file')}")
    console.print(head.append(f"; {counted(len(report.results), 'rule')}, {report.seconds:.2f} s"), soft_wrap=True)
    for result in report.results:
        if (crash := crash_of(result)) is not None:
            console.print(Text(f"{result.id} {result.name} failed to run: {crash}", style="magenta"), soft_wrap=True)
    _draw_skipped(report, console, verbose=verbose, quiet=quiet)
    if (hidden := hidden_previews(report)) and not quiet:
        console.print(f"{counted(hidden, 'finding')} in preview not shown: --preview reports them too")
    if (in_tests := left_out_in_tests(report)) and not quiet:
        console.print(f"{counted(in_tests, 'finding')} in tests not shown: --tests reports them too")
    fixable = sum(1 + len(other_places(one)) for one in findings if one.evidence.get("fixable"))
    if fixable and not quiet:
        console.print(f"--fix corrects {counted(fixable, 'finding')} automatically, --diff shows the changes")


def _draw_skipped(report: Report, console: Console, *, verbose: bool, quiet: bool) -> None:
    skipped = [one for one in report.inputs if one.skipped is not None]
    if quiet:
        if skipped:
            console.print(Text(f"Skipped: {some([one.path for one in skipped])}", style="magenta"), soft_wrap=True)
        return
    for one in report.inputs:
        for note in one.notes or ():
            console.print(Text(f"{one.path}: {note}", style="magenta"), soft_wrap=True)
    named = skipped if verbose else [one for one in skipped if one.decisive is True][:_MOST_SKIPPED]
    for one in named:
        console.print(Text(f"Skipped {one.path}: {one.skipped}", style="magenta"), soft_wrap=True)
    if rest := [one.path for one in skipped if one not in named]:
        text = f"{counted(len(rest), 'file')} skipped: {some(rest)} (--verbose shows why)"
        console.print(Text(text, style="dim"), soft_wrap=True)

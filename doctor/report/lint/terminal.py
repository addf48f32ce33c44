"""What was found in files, as people read it in a terminal: a line that editors can follow, the code, the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from doctor.core.finding import Status
from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.report.formatting import counts_line, evidence_lines, explaining, printable, some
from doctor.report.rich_names import Console, Padding, Text

_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan", "ignored": "dim"}
_VERDICT = {"pass": "green", "fail": "red", "inconclusive": "magenta"}
_SHOWN_ELSEWHERE = ("code", "column", "end_column", "end_line", "line_in_cell", "foreshadows", "fixable")
"""Evidence that is shown in other ways."""
_MOST_SKIPPED = 10
"""Files that leave the report inconclusive which are named, unless all are asked for."""


class _FileFinding(NamedTuple):
    result: CheckResult
    finding: ReportFinding

    @property
    def where(self) -> tuple[str, int]:
        """File and line."""
        source = self.finding.source
        return (source.file, source.line or 0) if source is not None else ("", 0)

    def number(self, name: str) -> int:
        """A whole number of the evidence; 0 where it is not there."""
        value = self.finding.evidence.get(name)
        return value if isinstance(value, int) else 0


def draw_lint(report: Report, console: Console, *, verbose: bool = False, quiet: bool = False) -> str:
    """The report as ``console`` would show it. ``quiet``: a line a finding, and the verdict; ``verbose``: ignored ones,
    too, with all evidence, and every rule on a line of its own."""
    report = printable(report)
    with console.capture() as paper:
        told: set[tuple[str, str]] = set()
        for hit in _in_order(report, ignored_too=verbose):
            _draw_hit(hit, console, brief=quiet, told=set() if verbose else told, verbose=verbose)
            told |= {(hit.result.id, ""), (hit.result.id, hit.finding.fix)}
        if verbose:
            _draw_rules(report, console)
        _draw_summary(report, console, verbose=verbose, quiet=quiet)
    return "\n".join(line.rstrip() for line in paper.get().split("\n"))


def _in_order(report: Report, *, ignored_too: bool) -> list[_FileFinding]:
    """By file, as they were given, and line."""
    files = {one.path: place for place, one in enumerate(report.inputs)}
    hits = [
        _FileFinding(result, one) for result in report.results for one in result.findings if ignored_too or one.stands
    ]
    return sorted(hits, key=lambda hit: (files.get(hit.where[0], 0), hit.where, hit.number("column")))


def _draw_hit(hit: _FileFinding, console: Console, *, brief: bool, told: set[tuple[str, str]], verbose: bool) -> None:
    """``told``: ids, and ways out of them, that were shown in full already."""
    finding = hit.finding
    word = finding.severity.value if finding.stands else "ignored"
    head = Text.assemble((_place(hit), "bold"), " ", (word, _STYLE[word]), " ", (hit.result.id, "bold"), " ")
    head.append(_plain(finding.summary))
    console.print(head, soft_wrap=True)
    if brief:
        return
    for line in _excerpt(hit):
        console.print(line, soft_wrap=True)
    for label, text in _parts(hit, told, verbose=verbose):
        console.print(Padding(Text.assemble((f"{label}: ", "dim"), _plain(text)), (0, 0, 0, 4)))
    console.print()


def _place(hit: _FileFinding) -> str:
    """``train.py:12:5:``; in a notebook, the cell and its line, too."""
    file, line = hit.where
    cell = f" (cell {hit.number('cell')}, line {hit.number('line_in_cell')})" if hit.number("cell") else ""
    place = [file, *([str(line)] if line else []), *([str(hit.number("column"))] if line and not cell else [])]
    return ":".join(place) + f"{cell}:"


def _excerpt(hit: _FileFinding) -> Iterator[Text]:
    """The line, and a mark below what is meant."""
    code = str(hit.finding.evidence.get("code", ""))
    if not code.strip():
        return
    line = hit.number("line_in_cell") or hit.where[1]
    margin = f"{line:>6} | "
    yield Text.assemble((margin, "dim"), code)
    column = hit.number("column") - 1
    whole = hit.number("end_line") == hit.where[1]
    end = min(hit.number("end_column") - 1 if whole else len(code), len(code))
    if 0 <= column < len(code):
        lead = "".join(sign if sign == "\t" else " " for sign in code[:column])
        mark = "^" * max(end - column, 1)
        yield Text.assemble((" " * (len(margin) - 2) + "| ", "dim"), lead, (mark, "red"))


def _parts(hit: _FileFinding, told: set[tuple[str, str]], *, verbose: bool) -> Iterator[tuple[str, str]]:
    finding = hit.finding
    if finding.ignored is not None:
        yield "ignored", f"{finding.ignored.reason} ({finding.ignored.by})"
        return
    is_new = (hit.result.id, "") not in told
    if is_new and finding.effect:
        yield "effect", finding.effect
    if finding.fix and (hit.result.id, finding.fix) not in told:
        yield "fix", finding.fix.rstrip(".") + (". --fix does it." if finding.evidence.get("fixable") else ".")
    if not is_new:
        return
    rest = {name: value for name, value in finding.evidence.items() if name not in (*_SHOWN_ELSEWHERE, "cell")}
    if verbose and rest:
        yield "evidence", "; ".join(evidence_lines(rest))
    foreshadows = finding.evidence.get("foreshadows")
    if verbose and isinstance(foreshadows, (list, tuple)):
        yield "in a run", ", ".join(map(str, foreshadows))
    yield "more", explaining(hit.result)


def _plain(text: str) -> str:
    """Without the backticks, which a shell would take for its own."""
    return text.replace("`", "")


def _draw_rules(report: Report, console: Console) -> None:
    for result in report.results:
        reason = f": {result.reason}" if result.reason else ""
        seen = f"{result.seen} of {result.expected} files"
        console.print(Text(f"{result.status.value:8}{result.id} {result.name}, {seen}{reason}"), soft_wrap=True)
    console.print()


def _draw_summary(report: Report, console: Console, *, verbose: bool, quiet: bool) -> None:
    read = [one for one in report.inputs if one.skipped is None]
    hit = {one.source.file for result in report.results for one in result.findings if one.stands and one.source}
    head = Text.assemble((report.verdict, f"bold {_VERDICT[report.verdict]}"), f": {counts_line(report)}")
    head.append(f" in {len(hit)} of {len(read)} files" if hit else f" in {_counted(len(read), 'file')}")
    console.print(head.append(f"; {_counted(len(report.results), 'rule')}, {report.seconds:.2f} s"), soft_wrap=True)
    for result in report.results:
        crash = result.reason if result.status is Status.ERROR else result.crash
        if crash is not None:
            console.print(Text(f"{result.id} {result.name} crashed {crash}", style="magenta"), soft_wrap=True)
    _draw_skipped(report, console, verbose=verbose, quiet=quiet)
    fixable = sum(
        one.stands and bool(one.evidence.get("fixable")) for result in report.results for one in result.findings
    )
    if fixable and not quiet:
        console.print(f"{fixable} of them can be mended: --fix (--diff shows how)")


def _draw_skipped(report: Report, console: Console, *, verbose: bool, quiet: bool) -> None:
    skipped = [one for one in report.inputs if one.skipped is not None]
    if quiet:
        if skipped:
            console.print(Text(f"passed over: {some([one.path for one in skipped])}", style="magenta"), soft_wrap=True)
        return
    for one in report.inputs:
        for note in one.notes or ():
            console.print(Text(f"{one.path}: {note}", style="magenta"), soft_wrap=True)
    told = skipped if verbose else [one for one in skipped if one.decisive is True][:_MOST_SKIPPED]
    for one in told:
        console.print(Text(f"passed over {one.path}: {one.skipped}", style="magenta"), soft_wrap=True)
    if rest := [one.path for one in skipped if one not in told]:
        console.print(
            Text(f"{_counted(len(rest), 'file')} passed over: {some(rest)} (--verbose says why)", style="dim"),
            soft_wrap=True,
        )


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"

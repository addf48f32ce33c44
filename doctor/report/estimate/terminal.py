"""An estimate in a terminal: for somebody who wants to choose a batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.core.report_document import Report
from doctor.core.text import byte_size
from doctor.estimate.data_model import Estimate
from doctor.report.estimate.wording import (
    SUGGESTION_HEADER,
    MemoryRow,
    all_notes,
    batch_words,
    conclusion,
    headline,
    host_words,
    measured_cells,
    measured_head,
    part_rows,
    percent,
    suggestion_cells,
    title_words,
    when_words,
)
from doctor.report.formatting import counts_line, spelt_out
from doctor.report.rich_names import Console, Group, Padding, RenderableType, Table, Text
from doctor.report.terminal import NARROW, draw_findings

_COLOUR = {"pass": "green", "fail": "red", "inconclusive": "magenta"}
_BAR, _NARROW_BAR = 24, 8
"""Columns of a full bar."""


def draw_estimate(
    report: Report,
    estimate: Estimate,
    console: Console,
    *,
    verbose: bool = False,
    quiet: bool = False,
) -> str:
    """The answer as ``console`` would show it. ``quiet``: the first sentences and the findings; ``verbose``: which
    checks could not be judged, in full."""
    with console.capture() as paper:
        for part in _answer(report, estimate, console.width, quiet=quiet):
            console.print(part)
    findings = draw_findings(report, console)
    with console.capture() as tail:
        for line in _tail(report, estimate, verbose=verbose, quiet=quiet):
            console.print(line)
    found = f"\n{findings.rstrip()}\n" if findings.strip() else ""
    text = f"{paper.get()}{found}{tail.get()}"
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _answer(report: Report, estimate: Estimate, width: int, *, quiet: bool) -> Iterator[RenderableType]:
    narrow = width < NARROW
    if not quiet:
        yield Text(spelt_out(" · ".join([f"rankdoctor {report.tool.version}", *title_words(estimate)])), style="bold")
        yield Text()
    yield Text(headline(estimate), style=f"bold {_COLOUR[report.verdict]}")
    if batch_words(estimate):
        yield Text(batch_words(estimate))
    if quiet:
        return
    yield Text(when_words(estimate))
    yield Text()
    yield _parts(part_rows(estimate), narrow=narrow)
    if estimate.ways:
        yield Text()
        yield _table(SUGGESTION_HEADER, list(map(suggestion_cells, estimate.ways)), narrow=narrow)
    if estimate.measured:
        yield Text()
        yield _table(measured_head(estimate.measured), list(map(measured_cells, estimate.measured)), narrow=narrow)
        yield Text(conclusion(estimate.measured), style="bold")
    yield Text()
    yield Text(f"Host: {host_words(estimate.host)}.")


def _parts(rows: Sequence[MemoryRow], *, narrow: bool) -> RenderableType:
    most = max((row.size for row in rows), default=1)
    bar = _NARROW_BAR if narrow else _BAR
    table = Table.grid(padding=(0, 1))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for row in rows:
        drawn = _bar(row, bar * row.size / most)
        table.add_row(Text(row.label), Text(byte_size(row.size)), Text(percent(row.share), style="dim"), drawn)
    return Padding(table, (0, 0, 0, 0 if narrow else 2))


_EIGHTHS = " ▏▎▍▌▋▊▉"


def _bar(row: MemoryRow, columns: float) -> Text:
    """A bar of so many columns, to an eighth; memory that is free is a shadow."""
    if row.label == "free":
        return Text("░" * round(columns), style="dim")
    eighths = max(1, round(8 * columns))
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), style="cyan")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, narrow: bool) -> RenderableType:
    """A row each; in a narrow terminal the words take a line of their own."""
    if narrow:
        return Group(Text(f"{head[0]}:", style="dim"), *(line for row in rows for line in _stacked(head, row)))
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    for _ in head[1:]:
        table.add_column(justify="right")
    table.add_row(*(Text(word, style="dim") for word in head))
    for row in rows:
        table.add_row(*map(Text, map(spelt_out, row)))
    return Padding(table, (0, 0, 0, 2))


def _stacked(head: Sequence[str], row: Sequence[str]) -> Iterator[RenderableType]:
    yield Text(spelt_out(row[0]))
    values = ", ".join(f"{name} {value}" for name, value in zip(head[1:], row[1:], strict=True) if value != "-")
    if values:
        yield Padding(Text(spelt_out(values), style="dim"), (0, 0, 0, 2))


def _tail(report: Report, estimate: Estimate, *, verbose: bool, quiet: bool) -> Iterator[RenderableType]:
    if not quiet:
        for note in all_notes(estimate):
            yield Text(f"Note: {spelt_out(note)}.", style="dim")
        for line in not_judged(report, verbose=verbose):
            yield Text(line, style="dim")
        yield Text()
    verdict = Text.assemble((report.verdict, f"bold {_COLOUR[report.verdict]}"), f": {counts_line(report)}")
    yield verdict.append(f"; {estimate.seconds:.0f} s", style="dim")


def not_judged(report: Report, *, verbose: bool) -> Iterator[str]:
    """The checks of this report that could not say anything, by the reason; ``verbose``: the others, too."""
    reasons: dict[str, list[str]] = {}
    for result in report.results:
        if result.status.value == "unknown":
            reasons.setdefault(result.reason or "", []).append(result.id)
        elif verbose:
            yield f"{result.id} {result.name}: {result.status.value}{f', {result.reason}' if result.reason else ''}."
    for reason, ids in reasons.items():
        yield spelt_out(f"Not judged: {', '.join(ids)}: {reason}.")

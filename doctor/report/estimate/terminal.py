"""Draws an estimate in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.core.report_document import Report
from doctor.estimate.data_model import Estimate
from doctor.report.estimate.wording import (
    EstimateTable,
    MemoryRow,
    all_notes,
    batch_words,
    headline,
    host_words,
    part_rows,
    range_words,
    tables,
    title_words,
    unknown_checks,
    when_words,
)
from doctor.report.finding_lines import NARROW, draw_findings
from doctor.report.formatting import spelt_out
from doctor.report.rich_names import Console, Group, Padding, RenderableType, Table, Text
from doctor.report.terminal import VERDICT_COLORS, look_of_console, verdict_text


def draw_estimate(
    report: Report,
    estimate: Estimate,
    console: Console,
    *,
    verbose: bool = False,
    quiet: bool = False,
) -> str:
    """Return the answer as ``console`` would show it.

    ``quiet``: only the first sentences and the findings; ``verbose``: the status of every check."""
    with console.capture() as answer:
        console.print(Group(*_answer(report, estimate, console.width, quiet=quiet)))
    findings = draw_findings(report, look_of_console(console))
    with console.capture() as summary:
        console.print(Group(*_summary(report, estimate, verbose=verbose, quiet=quiet)))
    found = f"\n{findings.rstrip()}\n" if findings.strip() else ""
    text = f"{answer.get()}{found}{summary.get()}"
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _answer(report: Report, estimate: Estimate, width: int, *, quiet: bool) -> Iterator[RenderableType]:
    narrow = width < NARROW
    if not quiet:
        yield Text(spelt_out(" · ".join([f"rankdoctor {report.tool.version}", *title_words(estimate)])), style="bold")
        yield Text()
    yield Text(headline(estimate), style=f"bold {VERDICT_COLORS[report.verdict]}")
    if batch_words(estimate):
        yield Text(batch_words(estimate))
    if quiet:
        return
    yield Text(when_words(estimate))
    yield Text(range_words(estimate))
    yield Text()
    yield _parts(part_rows(estimate), narrow=narrow)
    for table in tables(estimate):
        yield Text()
        yield _table(table, narrow=narrow)
        if table.conclusion is not None:
            yield Text(table.conclusion, style="bold")
    yield Text()
    yield Text(host_words(estimate.host))


def _parts(rows: Sequence[MemoryRow], *, narrow: bool) -> RenderableType:
    most = max((row.size for row in rows), default=1)
    columns = 8 if narrow else 24
    table = Table.grid(padding=(0, 1))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for row in rows:
        label, size, share = row.cells
        table.add_row(Text(label), Text(size), Text(share, style="dim"), _bar(row, columns * row.size / most))
    return Padding(table, (0, 0, 0, 0 if narrow else 2))


def _bar(row: MemoryRow, columns: float) -> Text:
    """Return a bar, rounded to eighths of a column; free memory is shaded."""
    if row.label == "free":
        return Text("░" * round(columns), style="dim")
    eighths = max(1, round(8 * columns))
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style="cyan")


def _table(table: EstimateTable, *, narrow: bool) -> RenderableType:
    """Return the table; in a narrow terminal, the numbers of a row are below its first cell."""
    if narrow:
        return Group(Text(f"{table.head[0]}:", style="dim"), *_stacked(table))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    for _ in table.head[1:]:
        grid.add_column(justify="right")
    grid.add_row(*(Text(word, style="dim") for word in table.head))
    for row in table.rows:
        grid.add_row(*map(Text, map(spelt_out, row)))
    return Padding(grid, (0, 0, 0, 2))


def _stacked(table: EstimateTable) -> Iterator[RenderableType]:
    for first, *rest in table.rows:
        yield Text(spelt_out(first))
        values = ", ".join(f"{name} {value}" for name, value in zip(table.head[1:], rest, strict=True) if value != "-")
        if values:
            yield Padding(Text(spelt_out(values), style="dim"), (0, 0, 0, 2))


def _summary(report: Report, estimate: Estimate, *, verbose: bool, quiet: bool) -> Iterator[RenderableType]:
    if not quiet:
        for note in all_notes(estimate):
            yield Text(f"Note: {spelt_out(note)}.", style="dim")
        for line in unknown_checks(report, verbose=verbose):
            yield Text(line, style="dim")
        yield Text()
    yield verdict_text(report).append(f"; {estimate.seconds:.0f} s", style="dim")

"""An estimate as Markdown: for an issue, a merge request or a ticket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.core.report_document import Report
from doctor.core.text import byte_size
from doctor.estimate.data_model import Estimate
from doctor.report.estimate.terminal import not_judged
from doctor.report.estimate.wording import (
    SUGGESTION_HEADER,
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
from doctor.report.formatting import cell, line_of, printable


def render_estimate_markdown(report: Report, estimate: Estimate) -> str:
    """The answer and the findings as a page."""
    return "\n".join(_lines(printable(report), estimate)) + "\n"


def _lines(report: Report, estimate: Estimate) -> Iterator[str]:
    yield f"# rankdoctor estimate: {report.verdict}"
    yield f"\n**{line_of(headline(estimate))}**"
    yield f"\n{line_of(' '.join(filter(None, [batch_words(estimate), when_words(estimate)])))}"
    yield f"\n{line_of(' · '.join(title_words(estimate)))}\n"
    rows = [(row.label, byte_size(row.size), percent(row.share)) for row in part_rows(estimate)]
    yield from _table(("at the peak", "bytes", "share"), rows)
    if estimate.ways:
        yield ""
        yield from _table(SUGGESTION_HEADER, list(map(suggestion_cells, estimate.ways)))
    if estimate.measured:
        yield ""
        yield from _table(measured_head(estimate.measured), list(map(measured_cells, estimate.measured)))
        yield f"\n{line_of(conclusion(estimate.measured))}"
    yield f"\nHost: {line_of(host_words(estimate.host))}."
    yield from _findings(report)
    notes = [*all_notes(estimate), *not_judged(report, verbose=False)]
    if notes:
        yield ""
        yield from (f"- {line_of(note)}" for note in notes)


def _findings(report: Report) -> Iterator[str]:
    for result in report.results:
        for finding in result.findings:
            word = f"ignored: {finding.ignored.reason}" if finding.ignored else finding.severity.value
            yield f"\n### {result.id} {line_of(result.name)}: {line_of(word)}"
            yield f"\n{line_of(finding.summary)}"
            words = {"effect": finding.effect, "fix": finding.fix}
            yield "".join(f"\n- {name}: {line_of(text)}" for name, text in words.items() if text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(head)
    yield _row(["---", *["---:"] * (len(head) - 1)])
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"

"""Renders an estimate as Markdown, for an issue, a merge request or a ticket."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.core.report_document import Report
from doctor.estimate.data_model import Estimate
from doctor.report.estimate.wording import (
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
from doctor.report.formatting import line_of, markdown_table, printable


def render_estimate_markdown(report: Report, estimate: Estimate) -> str:
    """Return the estimate and the findings as a page."""
    return "\n".join(_lines(printable(report), estimate)) + "\n"


def _lines(report: Report, estimate: Estimate) -> Iterator[str]:
    yield f"# rankdoctor estimate: {report.verdict}"
    yield f"\n**{line_of(headline(estimate))}**"
    yield f"\n{line_of(' '.join(filter(None, [batch_words(estimate), when_words(estimate), range_words(estimate)])))}"
    yield f"\n{line_of(' · '.join(title_words(estimate)))}\n"
    rows = (row.cells for row in part_rows(estimate))
    yield from markdown_table(("at the peak", "size", "share"), rows, rule="---:")
    for table in tables(estimate):
        yield ""
        yield from markdown_table(table.head, table.rows, rule="---:")
        if table.conclusion is not None:
            yield f"\n{line_of(table.conclusion)}"
    yield f"\n{line_of(host_words(estimate.host))}"
    yield from _findings(report)
    notes = [*all_notes(estimate), *unknown_checks(report)]
    if notes:
        yield ""
        yield from (f"- {line_of(note)}" for note in notes)


def _findings(report: Report) -> Iterator[str]:
    for result in report.results:
        for finding in result.findings:
            word = f"ignored: {finding.ignored.reason}" if finding.ignored else finding.severity.value
            yield f"\n### {result.id} {line_of(result.name)}: {line_of(word)}"
            yield f"\n{line_of(finding.summary)}"
            parts = {"impact": finding.effect, "fix": finding.fix}
            yield "".join(f"\n- {name}: {line_of(text)}" for name, text in parts.items() if text)

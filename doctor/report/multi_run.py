"""Renders the reports on several runs: a line for each run, then each report by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from doctor.core.job import Job
from doctor.core.report_document import RunReports
from doctor.report.formatting import as_json, cell, markdown_table, spelt_out
from doctor.report.machine_formats import junit_document, render_github
from doctor.report.markdown import render_markdown
from doctor.report.narrative import headline


class JudgedRuns(NamedTuple):
    """The report on each run, and the facts it is based on, in the same order."""

    document: RunReports
    jobs: Sequence[Job]

    def lines(self) -> list[str]:
        """Return the verdict of each run in a line, as a table in plain text."""
        runs = self.document.runs
        width = max(len(spelt_out(run.name)) for run in runs)
        rows = ((run.report.verdict, spelt_out(run.name), spelt_out(headline(run.report))) for run in runs)
        return [f"{verdict:12}  {name:{width}}  {sentence}" for verdict, name, sentence in rows]

    def title(self) -> str:
        """Return how many runs there are."""
        return f"{len(self.document.runs)} runs were found. Each has its own verdict; nothing is linked between them."


def render_several(judged: JudgedRuns, form: str) -> str:
    """Return the reports in a format other than text, which :func:`doctor.report.terminal.draw_several` draws."""
    document = judged.document
    if form == "json":
        return as_json(document) + "\n"
    if form == "junit":
        return junit_document(((f"{run.name}: ", run.report) for run in document.runs), document.seconds)
    if form == "github":
        return "".join(render_github(run.report, f"{run.name}: ") for run in document.runs)
    return _html(judged) if form == "html" else _markdown(judged)


def _markdown(judged: JudgedRuns) -> str:
    rows = ((spelt_out(run.name), run.report.verdict, spelt_out(headline(run.report))) for run in judged.document.runs)
    lines = [f"{judged.title()}\n", *markdown_table(("run", "verdict", "what happened"), rows)]
    for run, job in zip(judged.document.runs, judged.jobs, strict=True):
        lines += [f"\n# {cell(spelt_out(run.name))}\n", render_markdown(run.report, job)]
    return "\n".join(lines)


def _html(judged: JudgedRuns) -> str:
    """Return one page that holds the page of each run in a frame of its own origin."""
    from markupsafe import escape

    from doctor.report.html.document import environment, render_html

    runs = [
        (run.name, run.report.verdict, headline(run.report), escape(render_html(run.report, job)))
        for run, job in zip(judged.document.runs, judged.jobs, strict=True)
    ]
    return environment().get_template("several.html.jinja").render(title=judged.title(), runs=runs) + "\n"

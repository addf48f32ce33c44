"""Renders the reports on several runs: a line for each run, then each report by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        return [
            f"{run.report.verdict:12}  {spelt_out(run.name):{width}}  {spelt_out(headline(run.report))}" for run in runs
        ]

    def title(self) -> str:
        """Return how many runs there are."""
        return f"{len(self.document.runs)} runs were found. Each has its own verdict; nothing is linked between them."


def render_several_json(judged: JudgedRuns) -> str:
    """Return one document with the worst verdict and the report of each run."""
    return as_json(judged.document) + "\n"


def render_several_junit(judged: JudgedRuns) -> str:
    """Return the suites of all runs, each named after its run."""
    runs = judged.document.runs
    return junit_document(((f"{run.name}: ", run.report) for run in runs), judged.document.seconds)


def render_several_github(judged: JudgedRuns) -> str:
    """Return the annotations of all runs; each message starts with the name of its run."""
    return "".join(render_github(run.report, f"{run.name}: ") for run in judged.document.runs)


def render_several_markdown(judged: JudgedRuns) -> str:
    """Return a table of the verdicts, and the report of each run."""
    rows = ((spelt_out(run.name), run.report.verdict, spelt_out(headline(run.report))) for run in judged.document.runs)
    lines = [f"{judged.title()}\n", *markdown_table(("run", "verdict", "what happened"), rows)]
    for run, job in zip(judged.document.runs, judged.jobs, strict=True):
        lines += [f"\n# {cell(spelt_out(run.name))}\n", render_markdown(run.report, job)]
    return "\n".join(lines)


def render_several_html(judged: JudgedRuns) -> str:
    """Return one page that holds the page of each run in a frame of its own origin."""
    from markupsafe import escape

    from doctor.report.html.document import environment, render_html

    runs = [
        (run.name, run.report.verdict, headline(run.report), escape(render_html(run.report, job)))
        for run, job in zip(judged.document.runs, judged.jobs, strict=True)
    ]
    return environment().get_template("several.html.jinja").render(title=judged.title(), runs=runs) + "\n"


SEVERAL_FORMATS: dict[str, Callable[[JudgedRuns], str]] = {
    "json": render_several_json,
    "markdown": render_several_markdown,
    "html": render_several_html,
    "junit": render_several_junit,
    "github": render_several_github,
}
"""Format -> function from the reports on several runs to text. ``text`` is drawn by
:func:`doctor.report.terminal.draw_several`."""

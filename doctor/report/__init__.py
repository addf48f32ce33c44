"""Reports of findings: text, an HTML page with charts, Markdown, JSON, JUnit and GitHub annotations."""

from __future__ import annotations

from doctor.report.machine_formats import render_github, render_json, render_junit
from doctor.report.markdown import render_markdown

MACHINE_FORMATS = {
    "json": render_json,
    "markdown": render_markdown,
    "junit": render_junit,
    "github": render_github,
}
"""Format -> function that renders a report. :mod:`doctor.report.terminal` draws ``text``, and
:mod:`doctor.report.html.document` renders ``html``; ``html`` and ``markdown`` show more if they get the job, too."""

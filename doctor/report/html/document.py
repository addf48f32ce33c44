"""The report as one page: no network, readable by people and screen readers, printable, with charts.

What was read from a job is text and never markup: the templates escape it, control characters are spelt out, data for
the charts stand in a block that no browser runs, and the page's policy allows no script but its own.
"""

from __future__ import annotations

import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from doctor.core.facts import LogEvidence
from doctor.core.finding import Severity, Status
from doctor.core.job import UNKNOWN_HOST, Job
from doctor.core.report_document import Report, ReportFinding
from doctor.core.text import byte_size
from doctor.report.formatting import (
    counts_line,
    coverage_line,
    evidence_lines,
    fix_parts,
    place,
    printable,
    processes,
    ranges,
    some,
    spelt_out,
    state_of,
    states_of,
)
from doctor.report.html.assets import PAGE, as_json, asset, playbook, policy, prose
from doctor.report.html.charts.chart_data import chart_data
from doctor.report.html.charts.lanes import MARKS, SPANS
from doctor.report.html.charts.memory_and_pairs import memory_of, pairs_of
from doctor.report.html.charts.rank_timeline import timeline_of
from doctor.report.narrative import (
    LogQuote,
    Narrative,
    commands,
    confidence,
    evidence_overview_of,
    headline,
    lines_of_ranks,
    narrative_of,
    quotes,
    to_collect,
)
from doctor.report.rank_table import rank_rows, used_columns

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

WITHOUT_CHARTS = ("page.js",)
WITH_CHARTS = ("charts/echarts.min.js", "page.js", "charts.js", "shapes.js", "timeline.js", "memory.js", "pairs.js")
"""Scripts of a page; the library only where it draws something."""


def render_html(report: Report, job: Job | None = None) -> str:
    """The report as an HTML document. ``job``: the facts that were judged, for charts and the table of ranks; without
    them the report is told as far as it goes."""
    report = printable(report)
    story = narrative_of(report)
    timeline, memory, pairs = timeline_of(report, job), memory_of(report, job), pairs_of(job, report)
    data = chart_data(timeline, memory, pairs)
    rows = rank_rows(report, job)
    scripts = [asset(name) for name in (WITH_CHARTS if data else WITHOUT_CHARTS)]
    evidence = job.evidence if job is not None and job.evidence is not None else LogEvidence()
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            report=report,
            story=story,
            headline=headline(report),
            job_line=_job_line(report),
            started=_when(report.started),
            heard=_blamed_rank_lines(story, job),
            evidence_files=evidence.files,
            shifts=evidence.shifts,
            reading=evidence_overview_of(report),
            states=states_of(report),
            collect=to_collect(report) if report.primary is None else [],
            rows=rows,
            columns=used_columns(rows),
            timeline=timeline,
            memory=memory,
            pairs=pairs,
            pages=_pages(story),
            span_names=SPANS,
            mark_names=MARKS,
            policy=policy(scripts),
            style=asset("page.css"),
            scripts=scripts,
            data=as_json(data) if data else None,
        )
    )


def _blamed_rank_lines(story: Narrative, job: Job | None) -> list[LogQuote]:
    """What logs say of the ranks to blame, where the finding itself quotes no line."""
    if story.primary is None or quotes(story.primary.finding):
        return []
    return lines_of_ranks(job, story.primary.finding.ranks[:MOST_RANK_LINES])


MOST_RANK_LINES = 4
"""Ranks of which the lines are quoted."""


def _job_line(report: Report) -> str:
    if report.job is None:
        return ""
    launcher = "no launcher" if report.job.launcher == "none" else report.job.launcher
    hosts = [host.name for host in report.job.hosts if host.name != UNKNOWN_HOST]
    return " · ".join(filter(None, (processes(report), launcher, some(hosts, 3))))


def _when(started: str) -> str:
    """``2026-07-30 12:03:07 UTC``."""
    try:
        return datetime.datetime.fromisoformat(started).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return started


def days(begin: float, end: float) -> str:
    """``2026-07-30``, or the first and the last of several days."""
    first, last = (_moment(at) for at in (begin, end))
    if first is None or last is None:
        return ""
    return str(first.date()) if first.date() == last.date() else f"{first.date()} to {last.date()}"


def clock(at: float) -> str:
    """``12:03:07.250``, UTC."""
    moment = _moment(at)
    return "unknown" if moment is None else moment.strftime("%H:%M:%S.") + f"{moment.microsecond // 1000:03d}"


def _moment(at: float) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=byte_size,
        clock=clock,
        confidence=confidence,
        evidence=_plain_evidence,
        prose=prose,
        commands=commands,
        fix_parts=fix_parts,
        quotes=quotes,
        ranges=ranges,
    )
    environment.globals.update(
        place=place,
        state_of=state_of,
        days=days,
        counts_line=counts_line,
        coverage_line=coverage_line,
        Severity=Severity,
        Status=Status,
    )
    return environment


def _finalize(value: Any) -> Any:
    """Text of the job with its control characters spelt out; markup is only what this module made."""
    return spelt_out(value) if type(value) is str else value


def _plain_evidence(finding: ReportFinding) -> list[str]:
    """Evidence but for the lines that were read, which are quoted apart."""
    return evidence_lines({name: value for name, value in finding.evidence.items() if name != "said"})


def _pages(story: Narrative) -> dict[str, Markup]:
    """The playbook of every check that found something, as HTML, the primary one first."""
    told = [*([story.primary] if story.primary else ()), *story.followed, *story.others, *story.remarks]
    pages = {one.id: playbook(one.id) for one in told}
    return {name: page for name, page in pages.items() if page is not None}

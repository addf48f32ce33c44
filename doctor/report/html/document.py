"""Renders the report as one HTML page: offline, accessible to screen readers, printable, with charts.

Text of a job never becomes markup: templates and charts escape it and its control characters, and the page's content
security policy allows only its own scripts.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from functools import cache
from typing import TYPE_CHECKING

from doctor.core.facts import LogEvidence
from doctor.core.finding import Severity, Status
from doctor.core.job import Job
from doctor.core.report_document import Report, ReportFinding
from doctor.core.text import byte_size, ranges
from doctor.report.evidence_text import evidence_lines
from doctor.report.formatting import (
    CODE_EVIDENCE,
    code_excerpt,
    counts_line,
    coverage_line,
    fix_parts,
    job_words,
    place,
    printable,
    sentence,
    spelt_out,
    state_of,
    states_of,
)
from doctor.report.html.assets import PAGE, asset, playbook, policy, prose
from doctor.report.html.charts.memory_and_pairs import memory_of, pairs_of
from doctor.report.html.charts.rank_timeline import MARKS, MOST_ACTIVITIES, SPANS, timeline_of
from doctor.report.html.charts.svg import (
    lane_height,
    legend_of,
    memory_legend,
    memory_svg,
    pairs_svg,
    period_of,
    timeline_svg,
)
from doctor.report.html.rank_groups import rank_groups
from doctor.report.lost_time import (
    COLUMNS,
    MOST_RANKS,
    TITLE,
    cause_rows,
    largest_lines,
    lost_headline,
    lost_notes,
    rank_table,
)
from doctor.report.narrative import (
    LogQuote,
    commands,
    confidence,
    evidence_overview_of,
    headline,
    lines_of_ranks,
    narrative_of,
    quotes,
    shown_candidates,
    to_collect,
)
from doctor.report.rank_table import rank_rows, used_columns
from doctor.report.stacks import MOST_INDENT, call_rows, group_text, skipped_text

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

MOST_RANK_LINES = 4
"""Ranks whose log events are quoted."""


def render_html(report: Report, job: Job | None = None) -> str:
    """Return the report as an HTML document. ``job``: the facts, for charts and the table of ranks."""
    report = printable(report)
    story = narrative_of(report)
    timeline, memory, pairs = timeline_of(story, job), memory_of(story, job), pairs_of(story, job)
    rows = rank_rows(report, job)
    columns = used_columns(rows)
    scripts = [asset("page.js")]
    evidence = job.evidence if job is not None and job.evidence is not None else LogEvidence()
    heard: list[LogQuote] = []
    if story.primary is not None and not quotes(story.primary.finding):
        heard = lines_of_ranks(job, story.primary.finding.ranks[:MOST_RANK_LINES])
    started = report.started
    with contextlib.suppress(ValueError):
        started = datetime.datetime.fromisoformat(started).strftime("%Y-%m-%d %H:%M:%S UTC")
    pages = {one.id: playbook(one.id) for one in (*story.faults, *story.remarks)}
    template = environment().get_template("page.html.jinja")
    return template.render(
        report=report,
        story=story,
        headline=headline(report),
        candidates=shown_candidates(report, story),
        job_line=" · ".join(job_words(report)),
        started=started,
        heard=heard,
        evidence_files=evidence.files,
        shifts=evidence.shifts,
        reading=evidence_overview_of(report),
        states=states_of(report),
        collect=to_collect(report) if report.primary is None else [],
        ranks=rank_groups(rows, columns),
        columns=columns,
        calls=[row._replace(depth=min(row.depth, MOST_INDENT)) for row in call_rows(report.stacks)]
        if report.stacks
        else [],
        timeline=timeline,
        period=period_of(timeline) if timeline is not None else None,
        memory=memory,
        pairs=pairs,
        pages={name: page for name, page in pages.items() if page is not None},
        span_names=SPANS,
        mark_names=MARKS,
        policy=policy(scripts),
        style=asset("page.css"),
        scripts=scripts,
    )


def days(begin: float, end: float) -> str:
    """Return ``2026-07-30``, or the first and the last of several days."""
    first, last = (_moment(at) for at in (begin, end))
    if first is None or last is None:
        return ""
    return str(first.date()) if first.date() == last.date() else f"{first.date()} to {last.date()}"


def clock(at: float) -> str:
    """Return ``12:03:07.250``, in UTC."""
    moment = _moment(at)
    return "unknown" if moment is None else moment.strftime("%H:%M:%S.") + f"{moment.microsecond // 1000:03d}"


def clocks(between: tuple[float, float]) -> str:
    """Return a time, or the first and the last of several."""
    return " to ".join(dict.fromkeys(clock(at) for at in between))


def _moment(at: float) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


_SECTION = re.compile(
    r'<section id="([\w-]+)"[^>]{0,200}>\s*<h2[^>]{0,200}>((?:(?!</h2>|<span class="count">).){0,400})', re.DOTALL
)


def sections_of(body: Markup) -> list[tuple[str, str]]:
    """Return the id and the heading of each section of a page."""
    from doctor.report.html.assets import as_markup

    return [(found[1], as_markup(found[2]).striptags()) for found in _SECTION.finditer(body)]


@cache
def environment() -> Environment:
    """Return the environment of the page's templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def without_log_lines(finding: ReportFinding) -> list[str]:
        shown_elsewhere = {"said", *(CODE_EVIDENCE if code_excerpt(finding) is not None else ())}
        shown = {name: value for name, value in finding.evidence.items() if name not in shown_elsewhere}
        return evidence_lines(shown, finding.ranks)

    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: spelt_out(value) if type(value) is str else value,  # not markup
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=byte_size,
        code_excerpt=code_excerpt,
        lane_height=lane_height,
        legend_of=legend_of,
        memory_legend=memory_legend,
        memory_svg=memory_svg,
        pairs_svg=pairs_svg,
        sections=sections_of,
        timeline_svg=timeline_svg,
        clock=clock,
        clocks=clocks,
        confidence=confidence,
        evidence=without_log_lines,
        prose=prose,
        commands=commands,
        fix_parts=fix_parts,
        group_text=group_text,
        skipped_text=skipped_text,
        quotes=quotes,
        ranges=ranges,
        lost_headline=lost_headline,
        cause_rows=cause_rows,
        largest_lines=largest_lines,
        lost_ranks=rank_table,
        lost_notes=lost_notes,
    )
    environment.globals.update(
        place=place,
        state_of=state_of,
        days=days,
        counts_line=counts_line,
        coverage_line=coverage_line,
        sentence=sentence,
        lost_title=TITLE,
        lost_columns=COLUMNS,
        most_lost_ranks=MOST_RANKS,
        most_activities=MOST_ACTIVITIES,
        Severity=Severity,
        Status=Status,
    )
    return environment

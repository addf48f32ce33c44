"""Renders the report for an issue or a ticket: the verdict, the fix and the evidence; the rest is folded.

Text of the inputs is fenced or escaped, so that no line of a log becomes a link, a picture or a heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from doctor.core.finding import Status
from doctor.core.job import Job
from doctor.core.report_document import CheckResult, LostTime, RankStacks, Report
from doctor.core.text import counted
from doctor.report.evidence_text import evidence_lines
from doctor.report.formatting import (
    UNEXPLAINED,
    cell,
    counts_line,
    coverage_line,
    fix_parts,
    line_of,
    markdown_table,
    place,
    printable,
    sentence,
    spelt_out,
    state_of,
)
from doctor.report.lost_time import COLUMNS, TITLE, cause_rows, largest_lines, lost_headline, lost_notes, rank_table
from doctor.report.narrative import (
    CheckFinding,
    Narrative,
    commands,
    confidence,
    evidence_overview_of,
    headline,
    narrative_of,
    shown_candidates,
    to_collect,
)
from doctor.report.rank_table import rank_rows, used_columns
from doctor.report.stacks import MOST_INDENT, MOST_ROWS, call_rows, group_text, groups_title, ranks_text

MOST = 60_000
"""Characters of the page: a comment on GitHub may have 65,536."""
SHOWN = 3
"""Lines of evidence that are not folded."""
_ROOM_OF_FINDING = 6_000
"""Characters of the evidence of one finding; lines beyond them are cut."""
_LONGEST = 700
"""Characters of a line of evidence."""
_LEFT_OUT = "\n\n{} more are not shown; the HTML and JSON reports list all of them."
_LEAST_ROOM = 1_000
_ORDER = (Status.FAIL, Status.ERROR, Status.UNKNOWN, Status.SKIP, Status.PASS)
_FEW = 3
"""Checks with the same result that still get a row each."""


def render_markdown(report: Report, job: Job | None = None) -> str:
    """Return a page for an issue, a merge request or a ticket. ``job``: the facts, for the table of ranks."""
    report = printable(report)
    story = narrative_of(report)
    text = "\n".join([*_verdict(report, story), *_candidates(report, story), ""])
    for title, lines in _folds(report, story, job):
        text += _folded(title, lines, MOST - len(text))
    return text


def _verdict(report: Report, story: Narrative) -> Iterator[str]:
    yield f"# rankdoctor: {report.verdict}"
    yield f"\n**{line_of(headline(report))}**\n"
    if story.primary is None:
        counts = counts_line(report)
        yield f"{sentence(counts)} {sentence(coverage_line(report))}"
        yield from _overview(report)
        return
    primary, finding = story.primary, story.primary.finding
    where = line_of(place(finding, report))
    role = "Unexplained" if primary.id == UNEXPLAINED else "Most likely root cause"
    yield f"{role}: **{primary.id}** {line_of(primary.result.name)} · {where} · "
    yield f"confidence {confidence(finding)} · {counts_line(report)}"
    if lines := _lines(primary):
        yield f"\n{_fenced(lines[:SHOWN])}"
    if finding.fix:
        yield f"\n**Fix:** {line_of(fix_parts(finding.fix)[0])}"
    if commands(finding.fix):
        yield f"\n{_fenced(commands(finding.fix), 'sh')}"
    if finding.effect:
        yield f"\n**Impact:** {line_of(finding.effect)}"
    yield from _overview(report)


def _candidates(report: Report, story: Narrative) -> Iterator[str]:
    heading, causes = shown_candidates(report, story)
    if causes:
        yield f"\n**{heading}:**"
    for one in causes:
        yield f"\n- **{one.confidence:.2f}** {line_of(one.title)} ({line_of(one.id)})"
        for label, reasons in (("for", one.supports), ("against", one.against)):
            if reasons:
                yield f"  - {label}: {line_of('; '.join(reasons))[:_LONGEST]}"
        yield f"  - confirmed if {line_of(one.confirmed_by)}; try:\n\n{_fenced([one.next_command], 'sh')}"


def _overview(report: Report) -> Iterator[str]:
    reading = evidence_overview_of(report)
    if reading is None:
        return
    yield "\n" + "\n".join(f"- {line_of(fact)}" for fact in reading.facts)
    if reading.lines:
        quoted = (": ".join(filter(None, (one.place, one.who, one.text))) for one in reading.lines)
        yield f"\n{_fenced(list(quoted))}"
    if reading.more > 0:
        yield f"\nAnd {reading.more} more lines that look like errors."
    yield "\n**Collect next:**\n"
    yield "\n".join(f"- {line_of(way)}" for way in reading.collect)


def _lines(one: CheckFinding) -> list[str]:
    evidence = one.finding.evidence
    ordered = {name: evidence[name] for name in sorted(evidence, key=lambda name: name != "said")}
    return [" ".join(line.split())[:_LONGEST] for line in evidence_lines(ordered, one.finding.ranks)]


def _fenced(lines: Iterable[str], kind: str = "text") -> str:
    """Return the lines in a fence that is longer than any run of backticks in them."""
    body = "\n".join(lines)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return f"{fence}{kind}\n{body}\n{fence}"


def _folds(report: Report, story: Narrative, job: Job | None) -> Iterator[tuple[str, list[str]]]:
    if rest := _lines(story.primary)[SHOWN:] if story.primary else []:
        yield "Further evidence", [_fenced(rest)]
    if ways := to_collect(report) if report.primary is None else []:
        yield "Collect for the next run", [f"- {line_of(way)} ({ids})" for ids, way in ways]
    if report.stacks is not None and report.stacks.groups:
        yield groups_title(report.stacks).capitalize(), [_stacks(report.stacks)]
    if report.lost_time is not None:
        yield f"{TITLE}: {lost_headline(report.lost_time)}", _lost_time(report.lost_time)
    parts = (("Consequences", story.followed), ("Other findings", story.others), ("Info", story.remarks))
    for title, findings in parts:
        if findings:
            yield f"{title}: {len(findings)}", [_finding(one, report) for one in findings]
    if rows := _ranks(report, job):
        yield f"Ranks: {len(rows) - 2}", rows
    if report.inputs:
        read = sum(one.skipped is None for one in report.inputs)
        files = sorted(report.inputs, key=lambda one: one.skipped is None)
        cells = ((one.path, one.kind, one.skipped or "; ".join(one.notes or ())) for one in files)
        table = list(markdown_table(("file", "kind", "why skipped"), cells))
        yield f"Inputs: {read} of {counted(len(report.inputs), 'file')} read", table
    yield sentence(coverage_line(report)).rstrip("."), _checks(report.results)


def _stacks(stacks: RankStacks) -> str:
    groups = [f"{ranks_text(group.ranks)}: {group_text(group)}" for group in stacks.groups]
    rows = list(call_rows(stacks))
    calls = [f"{'  ' * min(row.depth, MOST_INDENT)}{row.ranks}  {row.place}" for row in rows[:MOST_ROWS]]
    return _fenced([*groups, *stacks.notes, "", *calls])


def _lost_time(lost: LostTime) -> list[str]:
    largest = [f"1. {line_of(what)}. {line_of(help_text)}" for what, help_text in largest_lines(lost)]
    return [
        *largest,
        "",
        *markdown_table(("cause", "rank-seconds", "share"), cause_rows(lost)),
        "",
        *(f"- {line_of(note)}" for note in lost_notes(lost)),
        "",
        *markdown_table(COLUMNS, rank_table(lost)),
    ]


def _folded(title: str, parts: list[str], room: int) -> str:
    """Return as many ``parts`` as there is room for, folded below ``title``."""
    head, tail = f"\n<details><summary>{cell(title)}</summary>\n\n", "\n\n</details>\n"
    left = room - len(head) - len(tail) - len(_LEFT_OUT) - 10
    kept: list[str] = []
    for part in parts:
        left -= len(part) + 1
        if left < 0:
            break
        kept.append(part)
    cut = len(parts) - len(kept)
    if room < _LEAST_ROOM:
        return ""
    return head + "\n".join(kept) + (_LEFT_OUT.format(cut) if cut else "") + tail


def _finding(one: CheckFinding, report: Report) -> str:
    finding = one.finding
    word = f"ignored: {finding.ignored.reason}, {finding.ignored.by}" if finding.ignored else finding.severity.value
    lines = [
        f"### {one.id} {line_of(one.result.name)}: {line_of(word)}",
        f"\n{line_of(finding.summary)}\n",
        f"- where: {line_of(place(finding, report))}; confidence {confidence(finding)}",
    ]
    if finding.explained_by:
        lines.append(f"- caused by: {finding.explained_by}")
    prose, below = fix_parts(finding.fix)
    words = {"impact": finding.effect, "fix": prose}
    lines += [f"- {name}: {line_of(text)}" for name, text in words.items() if text]
    lines += [f"\n{_fenced(below, 'sh')}"] if below else []
    evidence = _lines(one)
    while sum(map(len, evidence)) > _ROOM_OF_FINDING:
        evidence.pop()
    return "\n".join([*lines, *([f"\n{_fenced(evidence)}"] if evidence else []), ""])


def _ranks(report: Report, job: Job | None) -> list[str]:
    rows = rank_rows(report, job)
    if not rows:
        return []
    columns = used_columns(rows)
    head = ["rank", *columns.values(), *(["findings"] if any(row.findings for row in rows) else [])]
    body = (
        [str(row.rank), *(spelt_out(getattr(row, name).text) for name in columns), ", ".join(row.findings)][: len(head)]
        for row in rows
    )
    return list(markdown_table(head, body))


def _checks(results: Iterable[CheckResult]) -> list[str]:
    """Return the table of the checks, failed and unknown ones first; many with the same result share a row."""
    ordered = sorted(results, key=lambda result: _ORDER.index(result.status))
    same: dict[tuple[Status, str | None], list[str]] = {}
    for result in ordered:
        if result.status in (Status.PASS, Status.SKIP):
            same.setdefault((result.status, result.reason), []).append(result.id)
    shared = {key: ids for key, ids in same.items() if len(ids) > _FEW}
    rows = []
    for one in ordered:
        if (one.status, one.reason) not in shared:
            seen, why = f"{one.seen}/{one.expected}", one.crash or one.reason or ""
            rows.append((f"{one.id} {one.name}", state_of(one), seen, why))
    rows += ((", ".join(ids), status.value, "", reason or "") for (status, reason), ids in shared.items())
    return list(markdown_table(("check", "status", "seen", "reason"), rows))

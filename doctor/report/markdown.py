"""The report to paste into an issue or a ticket: the verdict, the way out and the lines that prove it; the rest folded.

What was read stands in fences or is escaped, so that no line of a log becomes a link, a picture or a heading.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from doctor.core.finding import Status
from doctor.core.job import Job
from doctor.core.report_document import CheckResult, Report
from doctor.report.formatting import (
    cell,
    counts_line,
    coverage_line,
    evidence_lines,
    fix_parts,
    line_of,
    place,
    printable,
    spelt_out,
    state_of,
)
from doctor.report.narrative import (
    CheckFinding,
    Narrative,
    commands,
    confidence,
    evidence_overview_of,
    headline,
    narrative_of,
    to_collect,
)
from doctor.report.rank_table import rank_rows, used_columns

MOST = 60_000
"""Characters of the whole: a comment on GitHub may have 65,536."""
SHOWN = 3
"""Lines of evidence that stand before the fold."""
_ROOM_OF_FINDING = 6_000
"""Characters of one finding; evidence that is longer is cut."""


def render_markdown(report: Report, job: Job | None = None) -> str:
    """A page for an issue, a merge request or a ticket. ``job``: the facts that were judged, for the table of ranks."""
    report = printable(report)
    story = narrative_of(report)
    text = "\n".join([*_verdict(report, story), ""])
    for title, lines in _folds(report, story, job):
        text += _folded(title, lines, MOST - len(text))
    return text


def _verdict(report: Report, story: Narrative) -> Iterator[str]:
    yield f"# rankdoctor: {report.verdict}"
    yield f"\n**{line_of(headline(report))}**\n"
    if story.primary is None:
        counts = counts_line(report)
        yield f"{counts[:1].upper()}{counts[1:]}. {coverage_line(report)}."
        yield from _read_of_run(report)
        return
    primary, finding = story.primary, story.primary.finding
    where = line_of(place(finding, report))
    yield f"Most likely root cause: **{primary.id}** {line_of(primary.result.name)} · {where} · "
    yield f"confidence {confidence(finding)} · {counts_line(report)}"
    lines = _lines(primary)
    if lines:
        yield f"\n{_fenced(lines[:SHOWN])}"
    if finding.fix:
        yield f"\n**Fix:** {line_of(fix_parts(finding.fix)[0])}"
    if commands(finding.fix):
        yield f"\n{_fenced(commands(finding.fix), 'sh')}"
    if finding.effect:
        yield f"\nIf it stays: {line_of(finding.effect)}"


def _read_of_run(report: Report) -> Iterator[str]:
    """What was read of a run whose outcome is unclear, and what to collect next."""
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


def _lines(told: CheckFinding) -> list[str]:
    """The evidence, the lines that were read first."""
    evidence = told.finding.evidence
    ordered = {name: evidence[name] for name in sorted(evidence, key=lambda name: name != "said")}
    return [" ".join(line.split())[:_LONGEST] for line in evidence_lines(ordered)]


_LONGEST = 700
"""Characters of a line of evidence."""
_TICKS = re.compile("`+")


def _fenced(lines: Iterable[str], kind: str = "text") -> str:
    """The lines between fences that none of them can close."""
    body = "\n".join(lines)
    fence = "`" * max(3, 1 + max(map(len, _TICKS.findall(body)), default=0))
    return f"{fence}{kind}\n{body}\n{fence}"


def _folds(report: Report, story: Narrative, job: Job | None) -> Iterator[tuple[str, list[str]]]:
    """What is folded: its title, and parts of which each can be left out with all after it."""
    rest = _lines(story.primary)[SHOWN:] if story.primary else []
    if rest:
        yield "Further evidence", [_fenced(rest)]
    ways = to_collect(report) if report.primary is None else []
    if ways:
        yield "To see more next time", [f"- {line_of(way)} ({ids})" for ids, way in ways]
    parts = (("What followed from it", story.followed), ("Other findings", story.others), ("Remarks", story.remarks))
    for title, told in parts:
        if told:
            yield f"{title}: {len(told)}", [_finding(one, report) for one in told]
    rows = _ranks(report, job)
    if rows:
        yield f"Ranks: {len(rows) - 2}", rows
    if report.inputs:
        yield f"What was read: {_read(report)}", _inputs(report)
    yield f"Checks: {coverage_line(report)}", _checks(report.results)


def _folded(title: str, parts: list[str], room: int) -> str:
    """``parts`` behind a line that opens them, as many as there is room for."""
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


_LEFT_OUT = "\n\n{} more are left out: the report as HTML or JSON has all of them."
_LEAST_ROOM = 1_000


def _finding(told: CheckFinding, report: Report) -> str:
    finding = told.finding
    word = f"ignored: {finding.ignored.reason}, {finding.ignored.by}" if finding.ignored else finding.severity.value
    lines = [
        f"### {told.id} {line_of(told.result.name)}: {line_of(word)}",
        f"\n{line_of(finding.summary)}\n",
        f"- where: {line_of(place(finding, report))}; confidence {confidence(finding)}",
    ]
    if finding.explained_by:
        lines.append(f"- because of: {finding.explained_by}")
    prose, below = fix_parts(finding.fix)
    words = {"effect": finding.effect, "fix": prose}
    lines += [f"- {name}: {line_of(text)}" for name, text in words.items() if text]
    lines += [f"\n{_fenced(below, 'sh')}"] if below else []
    evidence = _lines(told)
    while sum(map(len, evidence)) > _ROOM_OF_FINDING:
        evidence.pop()
    return "\n".join([*lines, *([f"\n{_fenced(evidence)}"] if evidence else []), ""])


def _ranks(report: Report, job: Job | None) -> list[str]:
    """The table of ranks, its head in the first two lines."""
    rows = rank_rows(report, job)
    if not rows:
        return []
    columns = used_columns(rows)
    named = any(row.findings for row in rows)
    head = ["rank", *columns.values(), *(["findings"] if named else [])]
    body = (
        [str(row.rank), *(getattr(row, name).text for name in columns), ", ".join(row.findings)][: len(head)]
        for row in rows
    )
    return [_row(head), _row(["---"] * len(head)), *map(_row, body)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell(spelt_out(text)) for text in cells) + " |"


def _read(report: Report) -> str:
    skipped = sum(one.skipped is not None for one in report.inputs)
    return f"{len(report.inputs) - skipped} of {len(report.inputs)} files"


def _inputs(report: Report) -> list[str]:
    """Files that were passed over first."""
    files = sorted(report.inputs, key=lambda one: one.skipped is None)
    head = [_row(("file", "kind", "not read, because")), _row(["---"] * 3)]
    return [*head, *(_row((one.path, one.kind, one.skipped or "; ".join(one.notes or ()))) for one in files)]


_ORDER = (Status.FAIL, Status.ERROR, Status.UNKNOWN, Status.SKIP, Status.PASS)


def _checks(results: Iterable[CheckResult]) -> list[str]:
    """All checks, those that found or lack something first."""
    ordered = sorted(results, key=lambda result: _ORDER.index(result.status))
    head = [_row(("check", "status", "seen", "reason")), _row(["---"] * 4)]
    alike = Counter((result.status, result.reason) for result in ordered if result.status in _DULL)
    many = {key for key, count in alike.items() if count > _FEW}
    rows = [_check(result) for result in ordered if (result.status, result.reason) not in many]
    return [*head, *rows, *(_many(key, ordered) for key in alike if key in many)]


_DULL = (Status.PASS, Status.SKIP)
_FEW = 3
"""Checks that ended alike and still take a line each."""


def _check(result: CheckResult) -> str:
    seen = f"{result.seen}/{result.expected}"
    return _row((f"{result.id} {result.name}", state_of(result), seen, result.crash or result.reason or ""))


def _many(key: tuple[Status, str | None], results: Iterable[CheckResult]) -> str:
    ids = [result.id for result in results if (result.status, result.reason) == key]
    return _row((", ".join(ids), key[0].value, "", key[1] or ""))

"""Compares two reports."""

from __future__ import annotations

from collections.abc import Iterable

from doctor.core.diff.captures import ORDER, Difference, Weight
from doctor.core.report_document import Report, ReportFinding


def compare_reports(before: Report, after: Report) -> list[Difference]:
    """The differences between two reports: the verdict, the root cause, findings that appeared or disappeared, and
    checks that became or ceased to be applicable."""
    found = [
        Difference("report", name, old, new, "high", ())
        for name, old, new in (
            ("verdict", before.verdict, after.verdict),
            ("primary", before.primary, after.primary),
        )
        if old != new
    ]
    weights: dict[str, Weight] = {"error": "high", "warning": "medium", "info": "low"}
    for check in sorted({one.id for one in (*before.results, *after.results)}):
        old, new = before.result(check), after.result(check)
        gone, came = _apart(old.findings if old else (), new.findings if new else ())
        for one in gone:
            found.append(Difference("finding", check, one.summary, None, weights[one.severity.value], one.ranks))
        for one in came:
            found.append(Difference("finding", check, None, one.summary, weights[one.severity.value], one.ranks))
        states = tuple(one.status.value if one else None for one in (old, new))
        if states[0] != states[1] and not (gone or came):
            found.append(Difference("check", check, states[0], states[1], "low", ()))
    return sorted(found, key=lambda one: (ORDER[one.weight], one.section != "report", one.path))


def _apart(
    before: Iterable[ReportFinding], after: Iterable[ReportFinding]
) -> tuple[list[ReportFinding], list[ReportFinding]]:
    """Findings that only one of them has. Numbers in their text may differ, the ranks and hosts at fault may not."""
    old, new = ({_key(one): one for one in findings if one.stands} for findings in (before, after))
    return [old[key] for key in old if key not in new], [new[key] for key in new if key not in old]


def _key(finding: ReportFinding) -> tuple[object, ...]:
    words = "".join("#" if letter.isdigit() else letter for letter in finding.summary)
    return (finding.severity, finding.ranks, "#".join(part for part in words.split("#") if part))

"""Compares two reports."""

from __future__ import annotations

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
        # Numbers in the text of a finding may differ, the ranks and hosts at fault may not.
        was, now = ({_key(one): one for one in side.findings if one.stands} if side else {} for side in (old, new))
        changed = was.keys() ^ now.keys()
        for key, one in (*was.items(), *now.items()):
            if key in changed:
                gone, came = (one.summary, None) if key in was else (None, one.summary)
                found.append(Difference("finding", check, gone, came, weights[one.severity.value], one.ranks))
        states = tuple(one.status.value if one else None for one in (old, new))
        if states[0] != states[1] and not changed:
            found.append(Difference("check", check, states[0], states[1], "low", ()))
    return sorted(found, key=lambda one: (ORDER[one.weight], one.section != "report", one.path))


def _key(finding: ReportFinding) -> tuple[object, ...]:
    words = "".join("#" if letter.isdigit() else letter for letter in finding.summary)
    return (finding.severity, finding.ranks, "#".join(part for part in words.split("#") if part))

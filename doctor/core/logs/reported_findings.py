"""Findings that rankdoctor itself reported during the run, as logs contain them."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.core.facts import Event
from doctor.core.finding import Finding, Severity
from doctor.core.job import Job
from doctor.core.logs.event_groups import SYMPTOMS, EventGroup, finding_from_logs
from doctor.core.text import lazy_compile

KIND = "doctor.finding"
_HINT = lazy_compile(r" \((?:see|the way out): ")
"""What follows a summary in the message of an exception, in the current and in an earlier wording."""
MOST_RANKS = 4096
"""Maximum number of ranks that one finding names."""


def reported_findings(job: Job, check_id: str) -> Iterator[Finding]:
    """The findings of this check that a log contains, each claim once."""
    claims: dict[tuple[int, ...], list[Event]] = {}
    reported = [event for event in (job.evidence.of(KIND) if job.evidence else ()) if event.value("id") == check_id]
    # An exception and a summary repeat what was reported before, and may not name the ranks.
    for event in sorted(reported, key=lambda one: not (one.value("ranks") or _place(one)[1])):
        ranks = _numbers(event.value("ranks") or _place(event)[1])
        claims.setdefault(ranks if ranks or not claims else next(iter(claims)), []).append(event)
    for ranks, events in claims.items():
        is_warning = all(event.value("severity") == "warning" for event in events)
        yield finding_from_logs(
            EventGroup(KIND, tuple(events)),
            f"{_place(events[0])[0] or 'found'} (reported by the doctor in the run)",
            ranks=ranks,
            severity=Severity.WARNING if is_warning else Severity.ERROR,
            symptoms=not is_warning and check_id not in SYMPTOMS,
        )


def _place(event: Event) -> tuple[str, str]:
    """The claim, and the ranks in the location that may follow it: "… (rank 1 (node2))"."""
    summary = _HINT.split(event.value("summary") or "", maxsplit=1)[0]
    claim, found, place = summary.rpartition(" (rank")
    if not found or not summary.endswith(")"):
        return summary, ""
    return claim, place.removeprefix("s").strip().partition(" ")[0].rstrip(")")


def _numbers(text: str) -> tuple[int, ...]:
    """Parse ``0-2,5``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and len(first) < 8 and (last.isdecimal() or not last) and len(last) < 8:
            found.update(range(int(first), min(int(last or first), int(first) + MOST_RANKS) + 1))
    return tuple(sorted(found))[:MOST_RANKS]

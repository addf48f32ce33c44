"""Findings of messages that are known from the source code of other software (:mod:`doctor.knowledge`).

They are a second choice: a line that a check quotes is explained by that check.
"""

from __future__ import annotations

from collections.abc import Collection

from doctor.core.finding import Finding
from doctor.core.job import Job
from doctor.core.logs.event_groups import SYMPTOMS, EventGroup, event_groups, finding_from_logs, quoted_places
from doctor.core.text import lazy_compile

KIND = "software.check"
LIBRARY_ERROR = "RUN018"
"""The check of failures that no other check covers."""
CONFIDENCE = 0.7
"""The message names what failed, but nothing was read from its values."""
Place = tuple[str, int]
_RANK = lazy_compile(r"^\[(?:rank|default)\d{1,6}\]: ?")
"""What torchrun writes before the lines of a rank."""


def software_findings(job: Job, quoted: Collection[Place]) -> dict[str, list[Finding]]:
    """The findings of each check by such messages, one for each message of a component, without quoted lines."""
    found: dict[str, list[Finding]] = {}
    for group in event_groups(job, KIND, by=("about", "component", "message")):
        unquoted = tuple(event for event in group.events if (event.file, event.line) not in quoted)
        check_id = group.value("about") or ""
        if unquoted:
            finding = finding_from_logs(
                EventGroup(KIND, unquoted),
                f"{group.value('component')} reported: {_RANK.sub('', group.value('said') or '')}",
                evidence={"component": group.value("component")},
                confidence=CONFIDENCE,
                symptoms=check_id not in SYMPTOMS,
            )
            found.setdefault(check_id, []).append(finding)
    return found


def is_of_source(finding: Finding) -> bool:
    """Whether a finding of :data:`LIBRARY_ERROR` only says which component failed, and no pattern declares it."""
    return "component" in finding.evidence


def is_quoted(finding: Finding, quoted: Collection[Place]) -> bool:
    """Whether other findings quote all lines of a finding."""
    places = quoted_places((finding,))
    return bool(places) and places <= frozenset(quoted)

"""Findings of messages that are known from the source code of other software (:mod:`doctor.knowledge`)."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.core.finding import Finding
from doctor.core.job import Job
from doctor.core.logs.event_groups import SYMPTOMS, event_groups, finding_from_logs

KIND = "software.check"
CONFIDENCE = 0.7
"""The message names what failed, but nothing was read from its values."""


def software_findings(job: Job, check_id: str) -> Iterator[Finding]:
    """The findings of a check by such messages, one for each message of a component."""
    for group in event_groups(job, KIND, by=("about", "component", "message")):
        if group.value("about") == check_id:
            yield finding_from_logs(
                group,
                f"{group.value('component')} reported: {group.value('said')}",
                evidence={"component": group.value("component")},
                confidence=CONFIDENCE,
                symptoms=check_id not in SYMPTOMS,
            )

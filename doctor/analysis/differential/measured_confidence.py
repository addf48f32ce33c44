"""The confidence of a primary finding from logs: how often such a finding was right in public failure texts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from doctor.core.report_document import CheckResult, ReportFinding
from doctor.knowledge import candidate_causes

LEVELS = (0.9, 0.7, 0.5, 0.0)
"""Lower bounds of the levels of confidence that a check states, each counted alone."""
SMOOTHING = 1.0
"""Texts added to the counts of an id, as often right as those of all ids at its level. Of 1, 2,
3, 4 and 8 this gives the least squared error in cross-validation."""

WITHOUT_CAUSE = 0.3
"""A check states less if its finding is that the cause is not in the logs. How often that was the right answer says
nothing about the cause."""


def measured_confidence(check: str, stated: float) -> float:
    """The share of public failure texts in which a primary finding of ``check`` was right, smoothed.

    ``stated``: the confidence that the check gives, which is returned if nothing was counted, or if it is below
    :data:`WITHOUT_CAUSE`."""
    counts = candidate_causes.answer_counts().get(level_of(stated), {})
    of_level, cases = counts.get("", (0, 0))
    if not cases or stated < WITHOUT_CAUSE:
        return stated
    right, number = counts.get(check, (0, 0))
    return round((right + SMOOTHING * of_level / cases) / (number + SMOOTHING), 2)


def level_of(stated: float) -> str:
    """The level of a confidence, as in the counts: ``"0.7"``."""
    return str(next(least for least in LEVELS if stated >= least))


def with_measured_confidence(results: Sequence[CheckResult], primary: str | None) -> tuple[CheckResult, ...]:
    """``results`` of logs alone, with the measured confidence in the primary findings."""
    return tuple(
        msgspec.structs.replace(one, findings=tuple(_measured(one.id, finding) for finding in one.findings))
        if one.id == primary
        else one
        for one in results
    )


def _measured(check: str, finding: ReportFinding) -> ReportFinding:
    if not finding.stands or finding.explained_by:
        return finding
    return msgspec.structs.replace(finding, confidence=measured_confidence(check, finding.confidence))

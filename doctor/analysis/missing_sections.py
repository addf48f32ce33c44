"""Verdicts about ranks that lack a section, for a check that also judges ranks without it."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.core.facts import MissingReason, Section
from doctor.core.finding import Skip, Unknown
from doctor.core.job import Job


def lacking_verdicts(job: Job, section: type[Section]) -> Iterator[Skip | Unknown]:
    """An unknown for ranks whose section could not be read; a skip if no rank has it and none could have it.

    The runner does the same for the sections that a check needs."""
    absent, reason = 0, ""
    for identical, reasons in job.lacking((section,)):
        missing = reasons[0]
        if missing.lack is MissingReason.ABSENT:
            absent, reason = absent + len(identical.members), missing.reason
        else:
            yield Unknown(missing.reason, identical.ranks, missing.unhide)
    if absent == len(job.ranks):
        yield Skip(reason)

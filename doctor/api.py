"""Everything that a check may import. A test pins these names: guests build on them."""

from __future__ import annotations

from doctor.cases import Sick, Sketch, Well, healthy
from doctor.check import Check, check
from doctor.facts import *  # noqa: F403
from doctor.facts import __all__ as _facts
from doctor.finding import Finding, Scope, Severity, Skip, Source, Status, Unknown, Verdict
from doctor.job import Alike, Facts, Group, Host, Job, LocalRanks, Rank

__all__ = [
    *_facts,
    "Alike",
    "Check",
    "Facts",
    "Finding",
    "Group",
    "Host",
    "Job",
    "LocalRanks",
    "Rank",
    "Scope",
    "Severity",
    "Sick",
    "Sketch",
    "Skip",
    "Source",
    "Status",
    "Unknown",
    "Verdict",
    "Well",
    "check",
    "healthy",
]

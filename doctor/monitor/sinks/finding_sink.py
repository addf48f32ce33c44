"""What every outlet of a run can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.report_document import CheckResult, Report, ReportFinding


@dataclass(frozen=True)
class FindingEvent:
    """A finding that was not known before, and the check that it comes from. ``is_implied``: people were told its cause
    before, and it adds nothing to that."""

    result: CheckResult
    finding: ReportFinding
    is_implied: bool = False

    @property
    def is_loud(self) -> bool:
        """Whether people are to be told at once: it stands, says more than they know, and is more than good to know."""
        return self.finding.stands and not self.is_implied and self.finding.severity is not Severity.INFO


class FindingSink(Protocol):
    """Somewhere that findings go. It may raise what its medium raises; whoever tells it is on guard."""

    def found(self, news: Sequence[FindingEvent], report: Report) -> None:
        """Something new. ``report``: the run's whole report so far."""

    def round(self, job: Job, report: Report) -> None:
        """The job was judged once more."""

    def ended(self, report: Report) -> None:
        """The run is over, whichever way."""

    def close(self) -> None:
        """Give back what is held."""

"""The interface of the sinks of a run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.report_document import CheckResult, Report, ReportFinding


class FindingEvent(msgspec.Struct, frozen=True):
    """A new finding and the result that it belongs to.

    ``is_implied``: its cause was reported before, and it adds nothing to that.
    """

    result: CheckResult
    finding: ReportFinding
    is_implied: bool = False

    @property
    def is_loud(self) -> bool:
        """Whether to report it at once: it stands, is not implied and is more severe than info."""
        return self.finding.stands and not self.is_implied and self.finding.severity is not Severity.INFO


class FindingSink:
    """A destination for findings, which ignores them by default; its caller handles exceptions."""

    def found(self, events: Sequence[FindingEvent], report: Report) -> None:
        """Handle new findings. ``report``: the whole report of the run so far."""

    def round(self, job: Job, report: Report) -> None:
        """Handle a round of evaluation."""

    def ended(self, report: Report) -> None:
        """Handle the end of the run."""

    def close(self) -> None:
        """Release all resources."""

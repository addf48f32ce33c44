"""Findings as Python warnings, for programs that filter, log or count them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from doctor.core.job import Job
from doctor.core.report_document import Report
from doctor.monitor.sinks.finding_sink import FindingEvent
from doctor.monitor.sinks.rate_limit import RateLimit
from doctor.report.formatting import place, spelt_out


class DoctorWarning(UserWarning):
    """A finding in a run that is watched, for programs that record, count or filter warnings.

    The console tells people the same, so they are not shown unless a filter says so, such as
    ``warnings.simplefilter("always", doctor.DoctorWarning)``. Where one turns them into errors, the run goes on."""


class WarningSink:
    """One warning a finding, of severity error or warning; rationed as on the console."""

    def __init__(self, ration: RateLimit | None = None) -> None:
        self._ration = ration or RateLimit()
        self._told_of_more = False
        # The last of all filters: whatever else says anything of these warnings goes before it.
        warnings.simplefilter("ignore", DoctorWarning, append=True)

    def found(self, news: Sequence[FindingEvent], report: Report) -> None:
        """Warn."""
        told, kept = self._ration.split(news)
        for one in told:
            where = place(one.finding, report)
            _warn(f"{one.result.id} {one.result.name}: {one.finding.summary} ({where})")
        if kept and not self._told_of_more:
            self._told_of_more = True
            _warn("more was found at once than is worth a warning each: the report holds all of it")

    def round(self, job: Job, report: Report) -> None:
        """Nothing: a round by itself is no warning."""

    def ended(self, report: Report) -> None:
        """Nothing: the end is no warning."""

    def close(self) -> None:
        """Nothing is held."""


def _warn(text: str) -> None:
    """No stack level would lead to the user's code: the thread that judges has none. So the warning is said to come
    from the module ``doctor``, which filters can name, and from no line."""
    try:
        warnings.warn_explicit(spelt_out(" ".join(text.split())), DoctorWarning, "rankdoctor", 1, module="doctor")
    except DoctorWarning:
        return  # the filter "error": ending the run over a finding is the user's choice elsewhere (on_error)

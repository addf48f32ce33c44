"""Findings as Python warnings, for programs that filter, log or count them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from doctor.core.report_document import Report
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.monitor.sinks.rate_limit import RateLimit
from doctor.report.formatting import place, spelt_out


class DoctorWarning(UserWarning):
    """A finding of a watched run, for programs that record, count or filter warnings.

    The console shows the same, so these warnings are hidden unless a filter shows them, such as
    ``warnings.simplefilter("always", doctor.DoctorWarning)``. A filter that turns them into errors does not end the
    run.
    """


class WarningSink(FindingSink):
    """Issues one warning per finding of severity error or warning, at the rate of the console."""

    def __init__(self, rate_limit: RateLimit | None = None) -> None:
        self._rate_limit = rate_limit or RateLimit()
        self._reported_overflow = False
        # Appended last, so that any other filter for these warnings takes precedence.
        warnings.simplefilter("ignore", DoctorWarning, append=True)

    def found(self, events: Sequence[FindingEvent], report: Report) -> None:
        """Issue the warnings."""
        shown, kept = self._rate_limit.split(events)
        for one in shown:
            where = place(one.finding, report)
            _warn(f"{one.result.id} {one.result.name}: {one.finding.summary} ({where})")
        if kept and not self._reported_overflow:
            self._reported_overflow = True
            _warn("more findings than warnings are shown for at once; the report lists all of them")


def _warn(text: str) -> None:
    """Issue a warning of the module ``doctor``, which filters can name, without a line.

    No stack level leads to the user's code, because the evaluating thread has none.
    """
    try:
        warnings.warn_explicit(spelt_out(" ".join(text.split())), DoctorWarning, "rankdoctor", 1, module="doctor")
    except DoctorWarning:
        return  # the filter "error": whether findings end the run is set by on_error instead

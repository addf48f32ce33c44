"""The report of a run as an HTML page beside report.json, in bounded time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from doctor.core.background import PendingCall, start_daemon
from doctor.core.capture import PAGE
from doctor.core.clock import monotonic
from doctor.core.files.own_folder import OwnFolder
from doctor.core.finding import Severity
from doctor.core.job import Job
from doctor.core.report_document import Report
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.report.formatting import spelt_out

DEADLINE = 2.0
"""Seconds by which a page may delay the end of a run; one of a thousand ranks takes some tenths of a second."""
SHORT_RUN = 30.0
"""Seconds of a run that gets no page unless something was found: the first page of a process takes 0.1 s or more of
CPU time, which a run as short as this would notice."""


class ReportPageSink(FindingSink):
    """Writes ``directory/report.html`` at the end of the run, and when an error of its progress is found.

    A run that hangs or fails may be ended by its launcher before its end is evaluated. A run shorter than
    ``short_run`` seconds in which no error and no warning was found ends without a page. ``is_wanted``: returns
    whether it makes sense to try, because report.json could be written. ``write_line`` gets one line if the page
    cannot be written; ``written``: its path once it is.
    """

    def __init__(
        self,
        directory: Path | OwnFolder,
        write_line: Callable[[str], None],
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        deadline: float = DEADLINE,
        short_run: float = SHORT_RUN,
    ) -> None:
        self._folder = OwnFolder.of(directory)
        self.path = self._folder.path / PAGE
        self.written: Path | None = None
        self._is_wanted = is_wanted
        self._deadline = deadline
        self._is_long_at = monotonic() + short_run
        self._write_line = write_line
        self._job: Job | None = None
        self._is_due = False
        self._reported_failure = False

    def found(self, events: Sequence[FindingEvent], report: Report) -> None:
        """Have the page written with the facts of this round if the run itself is in trouble."""
        self._is_due = self._is_due or any(
            one.is_loud and one.result.family == "progress" and one.finding.severity is Severity.ERROR for one in events
        )

    def round(self, job: Job, report: Report) -> None:
        """Keep the facts for the charts of the page."""
        self._job = job
        if self._is_due:
            self._is_due = False
            self._write(report)

    def ended(self, report: Report) -> None:
        """Write the page for the last time, if there is something to read."""
        if monotonic() >= self._is_long_at or _has_news(report):
            self._write(report)

    def close(self) -> None:
        """Let go of the facts."""
        self._job = None

    def _write(self, report: Report) -> None:
        """Render and write in a thread, which is left behind if it takes too long; its page is not written then."""
        self.written = None
        if not self._is_wanted():
            return
        job, until = self._job, monotonic() + self._deadline

        def work() -> Path:
            from doctor.report.html.document import render_html

            page = render_html(report, job).encode()
            if monotonic() >= until:
                raise TimeoutError
            self._folder.write(PAGE, page)
            return self.path

        call = PendingCall(work)
        try:
            start_daemon("doctor-page", call.run)
            self.written = call.result(self._deadline)
        except TimeoutError:
            self._fail(f"it takes longer than {self._deadline:g} s (doctor diagnose --format html makes one later)")
        except OSError as error:
            if self._folder.is_news(error):
                self._fail(error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - a page is never worth more than one line
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._reported_failure:
            self._reported_failure = True
            with contextlib.suppress(OSError, ValueError):
                self._write_line(spelt_out(f"cannot write {self.path}: {reason}"))


def _has_news(report: Report) -> bool:
    """Whether a report is more than that nothing was found: an error, a warning, or no verdict."""
    findings = (finding for result in report.results for finding in result.findings if finding.stands)
    return report.verdict != "pass" or any(finding.severity is not Severity.INFO for finding in findings)

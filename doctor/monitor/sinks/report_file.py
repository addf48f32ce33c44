"""The report of a run as a file that is always whole: report.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from doctor.core.capture import REPORT
from doctor.core.files.own_folder import OwnFolder
from doctor.core.job import Job
from doctor.core.report_document import Report
from doctor.monitor.sinks.finding_sink import FindingEvent
from doctor.report.formatting import spelt_out
from doctor.report.machine_formats import render_json


class ReportFileSink:
    """Writes ``directory/report.json`` when something is found and when the run ends. ``tell`` gets one line where it
    can't be written. ``is_written``: the file holds the report as it is now."""

    def __init__(self, directory: Path | OwnFolder, tell: Callable[[str], None]) -> None:
        self._folder = OwnFolder.of(directory)
        self.path = self._folder.path / REPORT
        self.is_written = True
        self._tell = tell
        self._complained = False

    def found(self, news: Sequence[FindingEvent], report: Report) -> None:
        """Rewrite it where there is news."""
        if news:
            self._write(report)

    def round(self, job: Job, report: Report) -> None:
        """Nothing: most rounds find what the last one found."""

    def ended(self, report: Report) -> None:
        """Write it for the last time."""
        self._write(report)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, report: Report) -> None:
        self.is_written = False
        try:
            self._folder.write(REPORT, render_json(report).encode())
            self.is_written = True
        except OSError as error:
            if not self._complained and self._folder.is_news(error):
                self._complained = True
                self._tell(spelt_out(f"{self.path} can't be written: {error.strerror or error}"))

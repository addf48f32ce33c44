"""The report of a run as a file that is always complete: report.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from doctor.core.capture import REPORT
from doctor.core.files.own_folder import OwnFolder
from doctor.core.report_document import Report
from doctor.monitor.sinks.finding_sink import FindingEvent, FindingSink
from doctor.report.formatting import spelt_out
from doctor.report.machine_formats import render_json


class ReportFileSink(FindingSink):
    """Writes ``directory/report.json`` on new findings and at the end of the run.

    ``write_line`` gets one line if it cannot be written. ``is_written``: the file holds the current report.
    """

    def __init__(self, directory: Path | OwnFolder, write_line: Callable[[str], None]) -> None:
        self._folder = OwnFolder.of(directory)
        self.path = self._folder.path / REPORT
        self.is_written = True
        self._write_line = write_line
        self._reported_failure = False

    def found(self, events: Sequence[FindingEvent], report: Report) -> None:
        """Rewrite the report if there are new findings."""
        if events:
            self._write(report)

    def ended(self, report: Report) -> None:
        """Write the report for the last time."""
        self._write(report)

    def _write(self, report: Report) -> None:
        self.is_written = False
        try:
            self._folder.write(REPORT, render_json(report).encode())
            self.is_written = True
        except OSError as error:
            if not self._reported_failure and self._folder.is_news(error):
                self._reported_failure = True
                self._write_line(spelt_out(f"cannot write {self.path}: {error.strerror or error}"))

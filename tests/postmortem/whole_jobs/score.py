"""Reads recorded jobs as ``doctor diagnose FOLDER`` does, and compares with what is expected."""

from __future__ import annotations

import tarfile
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

from doctor.core.check_registry import load_registry
from doctor.core.errors import UnusableError
from doctor.core.report_document import Report
from doctor.core.report_summary import merge_reports
from doctor.core.settings import Settings
from doctor.postmortem.run_outcome import outcome_of
from doctor.postmortem.run_reader import read_runs
from doctor.session import judge
from tests.postmortem.whole_jobs.jobs import WholeJob
from tests.postmortem.whole_jobs.play import ARCHIVES

Grade = Literal["right", "weak", "wrong"]


class Diagnosis(NamedTuple):
    """What is said of a job: the primary id, its ranks and hosts, the exit code, the number of runs in the folder."""

    job: WholeJob
    primary: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    code: int
    runs: int

    @property
    def grade(self) -> Grade:
        """Of the primary id alone; ``weak``: it is right, but less telling than another."""
        expected = self.job.expected
        if self.primary == expected.id:
            return "right"
        return "weak" if self.primary in expected.also else "wrong"

    @property
    def complaints(self) -> list[str]:
        """Everything that is not as expected."""
        expected, found = self.job.expected, []
        if self.grade == "wrong":
            found.append(f"primary {self.primary or 'none'}, not {expected.id or 'none'}")
        if expected.ranks is not None and self.ranks != expected.ranks:
            found.append(f"ranks {self.ranks}, not {expected.ranks}")
        if expected.hosts is not None and self.hosts != expected.hosts:
            found.append(f"hosts {self.hosts}, not {expected.hosts}")
        if self.code != expected.code:
            found.append(f"exit code {self.code}, not {expected.code}")
        if self.runs != 1:
            found.append(f"{self.runs} runs, not 1")
        return found


def unpack(job: WholeJob, folder: Path) -> None:
    """Write the files of the recorded job into ``folder``."""
    with tarfile.open(ARCHIVES / f"{job.name}.tar.xz") as tar:
        tar.extractall(folder, filter="data")


def diagnose(job: WholeJob) -> Diagnosis:
    """Diagnose the folder of a recorded job in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "output"
        unpack(job, folder)
        try:
            runs = read_runs([folder])
        except UnusableError:
            return Diagnosis(job, "", (), (), 2, 0)
        registry, started = load_registry(()), time.monotonic()
        reports = {
            run.name: judge(
                run.job, registry, Settings(), must_be_complete=False, outcome_of=outcome_of, inputs=run.inputs
            )
            for run in runs
        }
    [first, *others] = reports.values()
    code = merge_reports(reports.items(), started=started).exit_code if others else first.exit_code
    return Diagnosis(job, first.primary or "", *_blamed(first), code, len(reports))


def _blamed(report: Report) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ranks and hosts of the primary finding."""
    result = report.result(report.primary) if report.primary else None
    if result is None or not result.findings:
        return (), ()
    first = result.findings[0]
    return tuple(first.ranks), tuple(first.hosts)

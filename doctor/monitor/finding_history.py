"""Findings accumulated over a whole run; a finding stays once it was made."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from doctor.core.capture import same_run
from doctor.core.decoding import prepared
from doctor.core.files.own_folder import OwnFile
from doctor.core.finding import Severity, Status
from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.core.report_summary import summarize_again
from doctor.monitor.sinks.finding_sink import FindingEvent

FILE_LIMIT = 64 << 20
"""Maximum size in bytes of an earlier report of the same run that is read."""

FindingKey = tuple[str, tuple[int, ...], tuple[str, ...]]
"""Identity of a finding: check id, ranks, hosts."""


def finding_key(events: FindingEvent) -> FindingKey:
    """Return the key of a finding, which is stable from one evaluation to the next."""
    return events.result.id, *_subjects(events.finding)


class FindingHistory:
    """The findings of a run over all its evaluations."""

    def __init__(self) -> None:
        self.report: Report | None = None

    def note(self, report: Report) -> list[FindingEvent]:
        """Merge the findings of one evaluation and return those that are new."""
        known = {} if self.report is None else {result.id: result for result in self.report.results}
        results, events = [], []
        for result in report.results:
            merged, fresh = _merged(known.pop(result.id, None), result)
            results.append(merged)
            events += [FindingEvent(merged, finding, self._is_implied(finding, result.family)) for finding in fresh]
        results += known.values()
        self.report = summarize_again(report, tuple(results), started=(self.report or report).started)
        return events

    def downgrade(self, found: Collection[FindingKey], seconds: float) -> list[FindingEvent]:
        """Downgrade these findings to info because the run resumed after ``seconds``; return them."""
        if self.report is None:
            return []
        results, demoted = [], []
        for result in self.report.results:
            findings = tuple(
                _as_info(one, seconds)
                if (result.id, *_subjects(one)) in found and one.severity is not Severity.INFO
                else one
                for one in result.findings
            )
            changed = _with_findings(result, findings)
            results.append(changed)
            demoted += [
                FindingEvent(changed, new) for old, new in zip(result.findings, findings, strict=True) if new is not old
            ]
        self.report = summarize_again(self.report, tuple(results), started=self.report.started)
        return demoted

    def _is_implied(self, finding: ReportFinding, family: str) -> bool:
        """Return whether the cause of a finding in the same family was reported before.

        Findings about the run itself (family progress) are always reported.
        """
        cause = self.report.result(finding.explained_by) if self.report and finding.explained_by else None
        if cause is None or cause.family != family or family == "progress":
            return False
        return any(one.stands and one.severity is not Severity.INFO for one in cause.findings)

    def take_over(self, path: Path | OwnFile, run: str = "") -> None:
        """Continue from the report of another rank, if it is readable and belongs to ``run``."""
        try:
            report = msgspec.json.decode(OwnFile.of(path).read(FILE_LIMIT), type=prepared(Report))
            self.report = report if not (run and report.run) or same_run(run, report.run) else None
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
            return


def _merged(old: CheckResult | None, new: CheckResult) -> tuple[CheckResult, list[ReportFinding]]:
    """Merge two results of one check; return the merged result and its new findings."""
    if old is None or not old.findings:
        return new, [finding for finding in new.findings if finding.stands]
    fresh = [finding for finding in new.findings if finding.stands and not _is_known(finding, old.findings)]
    repeated = {_subjects(finding) for finding in new.findings}
    findings = (*(one for one in old.findings if _subjects(one) not in repeated), *new.findings)
    stands = any(finding.stands for finding in findings)
    status = Status.FAIL if stands else new.status
    reason = None if stands else new.reason
    return _with_findings(msgspec.structs.replace(new, status=status, reason=reason), findings), fresh


def _with_findings(result: CheckResult, findings: tuple[ReportFinding, ...]) -> CheckResult:
    if not findings:
        return result
    worst = max((one.severity for one in findings), key=lambda severity: severity.weight)
    return msgspec.structs.replace(result, findings=findings, severity=worst)


def _as_info(finding: ReportFinding, seconds: float) -> ReportFinding:
    summary = f"{finding.summary}; training resumed after {seconds:.0f} s"
    return msgspec.structs.replace(finding, summary=summary, severity=Severity.INFO)


def _subjects(finding: ReportFinding) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return finding.ranks, finding.hosts


def _is_known(finding: ReportFinding, known: Iterable[ReportFinding]) -> bool:
    """Return whether a finding at least as severe was reported for these ranks before.

    The text is not compared: numbers in it change from one evaluation to the next.
    """
    earlier = [one for one in known if one.severity.weight >= finding.severity.weight]
    if not finding.ranks:
        return any(not one.ranks and one.hosts == finding.hosts for one in earlier)
    return set(finding.ranks) <= {rank for one in earlier for rank in one.ranks}

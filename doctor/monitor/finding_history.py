"""What was found over a whole run. A finding stays once it was made; the same one again is no news."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from doctor.core.capture import same_run
from doctor.core.check_runner import primary_of
from doctor.core.files.own_folder import OwnFile
from doctor.core.finding import Severity, Status
from doctor.core.report_document import CheckResult, Report, ReportFinding, verdict_of
from doctor.monitor.sinks.finding_sink import FindingEvent

FILE_LIMIT = 64 << 20
"""Bytes of an earlier report of the same run that are read."""


FindingKey = tuple[str, tuple[int, ...], tuple[str, ...]]
"""What is said, and of whom: the id of the check, ranks, hosts."""


def finding_key(news: FindingEvent) -> FindingKey:
    """A finding by what does not change from one look to the next."""
    return news.result.id, *_who(news.finding)


class FindingHistory:
    """The findings of a run, judged again and again."""

    def __init__(self) -> None:
        self.report: Report | None = None

    def note(self, report: Report) -> list[FindingEvent]:
        """Take in what was found this time; returns what was not known before."""
        known = {} if self.report is None else {result.id: result for result in self.report.results}
        results, news = [], []
        for result in report.results:
            merged, fresh = _merged(known.pop(result.id, None), result)
            results.append(merged)
            news += [FindingEvent(merged, finding, self._is_implied(finding, result.family)) for finding in fresh]
        results += known.values()
        self.report = _with_results(report, tuple(results), self.report)
        return news

    def went_on(self, found: Collection[FindingKey], seconds: float) -> list[FindingEvent]:
        """Make remarks of these findings: the run went on after it had stood for so many seconds. Returns them."""
        if self.report is None:
            return []
        results, demoted = [], []
        for result in self.report.results:
            findings = tuple(
                _as_remark(one, seconds)
                if (result.id, *_who(one)) in found and one.severity is not Severity.INFO
                else one
                for one in result.findings
            )
            changed = _with_findings(result, findings)
            results.append(changed)
            demoted += [
                FindingEvent(changed, new) for old, new in zip(result.findings, findings, strict=True) if new is not old
            ]
        self.report = _with_results(self.report, tuple(results), self.report)
        return demoted

    def _is_implied(self, finding: ReportFinding, family: str) -> bool:
        """Whether people were told its cause before, in the same matter. What happens to the run (progress) is told
        whatever it comes from."""
        cause = self.report.result(finding.explained_by) if self.report and finding.explained_by else None
        if cause is None or cause.family != family or family == "progress":
            return False
        return any(one.stands and one.severity is not Severity.INFO for one in cause.findings)

    def take_over(self, path: Path | OwnFile, run: str = "") -> None:
        """Go on from the report that another rank wrote, where it can be read and is of that run."""
        try:
            report = msgspec.json.decode(OwnFile.of(path).read(FILE_LIMIT), type=Report)
            self.report = report if not (run and report.run) or same_run(run, report.run) else None
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
            return


def _merged(old: CheckResult | None, new: CheckResult) -> tuple[CheckResult, list[ReportFinding]]:
    """The result with the findings of both, and those that are news."""
    if old is None or not old.findings:
        return new, [finding for finding in new.findings if finding.stands]
    fresh = [finding for finding in new.findings if finding.stands and not _is_known(finding, old.findings)]
    said_again = {_who(finding) for finding in new.findings}
    findings = (*(one for one in old.findings if _who(one) not in said_again), *new.findings)
    stands = any(finding.stands for finding in findings)
    status = Status.FAIL if stands else new.status
    reason = None if stands else new.reason
    return _with_findings(msgspec.structs.replace(new, status=status, reason=reason), findings), fresh


def _with_findings(result: CheckResult, findings: tuple[ReportFinding, ...]) -> CheckResult:
    if not findings:
        return result
    worst = max((one.severity for one in findings), key=lambda severity: severity.weight)
    return msgspec.structs.replace(result, findings=findings, severity=worst)


def _as_remark(finding: ReportFinding, seconds: float) -> ReportFinding:
    summary = f"{finding.summary}; went on after {seconds:.0f} s"
    return msgspec.structs.replace(finding, summary=summary, severity=Severity.INFO)


def _who(finding: ReportFinding) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return finding.ranks, finding.hosts


def _is_known(finding: ReportFinding, known: Iterable[ReportFinding]) -> bool:
    """Whether as much was said of these ranks before: numbers in the words change from one look to the next."""
    said = [one for one in known if one.severity.weight >= finding.severity.weight]
    if not finding.ranks:
        return any(not one.ranks and one.hosts == finding.hosts for one in said)
    return set(finding.ranks) <= {rank for one in said for rank in one.ranks}


def _with_results(report: Report, results: tuple[CheckResult, ...], earlier: Report | None) -> Report:
    code, verdict = verdict_of(results)
    counts = {status.value: sum(result.status is status for result in results) for status in Status}
    return msgspec.structs.replace(
        report,
        started=earlier.started if earlier else report.started,
        exit_code=code,
        verdict=verdict,
        results=results,
        coverage=msgspec.structs.replace(report.coverage, checks=counts),
        primary=primary_of(results),
    )

"""Runs checks over a job; a check that raises an exception ends with the status ``error``."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from doctor.core.background import start_thread
from doctor.core.check import Check
from doctor.core.check_registry import BrokenPlugin, CheckRegistry, sentence_of
from doctor.core.clock import monotonic
from doctor.core.decoding import prepared
from doctor.core.facts import Missing, MissingReason, Section
from doctor.core.facts.section import in_unicode
from doctor.core.finding import (
    ALONE,
    PRIMARY_CONFIDENCE,
    Finding,
    Scope,
    Severity,
    Skip,
    Status,
    Unknown,
    Verdict,
    capitalized,
)
from doctor.core.job import UNKNOWN_HOST, Job
from doctor.core.logs.declared_findings import declared_findings
from doctor.core.logs.event_groups import quoted_places
from doctor.core.logs.reported_findings import reported_findings
from doctor.core.logs.software_findings import LIBRARY_ERROR, is_of_source, is_quoted, software_findings
from doctor.core.report_document import CheckResult, Ignored, ReportFinding
from doctor.core.section_table import IdenticalRanks

PLUGIN_DEADLINE = 10.0
"""Seconds that a check of a plugin may take. Built-in checks are pure functions, whose speed a benchmark measures."""

MOST_VERDICTS = 200_000
"""Verdicts that one check may yield: more than any job has ranks, and few enough to fit in memory."""

NO_EVIDENCE = "no such evidence"
"""Why a check of logs is skipped if no log was read."""

NOT_NEEDED = "other checks have findings"
"""Why a check of last resort is skipped."""

Ignore = Callable[[Check, Finding, tuple[str, ...]], "Ignored | None"]
Judge = Callable[..., Iterable[Verdict]]
Needs = tuple[type[Section], ...]


def examine_job(
    job: Job,
    catalog: CheckRegistry,
    *,
    limits: Mapping[str, float] | None = None,
    ignore: Ignore | None = None,
) -> tuple[CheckResult, ...]:
    """Run all checks of ``catalog`` over ``job``; the last results are an error for every plugin that failed to load.

    ``limits``: thresholds such as ``{"MEM003.used_share": 0.9}``. ``ignore`` returns why a finding does not count, or
    ``None`` if it counts.
    """
    runner = _Runner(job, limits or {}, ignore)
    # All checks run before causes are assigned, because a later check may explain an earlier finding.
    results = runner.run_all(catalog.checks)
    return (*(_with_causes(result, runner.causes) for result in results), *map(crash_at_load, catalog.broken))


class _Runner:
    def __init__(self, job: Job, limits: Mapping[str, float], ignore: Ignore | None) -> None:
        self.causes: dict[str, list[_ExplainingFinding]] = {}
        self._job = job
        self._limits = limits
        self._ignore = ignore
        self._coverages = _SectionCoverages(job)

    def run_all(self, checks: Iterable[Check]) -> list[CheckResult]:
        """Run all checks, in their order except for those of last resort."""
        checks = tuple(checks)
        evaluated = {check.id: self._evaluated(check) for check in checks if not check.last_resort}
        if self._job.evidence is not None:
            _add_software_findings(self._job, {one: outcome.findings for one, (_, outcome, _) in evaluated.items()})
        results = {check.id: self._result(check, *evaluated[check.id]) for check in checks if check.id in evaluated}
        shown = [finding for result in results.values() for finding in result.findings]
        found = any(
            one.stands and one.severity is not Severity.INFO and one.confidence >= PRIMARY_CONFIDENCE for one in shown
        )
        if self._job.evidence is not None:
            self._job = self._job.with_quoted(quoted_places(shown))
        for check in checks:
            if check.last_resort:
                results[check.id] = self._result(check, *self._evaluated(check, is_needed=not found))
        return [results[check.id] for check in checks]

    def _evaluated(self, check: Check, *, is_needed: bool = True) -> tuple[_SectionCoverage, _CheckYield, float]:
        """What one check yields, and the seconds that it took. ``is_needed``: ``False`` skips it, because other checks
        found the cause."""
        started = monotonic()
        coverage = self._coverages.of(check)
        outcome = self._evaluate(check, coverage) if is_needed else _CheckYield(skips=[Skip(NOT_NEEDED)])
        return coverage, outcome, monotonic() - started

    def _result(self, check: Check, coverage: _SectionCoverage, outcome: _CheckYield, seconds: float) -> CheckResult:
        findings = tuple(self._complete(check, finding) for finding in outcome.findings)
        status, reason = _status(self._job, check, outcome, findings, coverage)
        for finding, shown in zip(outcome.findings, findings, strict=True):
            for consequence in finding.explains if shown.stands else ():
                cause = _ExplainingFinding(check.id, frozenset(finding.ranks), shown)
                self.causes.setdefault(consequence, []).append(cause)
        return CheckResult(
            id=check.id,
            name=check.name,
            family=check.family,
            status=status,
            severity=max((one.severity for one in findings), key=lambda worst: worst.weight, default=check.severity),
            seen=coverage.seen,
            expected=coverage.expected,
            reason=reason,
            seconds=round(seconds, 6),
            findings=findings,
            crash=outcome.crash if status is Status.FAIL else None,
            origin=None if check.origin == "built-in" else check.origin,
        )

    def _evaluate(self, check: Check, coverage: _SectionCoverage) -> _CheckYield:
        outcome, evidence = _CheckYield(), self._job.evidence
        if check.reads_logs and evidence is None:
            outcome.skips.append(Skip(NO_EVIDENCE))
            return outcome
        if check.needs_peers and self._job.world_size == 1 and _has_nothing_to_compare(self._job, check):
            outcome.skips.append(Skip(ALONE))
        elif coverage.seen or not check.needs:
            names = {name: f"{check.id}.{name}" for name in check.limits}
            limits = {name: self._limits[full] for name, full in names.items() if full in self._limits}
            outcome = self._call(check, check.judge, limits)
        if evidence is not None:
            outcome.findings.extend(declared_findings(self._job, check.id))
        if check.from_logs and evidence is not None:
            logged = self._call(check, check.judge_logs, {})
            outcome.findings.extend(logged.findings)
            outcome.crash = outcome.crash or logged.crash
        if all(finding.severity is Severity.INFO for finding in outcome.findings):
            outcome.findings.extend(reported_findings(self._job, check.id))
        return outcome

    def _call(self, check: Check, judge: Judge, limits: Mapping[str, float]) -> _CheckYield:
        outcome = _CheckYield()
        if check.origin == "built-in":
            _collect(judge, self._job, limits, outcome, Exception)
            return outcome
        # In a separate thread, SystemExit and KeyboardInterrupt of the plugin do not end this process.
        thread = start_thread("doctor-plugin", _collect, judge, self._job.apart(), limits, outcome, BaseException)
        thread.join(PLUGIN_DEADLINE)
        if thread.is_alive():
            outcome.abandoned = True
            return _CheckYield(crash=f"it did not finish within {PLUGIN_DEADLINE:g} s")
        return outcome

    def _complete(self, check: Check, finding: Finding) -> ReportFinding:
        """The finding with the defaults of its check, its known hosts, and whether it is ignored."""
        named = finding.hosts or self._job.hosts_of(finding.ranks)
        hosts = tuple(host for host in named if host != UNKNOWN_HOST)
        summary = capitalized(finding.summary)
        return ReportFinding(
            summary=summary,
            severity=finding.severity or check.severity,
            ignored=self._ignore(check, finding, hosts) if self._ignore else None,
            ranks=tuple(sorted(set(finding.ranks))),
            hosts=hosts,
            evidence=finding.evidence,
            effect=finding.effect or check.effect_of(summary),
            fix=finding.fix or check.fix,
            confidence=finding.confidence,
            source=finding.source,
        )


class _CheckYield(msgspec.Struct):
    findings: list[Finding] = msgspec.field(default_factory=list)
    skips: list[Skip] = msgspec.field(default_factory=list)
    unknowns: list[Unknown] = msgspec.field(default_factory=list)
    crash: str | None = None
    abandoned: bool = False


def _add_software_findings(job: Job, by_id: dict[str, list[Finding]]) -> None:
    """Add findings of messages that no check has quoted, and drop library errors that another check explains."""
    library_errors = by_id.pop(LIBRARY_ERROR, [])
    quoted = quoted_places(finding for findings in by_id.values() for finding in findings)
    library_errors[:] = [
        finding
        for finding in library_errors
        if not is_quoted(finding, quoted if is_of_source(finding) else _quoted_by_causes(by_id, finding))
    ]
    for check_id, added in software_findings(job, quoted).items():
        if by_id.get(check_id) == []:
            by_id[check_id].extend(added)


def _quoted_by_causes(by_id: dict[str, list[Finding]], finding: Finding) -> frozenset[tuple[str, int]]:
    """The lines that checks quote whose findings are not consequences of ``finding``."""
    causes = (found for check_id, found in by_id.items() if check_id not in finding.explains)
    return quoted_places(one for found in causes for one in found)


def _collect(
    judge: Judge, job: Job, limits: Mapping[str, float], outcome: _CheckYield, caught: type[BaseException]
) -> None:
    try:
        for count, verdict in enumerate(judge(job, **limits)):
            if outcome.abandoned:
                return
            if count >= MOST_VERDICTS:
                outcome.findings.clear()
                raise OverflowError(f"it yields more than {MOST_VERDICTS} times")
            _sort(verdict, outcome)
    except caught as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no frame"
        outcome.crash = f"{sentence_of(error)} ({place})"


def _sort(verdict: object, outcome: _CheckYield) -> None:
    if isinstance(verdict, Finding):
        outcome.findings.append(_copied(verdict, Finding))
    elif isinstance(verdict, Unknown):
        outcome.unknowns.append(_copied(verdict, Unknown))
    elif isinstance(verdict, Skip):
        outcome.skips.append(_copied(verdict, Skip))
    else:
        raise TypeError(f"a check yields Finding, Skip or Unknown, not {type(verdict).__name__}")


V = TypeVar("V", Finding, Unknown, Skip)


def _copied(verdict: V, kind: type[V]) -> V:
    """The verdict as the report will hold it, which the check can no longer change.

    Structs do not validate their arguments, so a value that has no JSON form would otherwise break the whole report.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode(in_unicode(verdict)), type=prepared(kind))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"its {kind.__name__} can't be written down: {sentence_of(error)}") from error


def _status(
    job: Job, check: Check, outcome: _CheckYield, findings: tuple[ReportFinding, ...], coverage: _SectionCoverage
) -> tuple[Status, str | None]:
    """The status and, unless it is pass or fail, the reason."""
    if any(finding.stands for finding in findings):
        return Status.FAIL, None
    if outcome.crash is not None:
        return Status.ERROR, outcome.crash
    if not coverage.seen and check.needs:
        return _nothing_seen(coverage)
    if outcome.unknowns:
        first, *others = outcome.unknowns
        more = f" (and {len(others)} more)" if others else ""
        return Status.UNKNOWN, _with_unhide(first.reason, first.unhide) + more
    if outcome.skips:
        return Status.SKIP, outcome.skips[0].reason
    if coverage.missing:
        return Status.UNKNOWN, _reason(coverage.missing[0], coverage.lacking, coverage.expected)
    if check.reads_logs:
        return Status.PASS, None
    return _status_without_findings(job, check, coverage)


def _nothing_seen(coverage: _SectionCoverage) -> tuple[Status, str]:
    serious = [lack for lack in coverage.missing if lack.lack is not MissingReason.UNMEASURED]
    if serious:
        return Status.UNKNOWN, _reason(serious[0], 0, 0)
    if coverage.missing:
        return Status.SKIP, coverage.missing[0].reason
    return Status.SKIP, coverage.absent.reason if coverage.absent else "nothing to evaluate"


def _status_without_findings(job: Job, check: Check, coverage: _SectionCoverage) -> tuple[Status, str | None]:
    """The status of a check without findings: pass only if no rank that it compares is missing."""
    if coverage.seen < coverage.expected:
        absent = coverage.expected - coverage.seen
        return Status.UNKNOWN, f"{absent} {'rank' if absent == 1 else 'ranks'} did not join"
    if check.compares_ranks and (job.ungathered or job.absent):
        return Status.UNKNOWN, "other ranks not gathered" if job.ungathered else "some ranks did not join"
    if check.compares_ranks and _has_nothing_to_compare(job, check):
        return Status.SKIP, ALONE
    return Status.PASS, None


def _has_nothing_to_compare(job: Job, check: Check) -> bool:
    return len(job.ranks) == 1 and not (check.uses_baseline and job.expected)


def _reason(lack: Missing, count: int, expected: int) -> str:
    share = f"{count} of {expected}: " if 0 < count < expected else ""
    return _with_unhide(share + lack.reason, lack.unhide)


def _with_unhide(reason: str, unhide: str) -> str:
    return f"{reason}; to see it: {unhide}" if unhide else reason


class _ExplainingFinding(msgspec.Struct, frozen=True):
    """A finding of the check ``id`` that explains others."""

    id: str
    ranks: frozenset[int]
    finding: ReportFinding


_OF_OTHER_RANKS = ("RUN001", "RUN012")
"""Checks whose findings are consequences on other ranks than their cause: waits for a rank, and its loss."""


def _with_causes(result: CheckResult, explained: Mapping[str, list[_ExplainingFinding]]) -> CheckResult:
    """The result with each finding linked to its cause, which shares a rank with it unless the finding is about waiting
    or losing peers. The most severe cause counts, and of these the most certain."""
    causes = explained.get(result.id)
    if not causes:
        return result
    causes = sorted(causes, key=lambda cause: (cause.finding.severity.weight, cause.finding.confidence), reverse=True)

    def mark(finding: ReportFinding) -> ReportFinding:
        for cause in causes:
            shares = not cause.ranks or not finding.ranks or cause.ranks.intersection(finding.ranks)
            apart = not shares and result.id not in _OF_OTHER_RANKS
            if cause.id != result.id and not apart:
                return msgspec.structs.replace(finding, explained_by=cause.id)
        return finding

    return msgspec.structs.replace(result, findings=tuple(map(mark, result.findings)))


def crash_at_load(broken: BrokenPlugin) -> CheckResult:
    """The result of a plugin that failed to load."""
    return CheckResult(
        id=broken.name,
        name=broken.name,
        family="not loaded",
        status=Status.ERROR,
        severity=Severity.ERROR,
        seen=0,
        expected=0,
        reason=f"{broken.name} ({broken.origin}) failed to load: {broken.reason}",
        seconds=0.0,
        findings=(),
    )


class _SectionCoverage(msgspec.Struct, frozen=True):
    """How many ranks or hosts have what a check needs.

    ``lacking``: those that should have it and do not; one that has no use for it (no GPU) is not expected.
    ``missing``: their distinct reasons; ``absent``: the reason of one that is not expected.
    """

    seen: int
    expected: int
    lacking: int
    missing: tuple[Missing, ...]
    absent: Missing | None


class _SectionCoverages:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._done: dict[tuple[bool, Needs, Needs], _SectionCoverage] = {}

    def of(self, check: Check) -> _SectionCoverage:
        key = (check.scope is Scope.HOST, check.needs, check.or_needs)
        if key not in self._done:
            self._done[key] = self._count(*key)
        return self._done[key]

    def _count(self, by_host: bool, needs: Needs, instead: Needs) -> _SectionCoverage:
        groups = self._job.lacking(needs, instead)
        counts = self._hosts(groups) if by_host else [(_gravest(reasons), len(one.members)) for one, reasons in groups]
        missing = {reason: None for reason, _ in counts if reason.lack is not MissingReason.ABSENT}
        absent = next((reason for reason, _ in counts if reason.lack is MissingReason.ABSENT), None)
        lacking = sum(count for reason, count in counts if reason in missing)
        seen = len(self._job.hosts if by_host else self._job.ranks) - sum(count for _, count in counts)
        unreported = 0 if by_host else len(self._job.absent)
        return _SectionCoverage(seen, seen + lacking + unreported, lacking, tuple(missing), absent)

    def _hosts(self, groups: list[tuple[IdenticalRanks, tuple[Missing, ...]]]) -> list[tuple[Missing, int]]:
        """The reason of every host that has such a rank; of several, the gravest of the lowest rank."""
        if len(groups) == 1:
            ((group, reasons),) = groups
            return [(_gravest(reasons), len({rank.host.index for rank in group.members}))]
        by_rank = {id(rank): reasons for group, reasons in groups for rank in group.members}
        by_host: dict[int, list[Missing]] = {}
        for rank in self._job.ranks if groups else ():
            by_host.setdefault(rank.host.index, []).extend(by_rank.get(id(rank), ()))
        return [(_gravest(reasons), 1) for reasons in by_host.values() if reasons]


def _gravest(reasons: Sequence[Missing]) -> Missing:
    """The most serious reason: hidden or failed before absent."""
    return min(reasons, key=lambda reason: reason.lack is MissingReason.ABSENT)

"""Runs checks over a job. The one place that forgives a check its exceptions: it ends as ``crash``."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from doctor.core.background import start_thread
from doctor.core.check import Check
from doctor.core.check_registry import BrokenPlugin, CheckRegistry, sentence_of
from doctor.core.facts import LogEvidence, Missing, MissingReason, Section
from doctor.core.facts.section import in_unicode
from doctor.core.finding import ALONE, Finding, Scope, Severity, Skip, Status, Unknown, Verdict
from doctor.core.job import Job
from doctor.core.logs.reported_findings import reported_findings
from doctor.core.report_document import CheckResult, Ignored, ReportFinding
from doctor.core.section_table import IdenticalRanks

PLUGIN_DEADLINE = 10.0
"""Seconds that a check of somebody else may take. Built-in ones are pure functions with a benchmark of their own."""

MOST_VERDICTS = 200_000
"""Verdicts of one check that are kept: more than any job has ranks, and no more than memory holds."""

Ignore = Callable[[Check, Finding, tuple[str, ...]], "Ignored | None"]
Needs = tuple[type[Section], ...]


@dataclass
class _CheckYield:
    """What one run of a check brought."""

    findings: list[Finding] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    unknowns: list[Unknown] = field(default_factory=list)
    crash: str | None = None
    abandoned: bool = False


def examine_job(
    job: Job,
    catalog: CheckRegistry,
    *,
    limits: Mapping[str, float] | None = None,
    ignore: Ignore | None = None,
) -> tuple[CheckResult, ...]:
    """Judge ``job`` by all checks of ``catalog``. ``limits``: thresholds as ``{"MEM003.used_share": 0.9}``;
    ``ignore`` tells of a finding whether and why it does not count. A guest that failed to load is a crash."""
    censuses = _SectionCoverages(job)
    results: list[CheckResult] = []
    explained: dict[str, list[_ExplainingFinding]] = {}
    for check in catalog.checks:
        result, findings = _examine_one(job, check, censuses.of(check), limits or {}, ignore)
        results.append(result)
        for finding, shown in zip(findings, result.findings, strict=True):
            for consequence in finding.explains if shown.stands else ():
                explained.setdefault(consequence, []).append(
                    _ExplainingFinding(check.id, frozenset(finding.ranks), shown)
                )
    return (*(_explained(result, explained) for result in results), *map(crash_at_load, catalog.broken))


@dataclass(frozen=True)
class _SectionCoverage:
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
    """Counts once for all checks that need the same sections."""

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
        """The reason of every host with such a rank; of several reasons, the gravest of the lowest rank."""
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


def _examine_one(
    job: Job, check: Check, census: _SectionCoverage, limits: Mapping[str, float], ignore: Ignore | None
) -> tuple[CheckResult, list[Finding]]:
    started = time.perf_counter()
    outcome = _evaluate(job, check, census, limits)
    findings = tuple(_stamp(job, check, finding, ignore) for finding in outcome.findings)
    status, reason = _status(job, check, outcome, findings, census)
    result = CheckResult(
        id=check.id,
        name=check.name,
        family=check.family,
        status=status,
        severity=_worst(findings) or check.severity,
        seen=census.seen,
        expected=census.expected,
        reason=reason,
        seconds=round(time.perf_counter() - started, 6),
        findings=findings,
        crash=outcome.crash if status is Status.FAIL else None,
        origin=None if check.origin == "built-in" else check.origin,
    )
    return result, outcome.findings


NO_EVIDENCE = "no such evidence"
"""Why a check says nothing where no input is of the kind that feeds it."""


def _evaluate(job: Job, check: Check, census: _SectionCoverage, limits: Mapping[str, float]) -> _CheckYield:
    """Let it judge the facts that it needs, and what logs say."""
    outcome = _CheckYield()
    if check.reads_logs and job.evidence is None:
        outcome.skips.append(Skip(NO_EVIDENCE))
        return outcome
    if census.seen or not check.needs:
        outcome = _run(job, check, limits, check.judge)
    if check.from_logs is not None and job.evidence is not None:
        heard = _run(job, check, {}, check.from_logs)
        outcome.findings.extend(heard.findings)
        outcome.crash = outcome.crash or heard.crash
    if all(finding.severity is Severity.INFO for finding in outcome.findings):
        outcome.findings.extend(reported_findings(job, check.id))
    return outcome


Judge = Callable[..., Iterable[Verdict]]


def _run(job: Job, check: Check, limits: Mapping[str, float], judge: Judge) -> _CheckYield:
    outcome = _CheckYield()
    if check.origin == "built-in":
        _judge(job, check, judge, limits, outcome, Exception)
        return outcome
    # In a thread of its own, an exit or interrupt is the guest's and not the user's.
    thread = start_thread("doctor-plugin", _judge, job.apart(), check, judge, limits, outcome, BaseException)
    thread.join(PLUGIN_DEADLINE)
    if thread.is_alive():
        outcome.abandoned = True
        return _CheckYield(crash=f"it did not end within {PLUGIN_DEADLINE:g} s")
    return outcome


def _judge(
    job: Job,
    check: Check,
    judge: Judge,
    limits: Mapping[str, float],
    outcome: _CheckYield,
    forgiven: type[BaseException],
) -> None:
    own = {name: limits[f"{check.id}.{name}"] for name in check.limits if f"{check.id}.{name}" in limits}
    try:
        for count, verdict in enumerate(judge(job, **own)):
            if outcome.abandoned:
                return
            if count >= MOST_VERDICTS:
                outcome.findings.clear()
                raise OverflowError(f"it yields more than {MOST_VERDICTS} times")
            _sort(verdict, outcome)
    except forgiven as error:
        outcome.crash = f"{sentence_of(error)} ({_innermost(error)})"


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
    """The verdict as it will stand in the document; its maker can't change it any more. Structs do not look at the
    types of what they are given, so one that can't be written as JSON would else take the whole report along."""
    try:
        return msgspec.json.decode(msgspec.json.encode(in_unicode(verdict)), type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"its {kind.__name__} can't be written down: {sentence_of(error)}") from error


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no frame"


def _stamp(job: Job, check: Check, finding: Finding, ignore: Ignore | None) -> ReportFinding:
    hosts = finding.hosts or job.hosts_of(finding.ranks)
    return ReportFinding(
        summary=finding.summary,
        severity=finding.severity or check.severity,
        ignored=ignore(check, finding, hosts) if ignore else None,
        ranks=tuple(sorted(set(finding.ranks))),
        hosts=hosts,
        evidence=finding.evidence,
        effect=finding.effect or check.effect,
        fix=finding.fix or check.fix,
        confidence=finding.confidence,
        source=finding.source,
    )


def _worst(findings: Iterable[ReportFinding]) -> Severity | None:
    return max((finding.severity for finding in findings), key=lambda severity: severity.weight, default=None)


def _status(
    job: Job, check: Check, outcome: _CheckYield, findings: tuple[ReportFinding, ...], census: _SectionCoverage
) -> tuple[Status, str | None]:
    """The status and, unless it is ok or sick, the reason."""
    if any(finding.stands for finding in findings):
        return Status.FAIL, None
    if outcome.crash is not None:
        return Status.ERROR, outcome.crash
    if not census.seen and check.needs:
        return _nothing_seen(census)
    if outcome.unknowns:
        return Status.UNKNOWN, _why_unknown(outcome.unknowns)
    if outcome.skips:
        return Status.SKIP, outcome.skips[0].reason
    if census.missing:
        return Status.UNKNOWN, _reason(census.missing[0], census.lacking, census.expected)
    if check.reads_logs:
        return Status.PASS, None
    return _lonely(job, check, census)


def _nothing_seen(census: _SectionCoverage) -> tuple[Status, str]:
    serious = [lack for lack in census.missing if lack.lack is not MissingReason.UNMEASURED]
    if serious:
        return Status.UNKNOWN, _reason(serious[0], 0, 0)
    if census.missing:
        return Status.SKIP, census.missing[0].reason
    return Status.SKIP, census.absent.reason if census.absent else "nothing to judge"


def _lonely(job: Job, check: Check, census: _SectionCoverage) -> tuple[Status, str | None]:
    """A clean result: green only if nobody was left out whom the check speaks of."""
    if census.seen < census.expected:
        absent = census.expected - census.seen
        return Status.UNKNOWN, f"{absent} {'rank' if absent == 1 else 'ranks'} never came"
    if check.compares_ranks and (job.ungathered or job.absent):
        return Status.UNKNOWN, "other ranks not gathered" if job.ungathered else "some ranks never came"
    if check.compares_ranks and len(job.ranks) == 1 and not (check.uses_baseline and job.expected):
        return Status.SKIP, ALONE
    return Status.PASS, None


def _why_unknown(unknowns: list[Unknown]) -> str:
    first = unknowns[0]
    more = f" (and {len(unknowns) - 1} more)" if len(unknowns) > 1 else ""
    return _with_unhide(first.reason, first.unhide) + more


def _reason(lack: Missing, count: int, expected: int) -> str:
    share = f"{count} of {expected}: " if 0 < count < expected else ""
    return _with_unhide(share + lack.reason, lack.unhide)


def _with_unhide(reason: str, unhide: str) -> str:
    return f"{reason}; to see it: {unhide}" if unhide else reason


class _ExplainingFinding(NamedTuple):
    """A finding that explains others, as it stands in the result of the check ``id``."""

    id: str
    ranks: frozenset[int]
    finding: ReportFinding

    @property
    def weight(self) -> tuple[int, float]:
        """The graver, then the surer, goes before others."""
        return (self.finding.severity.weight, self.finding.confidence)


def _explained(result: CheckResult, explained: Mapping[str, list[_ExplainingFinding]]) -> CheckResult:
    """The result with each consequence pointing at its cause: a finding that names its id and shares a rank."""
    causes = sorted(explained.get(result.id, ()), key=lambda cause: cause.weight, reverse=True)
    if not causes:
        return result

    def mark(finding: ReportFinding) -> ReportFinding:
        for cause in causes:
            apart = cause.ranks and finding.ranks and not cause.ranks.intersection(finding.ranks)
            if cause.id != result.id and not apart:
                return msgspec.structs.replace(finding, explained_by=cause.id)
        return finding

    return msgspec.structs.replace(result, findings=tuple(map(mark, result.findings)))


def crash_at_load(broken: BrokenPlugin) -> CheckResult:
    """The result that stands for a guest that failed to load."""
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


CARRIES = 0.3
"""Confidence from which a finding carries a verdict: below it several other causes are as likely."""


def primary_of(results: Iterable[CheckResult], evidence: LogEvidence | None = None) -> str | None:
    """The id of the finding that explains the others: a root, which nothing else explains, and no mere guess. A remark
    (info) is one only where an error or a warning follows from it. Among several roots the one that explains most; then
    errors before warnings, the surer before the less sure, what logs report first, and the order in which a job meets
    them."""
    results = list(results)
    standing = [(result.id, finding) for result in results for finding in result.findings if finding.stands]
    explains: dict[str, int] = {}
    for _, finding in standing:
        if finding.explained_by and finding.severity is not Severity.INFO:
            explains[finding.explained_by] = explains.get(finding.explained_by, 0) + 1
    roots = [
        (name, one)
        for name, one in standing
        if not one.explained_by
        and one.confidence >= CARRIES
        and (one.severity is not Severity.INFO or name in explains)
    ]
    roots = roots or [
        pair for pair in standing if pair[1].confidence >= CARRIES and _explains_itself(pair[0], standing)
    ]
    if not roots:
        return None
    order = {result.id: position for position, result in enumerate(results)}

    def merit(root: tuple[str, ReportFinding]) -> tuple[float, ...]:
        name, finding = root
        return (
            explains.get(name, 0),
            finding.severity.weight,
            round(finding.confidence, 1),
            -_position(finding, evidence),
            -order[name],
        )

    return max(roots, key=merit)[0]


def _explains_itself(name: str, standing: Iterable[tuple[str, ReportFinding]]) -> bool:
    """Whether findings explain one another in a circle that goes through ``name``: each of them is as good a root."""
    causes = {consequence: one.explained_by for consequence, one in standing if one.explained_by}
    at, steps = causes.get(name), 0
    while at is not None and at != name and steps < len(causes):
        at, steps = causes.get(at), steps + 1
    return at == name


def _position(finding: ReportFinding, evidence: LogEvidence | None) -> float:
    """Where the first line that tells of it stands among all that logs say; behind these without one."""
    place = evidence.position(finding.source.file, finding.source.line) if evidence and finding.source else None
    return math.inf if place is None else place

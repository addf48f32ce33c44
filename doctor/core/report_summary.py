"""Summarizes check results as a report: verdict, exit code, primary cause, coverage."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence

import msgspec

from doctor.core.clock import time
from doctor.core.facts import DeviceSpeedFacts, LogEvidence, Missing
from doctor.core.finding import PRIMARY_CONFIDENCE, Severity, Status
from doctor.core.job import Job
from doctor.core.logs.event_groups import SYMPTOMS
from doctor.core.masking import mask_record
from doctor.core.report_document import (
    MOST_CONTEXT,
    SCHEMA,
    CheckCoverage,
    CheckResult,
    DeviceContext,
    FailOn,
    HostRanks,
    Report,
    ReportFinding,
    ReportInput,
    ReportJob,
    ReportTool,
    RunOutcome,
    RunReport,
    RunReports,
    VerdictWord,
)

INCONCLUSIVE = 3
"""The exit code of a report that can neither pass nor fail."""

_VERDICTS: dict[int, VerdictWord] = {0: "pass", 1: "fail", INCONCLUSIVE: "inconclusive"}
_WORST_FIRST = (1, INCONCLUSIVE, 0)


def summarize(
    job: Job | None,
    results: Sequence[CheckResult],
    *,
    started: float,
    fail_on: FailOn = "error",
    strict: bool = False,
    must_be_complete: bool = False,
    inconclusive: bool = False,
    inputs: Iterable[ReportInput] = (),
    outcome: RunOutcome | None = None,
) -> Report:
    """The report on ``results``.

    ``job`` is ``None`` if files were checked. ``started``: ``time.time()`` when the command began. ``strict``: any
    unknown result makes the verdict inconclusive; ``must_be_complete``: any missing rank does; ``inconclusive``: the
    caller knows another reason.
    """
    inconclusive = inconclusive or _has_errors(results, strict=strict)
    inconclusive = inconclusive or (job is not None and _is_open(job, results, must_be_complete=must_be_complete))
    inconclusive = inconclusive or (outcome is not None and not outcome.is_orderly)
    seen = len({rank.number for rank in job.ranks}) if job is not None else 0
    expected = max(job.world_size, seen) if job is not None else 0
    report = Report(
        schema=SCHEMA,
        tool=ReportTool(),
        started=_timestamp(started),
        seconds=round(time() - started, 3),
        exit_code=_exit_code(results, fail_on, inconclusive=inconclusive),
        verdict=_verdict(results, inconclusive=inconclusive),
        job=describe_job(job) if job is not None else None,
        coverage=CheckCoverage(_count_statuses(results), ranks_seen=seen, ranks_expected=expected),
        primary=primary_of(results, job.evidence if job is not None else None),
        inputs=tuple(inputs),
        results=tuple(results),
        outcome=outcome,
        contexts=measured_contexts(job) if job is not None else (),
    )
    return mask_record(report)


def measured_contexts(job: Job) -> tuple[DeviceContext, ...]:
    """Return the largest CUDA context that the full probes measured on each kind of GPU, by the name of the GPU."""
    largest: dict[str, int] = {}
    for rank in job.ranks:
        speeds = rank.find(DeviceSpeedFacts)
        for sample in speeds.samples if speeds is not None else ():
            if sample.context is not None and 0 < sample.context <= MOST_CONTEXT:
                largest[sample.name] = max(sample.context, largest.get(sample.name, 0))
    if not largest:  # the default itself, which msgspec omits; before Python 3.11 an empty tuple may be another one
        return ()
    return tuple(DeviceContext(name, size) for name, size in sorted(largest.items()))


def summarize_again(report: Report, results: Sequence[CheckResult], *, started: str) -> Report:
    """The ``report`` with the ``results`` of several evaluations in place of its own."""
    inconclusive = _has_errors(results, strict=False)
    return msgspec.structs.replace(
        report,
        started=started,
        exit_code=_exit_code(results, "error", inconclusive=inconclusive),
        verdict=_verdict(results, inconclusive=inconclusive),
        results=tuple(results),
        coverage=msgspec.structs.replace(report.coverage, checks=_count_statuses(results)),
        primary=primary_of(results),
    )


def merge_reports(reports: Iterable[tuple[str, Report]], *, started: float) -> RunReports:
    """The document of several runs, with their worst verdict."""
    runs = tuple(RunReport(name, report) for name, report in reports)
    words = [_VERDICTS[code] for code in _WORST_FIRST]
    return RunReports(
        schema=SCHEMA,
        tool=ReportTool(),
        started=_timestamp(started),
        seconds=round(time() - started, 3),
        exit_code=min((run.report.exit_code for run in runs), key=_WORST_FIRST.index),
        verdict=min((run.report.verdict for run in runs), key=words.index),
        runs=runs,
    )


def _timestamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")


def _exit_code(results: Iterable[CheckResult], fail_on: FailOn, *, inconclusive: bool) -> int:
    """The exit code: 1 for a finding at or above ``fail_on``, else 3 if inconclusive, else 0."""
    least = {"error": Severity.ERROR.weight, "warning": Severity.WARNING.weight, "never": 99}[fail_on]
    standing = (finding for result in results for finding in result.findings if finding.stands)
    if any(finding.severity.weight >= least for finding in standing):
        return 1
    return INCONCLUSIVE if inconclusive else 0


def _verdict(results: Iterable[CheckResult], *, inconclusive: bool) -> VerdictWord:
    """The verdict, which settings that change the exit code do not change."""
    return _VERDICTS[_exit_code(results, "error", inconclusive=inconclusive)]


def _has_errors(results: Iterable[CheckResult], *, strict: bool) -> bool:
    """Whether a check raised an exception; ``strict``: or was unknown."""
    bad = {Status.ERROR, Status.UNKNOWN} if strict else {Status.ERROR}
    return any(result.status in bad or result.crash is not None for result in results)


def _is_open(job: Job, results: Iterable[CheckResult], *, must_be_complete: bool) -> bool:
    """Whether ranks are missing, a collector failed, or a failure has no known cause."""
    return (
        (must_be_complete and bool(job.ungathered or job.absent))
        or (job.evidence is not None and _is_unexplained(results))
        or bool(breakages(job))
    )


def _is_unexplained(results: Iterable[CheckResult]) -> bool:
    """Whether a symptom was found without its cause."""
    return any(
        result.id in SYMPTOMS
        for result in results
        for one in result.findings
        if one.stands and one.severity is not Severity.INFO and not one.explained_by
    )


def breakages(job: Job) -> tuple[Missing, ...]:
    """The distinct reasons of collectors that raised an exception or timed out."""
    holders = (*job.hosts, *job.ranks)
    missing = (value for holder in holders for value in holder.sections.values() if isinstance(value, Missing))
    return tuple(dict.fromkeys(value for value in missing if value.is_breakage))


def describe_job(job: Job) -> ReportJob:
    """The job as the report shows it."""
    hosts = tuple(HostRanks(local.name, local.ranks) for local in job.by_host())
    return ReportJob(job.launcher, job.world_size, hosts, job.absent, at_least=not job.world_is_stated)


def _count_statuses(results: Iterable[CheckResult]) -> dict[str, int]:
    counts = {status.value: 0 for status in Status}
    for result in results:
        counts[result.status.value] += 1
    return counts


def primary_of(results: Iterable[CheckResult], evidence: LogEvidence | None = None) -> str | None:
    """The id of the primary cause, or ``None``.

    That is a finding with enough confidence that no other finding explains; an info finding qualifies only if it
    explains an error or a warning. Of several candidates, the one that explains most findings wins; then severity,
    confidence, the order of lines in logs and the order of the checks decide.
    """
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
        and one.confidence >= PRIMARY_CONFIDENCE
        and (one.severity is not Severity.INFO or name in explains)
    ]
    roots = roots or [
        pair for pair in standing if pair[1].confidence >= PRIMARY_CONFIDENCE and _explains_itself(pair[0], standing)
    ]
    # Without any of these, the primary finding is what was seen: a process failed, and nothing shows why.
    roots = roots or [
        pair
        for pair in standing
        if pair[0] in SYMPTOMS and pair[1].severity is not Severity.INFO and not pair[1].explained_by
    ]
    if not roots:
        return None
    order = {result.id: position for position, result in enumerate(results)}

    def merit(root: tuple[str, ReportFinding]) -> tuple[float, ...]:
        name, finding = root
        place = evidence.position(finding.source.file, finding.source.line) if evidence and finding.source else None
        return (
            explains.get(name, 0),
            finding.severity.weight,
            round(finding.confidence, 1),
            -math.inf if place is None else -place,
            -order[name],
        )

    return max(roots, key=merit)[0]


def _explains_itself(name: str, standing: Iterable[tuple[str, ReportFinding]]) -> bool:
    """Whether findings explain one another in a cycle through ``name``: each is as good a root cause as the others."""
    causes = {consequence: one.explained_by for consequence, one in standing if one.explained_by}
    at, steps = causes.get(name), 0
    while at is not None and at != name and steps < len(causes):
        at, steps = causes.get(at), steps + 1
    return at == name

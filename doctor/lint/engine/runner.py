"""Builds the report document: ``"job": null``, one result per id, counts of files instead of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.finding import Source, Status, capitalized
from doctor.core.report_document import CheckResult, Ignored, Report, ReportFinding, ReportInput
from doctor.core.settings import Settings
from doctor.core.text import counted
from doctor.lint.engine.discovery import LintTarget, find_files
from doctor.lint.engine.file_check import DEADLINE, FileChecker, FileResult, LocatedViolation
from doctor.lint.engine.registry import Rulebook
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.rule import Rule
from doctor.lint.engine.worker_pool import map_in_workers
from doctor.lint.python.script import Script

WALK_DEADLINE = 120.0
"""Seconds to find the files of a folder."""
GRACE = 5.0
"""Seconds beyond its deadline after which a file and its worker are given up."""


@dataclass(frozen=True)
class LintRequest:
    """The rules to apply and their context. ``known``: the family of every id; ``releases``: of distributions;
    ``processors``: of the machine that runs the scripts; ``strict``: unreadable files make the report inconclusive."""

    book: Rulebook
    settings: Settings
    known: Mapping[str, str]
    releases: Releases
    processors: int | None = None
    strict: bool = False

    def shows_previews_of(self, rule: Rule) -> bool:
        """Whether findings of a rule that are in preview are reported: all are, or its id is selected in full."""
        return self.settings.preview or rule.id in map(str.upper, self.settings.select)


def lint_paths(paths: Sequence[Path], asked: LintRequest) -> list[FileResult]:
    """The results of all files; raises ``UnusableError`` if none of them can be read."""

    def lost(root: Path, why: str) -> list[LintTarget]:
        return [LintTarget(root, str(root), "unknown", root, why)]

    roots = map_in_workers(paths, lambda root: find_files([root]), lost, deadline=WALK_DEADLINE, most=1)
    targets = {target.path: target for found in roots for target in found}
    verdicts = [one for one in lint_targets(list(targets.values()), asked) if not one.dull]
    if all(one.skipped is not None and not one.ran_out for one in verdicts):
        if not verdicts:
            raise UnusableError("nothing can be judged: there is no file in what was given")
        raise UnusableError(f"nothing can be judged: {verdicts[0].target.shown}: {verdicts[0].skipped}")
    return verdicts


def lint_targets(
    targets: Sequence[LintTarget], asked: LintRequest, project: Sequence[LintTarget] | None = None
) -> list[FileResult]:
    """The results of these files, computed on all cores. ``project``: the files that imports are followed to; without
    it, the same ones."""
    judge = FileChecker(
        asked.book,
        releases=asked.releases,
        processors=asked.processors,
        known=asked.known,
        project=targets if project is None else project,
    )
    results = map_in_workers(
        targets,
        judge.judge,
        lambda target, why: FileResult(target, target.kind, why, ran_out=True),
        deadline=DEADLINE + GRACE,
    )
    for one in results:
        _leave_out(one, asked)
    _report_once(results, asked)
    return results


def _report_once(results: Iterable[FileResult], asked: LintRequest) -> None:
    """Keep the first of the findings about one fault of a whole folder that was given, with the places of the others,
    which are left out. One that a comment or the settings accept stands for itself."""
    others: dict[tuple[object, ...], list[str]] = {}
    first: list[tuple[FileResult, LocatedViolation, list[str]]] = []
    for result in results:
        kept = []
        for one in result.found:
            violation, place = one.violation, f"{result.target.shown}:{one.place.line}"
            key = (result.target.root, one.rule, violation.once, violation.severity)
            accepted = one.ignored or asked.settings.ignored_in(asked.book.rules[one.rule], result.target.shown)
            if violation.once and not accepted and key in others:
                others[key].append(place)
                continue
            if violation.once and not accepted:
                first.append((result, one, others.setdefault(key, [])))
            kept.append(one)
        result.found = kept
    for result, one, places in first:
        if places:
            also = _with_others(one, f"also in {counted(len(places), 'other line')}", places)
            result.found[result.found.index(one)] = also


def _with_others(one: LocatedViolation, words: str, places: Sequence[str]) -> LocatedViolation:
    violation = one.violation
    known = [one for name, value in violation.evidence if name == "also" and isinstance(value, list) for one in value]
    kept = tuple(entry for entry in violation.evidence if entry[0] != "also")
    summary, evidence = f"{violation.summary} ({words})", (*kept, ("also", [*known, *places]))
    return one._replace(violation=replace(violation, summary=summary, evidence=evidence))


def _leave_out(result: FileResult, asked: LintRequest) -> None:
    """Leave out what is in preview, and what is in tests, unless it is asked for. Comments that accept such findings
    have had their effect."""
    shown = []
    for one in result.found:
        rule = asked.book.rules[one.rule]
        is_preview = rule.is_preview(one.violation) and not asked.shows_previews_of(rule)
        if not is_preview and (asked.settings.tests or not result.of_tests):
            shown.append(one)
        elif not (one.ignored or asked.settings.ignored_in(rule, result.target.shown)):
            counts = result.hidden if is_preview else result.in_tests
            counts[one.rule] = counts.get(one.rule, 0) + 1
    result.found = shown


def build_report(verdicts: Sequence[FileResult], asked: LintRequest, *, started: float) -> Report:
    """The report. ``started``: ``time.time()`` when the command began."""
    from doctor.core.check_runner import crash_at_load
    from doctor.core.report_summary import summarize

    groups: dict[str, list[int]] = {}
    for number, rule in enumerate(asked.book.rules):
        groups.setdefault(rule.id, []).append(number)
    findings = _findings(verdicts, asked)
    results = tuple(_result(numbers, verdicts, findings, asked) for numbers in groups.values())
    results += tuple(map(crash_at_load, asked.book.broken))
    return summarize(
        None,
        results,
        started=started,
        fail_on=asked.settings.fail_on,
        strict=asked.strict,
        inconclusive=any(one.ran_out or (one.decisive and one.skipped is not None) for one in verdicts),
        inputs=map(_input, verdicts),
    )


def _input(verdict: FileResult) -> ReportInput:
    decisive = True if (verdict.decisive or verdict.ran_out) and verdict.skipped is not None else msgspec.UNSET
    return ReportInput(verdict.target.shown, verdict.kind, verdict.skipped, verdict.notes or msgspec.UNSET, decisive)


def _findings(verdicts: Iterable[FileResult], asked: LintRequest) -> dict[int, list[ReportFinding]]:
    """By index of the rule, in the order of files and lines; those in copies of the same code are one at the first
    path, with the places of the others. One that a comment or the settings accept stands for itself."""
    copies: dict[tuple[object, ...], list[tuple[str, int]]] = {}
    kept: list[tuple[FileResult, LocatedViolation, Ignored | None, list[tuple[str, int]]]] = []
    for verdict in verdicts:
        for one in verdict.found:
            rule, place = asked.book.rules[one.rule], (verdict.target.shown, one.place.line)
            ignored = one.ignored or asked.settings.ignored_in(rule, verdict.target.shown)
            places: list[tuple[str, int]] = []
            if one.digest and not ignored:
                key = (one.rule, one.violation.severity, rule.is_preview(one.violation), one.digest)
                places = copies.setdefault(key, places)
            places.append(place)
            kept.append((verdict, one, ignored, places))
    found: dict[int, list[ReportFinding]] = {}
    for verdict, one, ignored, places in kept:
        first, *others = sorted(places)
        if first == (verdict.target.shown, one.place.line):
            shown = one if not others else _with_copies(one, others)
            finding = _finding(asked.book.rules[one.rule], shown, verdict.target, ignored)
            found.setdefault(one.rule, []).append(finding)
    return found


def _with_copies(one: LocatedViolation, others: Sequence[tuple[str, int]]) -> LocatedViolation:
    places = [f"{file}:{line}" for file, line in others]
    return _with_others(one, f"and at {counted(len(places), 'more place')} with the same code", places)


def _finding(rule: Rule, found: LocatedViolation, target: LintTarget, ignored: Ignored | None) -> ReportFinding:
    violation = found.violation
    summary = capitalized(violation.summary)
    return ReportFinding(
        summary=summary,
        severity=violation.severity or rule.severity,
        ignored=ignored,
        ranks=(),
        hosts=(),
        evidence=_evidence(rule, found),
        effect=violation.effect or rule.effect_of(summary),
        fix=violation.fix or rule.fix,
        confidence=violation.confidence,
        source=Source(target.shown, found.place.line or None),
    )


def _evidence(rule: Rule, found: LocatedViolation) -> dict[str, object]:
    """``column`` counts characters from 1; ``end_column`` is exclusive; ``fixable``: ``--fix`` can fix it;
    ``preview``: it is reported because previews are asked for; ``flow``: the steps that lead to it."""
    place = found.place
    evidence: dict[str, object] = {"code": found.code, "column": place.column + 1}
    if place.end_line is not None and place.end_column is not None:
        evidence |= {"end_line": place.end_line, "end_column": place.end_column + 1}
    if found.cell is not None:
        evidence |= {"cell": found.cell[0], "line_in_cell": found.cell[1]}
    if rule.foreshadows:
        evidence["foreshadows"] = list(rule.foreshadows)
    if found.violation.edits and found.cell is None:
        evidence["fixable"] = True
    if rule.is_preview(found.violation):
        evidence["preview"] = True
    if found.violation.flow:
        evidence["flow"] = [one._asdict() for one in found.violation.flow]
    return evidence | dict(found.violation.evidence)


def _result(
    numbers: Sequence[int],
    verdicts: Sequence[FileResult],
    findings: Mapping[int, list[ReportFinding]],
    asked: LintRequest,
) -> CheckResult:
    rules = [asked.book.rules[number] for number in numbers]
    own = tuple(one for number in numbers for one in findings.get(number, ()))
    crash = _crash(numbers, verdicts)
    census = _RuleCoverage(numbers, rules, verdicts)
    status, reason = _status(own, crash, census)
    if status is Status.PASS and not any(_is_applied(rule, asked) for rule in rules):
        status, reason = Status.SKIP, "in preview: --preview applies it"
    gravest = max((one.severity for one in (own or rules)), key=lambda severity: severity.weight)
    return CheckResult(
        id=rules[0].id,
        name=rules[0].name,
        family=rules[0].family,
        status=status,
        severity=gravest,
        seen=census.seen,
        expected=census.expected,
        reason=reason,
        seconds=round(sum(one.seconds.get(number, 0.0) for one in verdicts for number in numbers), 6),
        findings=own,
        crash=crash if status is Status.FAIL else None,
        origin=None if rules[0].origin == "built-in" else rules[0].origin,
        hidden=sum(one.hidden.get(number, 0) for one in verdicts for number in numbers),
        in_tests=sum(one.in_tests.get(number, 0) for one in verdicts for number in numbers),
    )


def _is_applied(rule: Rule, asked: LintRequest) -> bool:
    return rule.state != "preview" or asked.shows_previews_of(rule)


def _crash(numbers: Sequence[int], verdicts: Iterable[FileResult]) -> str | None:
    crashes = [
        f"in {one.target.shown}: {one.crashes[number]}"
        for one in verdicts
        for number in numbers
        if number in one.crashes
    ]
    return crashes[0] + (f" (and in {len(crashes) - 1} more files)" if len(crashes) > 1 else "") if crashes else None


class _RuleCoverage:
    """The files that the rules of an id could check."""

    def __init__(self, numbers: Sequence[int], rules: Sequence[Rule], verdicts: Iterable[FileResult]) -> None:
        self.reads_python = any(issubclass(Script, rule.reads) for rule in rules)
        kinds = ("python", "notebook") if self.reads_python else ()
        self.missing = [one for one in verdicts if one.skipped is not None and one.kind in kinds]
        self.seen = sum(one.skipped is None and not one.judged.isdisjoint(numbers) for one in verdicts)
        crashed = sum(not one.crashes.keys().isdisjoint(numbers) for one in verdicts)
        self.expected = self.seen + crashed + len(self.missing)


def _status(own: Sequence[ReportFinding], crash: str | None, census: _RuleCoverage) -> tuple[Status, str | None]:
    if any(one.stands for one in own):
        return Status.FAIL, None
    if crash is not None:
        return Status.ERROR, crash
    if census.missing:
        first = f"{census.missing[0].target.shown}: {census.missing[0].skipped}"
        files = f"{len(census.missing)} of {counted(census.expected, 'file')}"
        return Status.UNKNOWN, f"{files} could not be judged: {first}"
    if not census.seen:
        return Status.SKIP, "no Python was given" if census.reads_python else "no launch file of its kind was given"
    return Status.PASS, None

"""Findings in files as SARIF 2.1.0, which code-scanning services and editors read.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from doctor.core.errors import UnusableError
from doctor.core.finding import Severity, Status
from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.lint.engine.rule import Replacement
from doctor.report.formatting import as_json
from doctor.report.playbook import find_page

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


class RuleDescription(Protocol):
    """What is told of a rule."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def severity(self) -> Severity:
        """As declared."""

    @property
    def question(self) -> str:
        """What it asks."""

    @property
    def effect(self) -> str:
        """Why it hurts."""

    @property
    def fix(self) -> str:
        """The way out."""


Fixes = Mapping[tuple[str, str, int], Sequence[Replacement]]
"""By id of the rule, file and line of the finding."""


def render_sarif(report: Report, rules: Iterable[RuleDescription], fixes: Fixes | None = None) -> str:
    """The report as a SARIF log of one run. ``rules``: whatever may bear the ids of its results."""
    described = {rule.id: rule for rule in rules}
    driver = {
        "name": report.tool.name,
        "version": report.tool.version,
        "semanticVersion": report.tool.version,
        "rules": [_rule(result, described.get(result.id)) for result in report.results],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(report)],
        "artifacts": [{"location": _location(one.path)} for one in report.inputs if one.skipped is None],
        "results": list(_results(report, fixes or {})),
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return as_json(document) + "\n"


def _rule(result: CheckResult, rule: RuleDescription | None) -> dict[str, Any]:
    told: dict[str, Any] = {"id": result.id, "name": _camel(result.name)}
    if rule is None:
        return told
    question = rule.question.removeprefix("Ask ")
    return told | {
        "shortDescription": {"text": f"{question[:1].upper()}{question[1:]}"},
        "fullDescription": {"text": rule.effect},
        "help": _help(rule),
        "defaultConfiguration": {"level": _LEVEL[rule.severity]},
        "properties": {"tags": [result.family, "distributed-training"], "precision": "high"},
    }


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


def _help(rule: RuleDescription) -> dict[str, str]:
    """The way out, and the page of ``doctor explain``; rules of guests have none."""
    try:
        return {"text": rule.fix, "markdown": find_page(rule.id).markdown}
    except UnusableError:
        return {"text": rule.fix, "markdown": rule.fix}


def _invocation(report: Report) -> dict[str, Any]:
    broken = [
        {"level": "error", "message": {"text": f"{result.id} {result.name} crashed {crash}"}}
        for result in report.results
        if (crash := result.reason if result.status is Status.ERROR else result.crash) is not None
    ]
    unread = [(one.path, f"passed over: {one.skipped}") for one in report.inputs if one.skipped is not None]
    unread += [(one.path, note) for one in report.inputs for note in one.notes or ()]
    told = [{"level": "warning", "message": {"text": text}, "locations": [_where(path)]} for path, text in unread]
    return {
        "executionSuccessful": not broken,
        "exitCode": report.exit_code,
        "startTimeUtc": report.started.replace("+00:00", "Z"),
        "toolExecutionNotifications": broken + told,
    }


def _location(path: str) -> dict[str, Any]:
    """Relative to where the command ran, if it lies there: services look for it in the repository."""
    shown = path.replace(os.sep, "/")
    while shown.startswith("./"):
        shown = shown[2:]
    if os.path.isabs(path):  # noqa: PTH117
        return {"uri": Path(path).as_uri()}
    return {"uri": quote(shown)}


def _where(path: str) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": _location(path)}}


def _results(report: Report, fixes: Fixes) -> Iterator[dict[str, Any]]:
    alike: Counter[tuple[str, str, str]] = Counter()
    for index, result in enumerate(report.results):
        for finding in result.findings:
            yield _result(index, result, finding, fixes, alike)


def _result(
    index: int, result: CheckResult, finding: ReportFinding, fixes: Fixes, alike: Counter[tuple[str, str, str]]
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "ruleId": result.id,
        "ruleIndex": index,
        "level": _LEVEL[finding.severity],
        "message": {"text": f"{finding.summary}. {finding.fix}".replace("`", "")},
        "rank": round(100 * finding.confidence, 1),
        "partialFingerprints": {"rankdoctorLine/v1": _fingerprint(result, finding, alike)},
        "properties": {"effect": finding.effect, "confidence": finding.confidence},
    }
    if finding.source is not None:
        told["locations"] = [_region_of(finding)]
        key = (result.id, finding.source.file, finding.source.line or 0)
        if key in fixes:
            told["fixes"] = [_fix(finding, fixes[key])]
    if finding.ignored is not None:
        kind = "external" if _is_from_settings(finding) else "inSource"
        told["suppressions"] = [{"kind": kind, "status": "accepted", "justification": finding.ignored.reason}]
    return told


def _is_from_settings(finding: ReportFinding) -> bool:
    file = finding.source.file if finding.source is not None else ""
    return finding.ignored is not None and finding.ignored.by.rpartition(":")[0] != file


def _fingerprint(result: CheckResult, finding: ReportFinding, alike: Counter[tuple[str, str, str]]) -> str:
    """The same when lines above it come and go: of the rule, the file, the text of the line, and which one of such."""
    file = finding.source.file if finding.source is not None else ""
    key = (result.id, file, " ".join(str(finding.evidence.get("code", "")).split()))
    alike[key] += 1
    return hashlib.sha256("\0".join((*key, str(alike[key]))).encode("utf-8", "replace")).hexdigest()[:32]


def _region_of(finding: ReportFinding) -> dict[str, Any]:
    """Lines and columns count from 1; ``endColumn`` is the first behind it."""
    if finding.source is None or not finding.source.line:
        return _where(finding.source.file if finding.source is not None else "")
    region: dict[str, Any] = {"startLine": finding.source.line}
    evidence = finding.evidence
    if "cell" not in evidence:
        names = {"startColumn": "column", "endLine": "end_line", "endColumn": "end_column"}
        region |= {name: evidence[key] for name, key in names.items() if isinstance(evidence.get(key), int)}
    if evidence.get("code"):
        region["snippet"] = {"text": str(evidence["code"])}
    place = _where(finding.source.file)
    place["physicalLocation"]["region"] = region
    return place


def _fix(finding: ReportFinding, replacements: Sequence[Replacement]) -> dict[str, Any]:
    changes = [
        {
            "artifactLocation": _location(one.file),
            "replacements": [
                {
                    "deletedRegion": {"startLine": one.first, "startColumn": 1, "endLine": one.last, "endColumn": 1},
                    "insertedContent": {"text": one.text},
                }
            ],
        }
        for one in replacements
    ]
    return {"description": {"text": finding.fix}, "artifactChanges": changes}

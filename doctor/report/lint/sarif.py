"""Renders findings in files as SARIF 2.1.0, which code-scanning services and editors read.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from doctor.core.errors import UnusableError
from doctor.core.finding import Severity
from doctor.core.report_document import CheckResult, Report, ReportFinding
from doctor.lint.engine.rule import Replacement, Rule
from doctor.report.formatting import as_json, crash_of, other_places
from doctor.report.playbook import find_page

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}

Fixes = Mapping[tuple[str, str, int], Sequence[Replacement]]
"""Replacements by the id of the rule, and the file and line of the finding."""


def render_sarif(report: Report, rules: Iterable[Rule], fixes: Fixes | None = None) -> str:
    """Return the report as a SARIF log of one run. ``rules``: describe the results by their ids."""
    described = {rule.id: rule for rule in rules}
    seen: Counter[tuple[str, str, str]] = Counter()
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
        "results": [
            _result(index, result, finding, fixes or {}, seen)
            for index, result in enumerate(report.results)
            for finding in result.findings
        ],
    }
    return as_json({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def _rule(result: CheckResult, rule: Rule | None) -> dict[str, Any]:
    name = "".join(word.capitalize() for word in result.name.split("-"))
    descriptor: dict[str, Any] = {"id": result.id, "name": name}
    if rule is None:
        return descriptor
    question = rule.question.removeprefix("Ask ")
    try:
        page = find_page(rule.id).markdown
    except UnusableError:  # a plugin's rule
        page = rule.fix
    return descriptor | {
        "shortDescription": {"text": f"{question[:1].upper()}{question[1:]}"},
        "fullDescription": {"text": rule.effect},
        "help": {"text": rule.fix, "markdown": page},
        "defaultConfiguration": {"level": _LEVEL[rule.severity]},
        "properties": {
            "tags": [result.family, "distributed-training"],
            "precision": "high" if rule.state == "stable" else "medium",
        },
    }


def _invocation(report: Report) -> dict[str, Any]:
    broken = [
        {"level": "error", "message": {"text": f"{result.id} {result.name} failed to run: {crash}"}}
        for result in report.results
        if (crash := crash_of(result)) is not None
    ]
    unread = [(one.path, f"skipped: {one.skipped}") for one in report.inputs if one.skipped is not None]
    unread += [(one.path, note) for one in report.inputs for note in one.notes or ()]
    skipped = [{"level": "warning", "message": {"text": text}, "locations": [_where(path)]} for path, text in unread]
    return {
        "executionSuccessful": not broken,
        "exitCode": report.exit_code,
        "startTimeUtc": report.started.replace("+00:00", "Z"),
        "toolExecutionNotifications": broken + skipped,
    }


def _location(path: str) -> dict[str, Any]:
    """Return a relative path as it is: services resolve it in the repository."""
    if os.path.isabs(path):  # noqa: PTH117
        return {"uri": Path(path).as_uri()}
    shown = path.replace(os.sep, "/")
    while shown.startswith("./"):
        shown = shown[2:]
    return {"uri": quote(shown)}


def _where(path: str) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": _location(path)}}


def _result(
    index: int, result: CheckResult, finding: ReportFinding, fixes: Fixes, seen: Counter[tuple[str, str, str]]
) -> dict[str, Any]:
    also = other_places(finding)
    files = "\0".join((_file(finding), *(file for file, _ in also)))  # a new copy is a new result
    line = (result.id, files, " ".join(str(finding.evidence.get("code", "")).split()))
    seen[line] += 1  # the fingerprint is unchanged if other lines move
    fingerprint = hashlib.sha256("\0".join((*line, str(seen[line]))).encode("utf-8", "replace")).hexdigest()[:32]
    entry: dict[str, Any] = {
        "ruleId": result.id,
        "ruleIndex": index,
        "level": _LEVEL[finding.severity],
        "message": {"text": f"{finding.summary}. {finding.fix}".replace("`", "")},
        "rank": round(100 * finding.confidence, 1),
        "partialFingerprints": {"rankdoctorLine/v1": fingerprint},
        "properties": {
            "effect": finding.effect,
            "confidence": finding.confidence,
            **({"state": "preview"} if finding.evidence.get("preview") else {}),
        },
    }
    if finding.source is not None:
        entry["locations"] = [_region_of(finding)]
        places = [(finding.source.file, finding.source.line or 0), *also]
        replacements = [one for file, at in places for one in fixes.get((result.id, file, at), ())]
        if replacements:
            entry["fixes"] = [_fix(finding, replacements)]
    if also:
        entry["relatedLocations"] = [_related(number, *one) for number, one in enumerate(also, 1)]
    if flow := finding.evidence.get("flow"):
        entry["codeFlows"] = [_code_flow(flow)]
    if finding.ignored is not None:
        kind = "inSource" if finding.ignored.by.rpartition(":")[0] == _file(finding) else "external"
        entry["suppressions"] = [{"kind": kind, "status": "accepted", "justification": finding.ignored.reason}]
    return entry


def _file(finding: ReportFinding) -> str:
    return finding.source.file if finding.source is not None else ""


def _region_of(finding: ReportFinding) -> dict[str, Any]:
    """Return the location; lines and columns count from 1, and ``endColumn`` is the first one after the region."""
    if finding.source is None or not finding.source.line:
        return _where(_file(finding))
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


def _related(number: int, file: str, line: int) -> dict[str, Any]:
    """Return another place of a finding."""
    place = {"id": number, **_where(file)}
    if line:
        place["physicalLocation"]["region"] = {"startLine": line}
    return place | {"message": {"text": "Also here"}}


def _code_flow(steps: Any) -> dict[str, Any]:
    """Return the steps that lead to a finding, with their notes."""
    locations = []
    for one in steps:
        place = _where(one["file"])
        place["physicalLocation"]["region"] = {"startLine": one["line"], "snippet": {"text": one["code"]}}
        locations.append({"location": place | {"message": {"text": one["note"] or one["code"]}}})
    return {"threadFlows": [{"locations": locations}]}


def _fix(finding: ReportFinding, replacements: Sequence[Replacement]) -> dict[str, Any]:
    changes = []
    for one in replacements:
        region = {"startLine": one.first, "startColumn": 1, "endLine": one.last, "endColumn": 1}
        replacement = {"deletedRegion": region, "insertedContent": {"text": one.text}}
        changes.append({"artifactLocation": _location(one.file), "replacements": [replacement]})
    return {"description": {"text": finding.fix}, "artifactChanges": changes}

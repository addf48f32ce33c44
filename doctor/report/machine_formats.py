"""Renders reports for programs: JSON, JUnit XML, workflow commands of GitHub and OpenMetrics."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, get_args

from doctor.core.finding import Severity, Status
from doctor.core.report_document import CheckResult, Report, ReportFinding, VerdictWord
from doctor.core.text import lazy_compile
from doctor.report.evidence_text import evidence_lines
from doctor.report.formatting import (
    as_json,
    counts_line,
    coverage_line,
    crash_of,
    families,
    place,
    printable,
    spelt_out,
)
from doctor.report.narrative import confidence

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_NOT_XML = lazy_compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 forbids."""
_GITHUB_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render_json(report: Report) -> str:
    """Return the report document, schema 1."""
    return as_json(report)


def render_junit(report: Report) -> str:
    """Return a suite per family with a case per check.

    Errors and warnings that are not ignored are failures; unknown and skipped checks are skipped cases."""
    return junit_document([("", report)], report.seconds)


def junit_document(reports: Iterable[tuple[str, Report]], seconds: float) -> str:
    """Return the suites of all reports, each name after the prefix of its report."""
    import xml.etree.ElementTree as ET

    root = ET.Element("testsuites", name="rankdoctor", time=f"{seconds:.3f}")
    for prefix, report in reports:
        shown = printable(report)
        for family, results in families(shown).items():
            _suite(root, prefix, family, results, shown)
    ET.indent(root)
    return _NOT_XML.sub("\ufffd", ET.tostring(root, encoding="unicode", xml_declaration=True)) + "\n"


def _suite(root: Element, prefix: str, family: str, results: list[CheckResult], report: Report) -> None:
    import xml.etree.ElementTree as ET

    cases = [_case(family, result, report) for result in results]
    count = {tag: str(sum(case.find(tag) is not None for case in cases)) for tag in ("failure", "error", "skipped")}
    suite = ET.SubElement(
        root,
        "testsuite",
        name=prefix + family,
        tests=str(len(cases)),
        failures=count["failure"],
        errors=count["error"],
        skipped=count["skipped"],
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    suite.extend(cases)


def _case(family: str, result: CheckResult, report: Report) -> Element:
    import xml.etree.ElementTree as ET

    name = f"{result.id} {result.name}"
    case = ET.Element("testcase", classname=f"doctor.{family}", name=name, time=f"{result.seconds:.3f}")
    loud = [f for f in result.findings if f.stands and f.severity is not Severity.INFO]
    if loud:
        failure = ET.SubElement(case, "failure", message=loud[0].summary, type=result.severity.value)
        failure.text = "\n\n".join(_plain(report, finding) for finding in loud)
    elif result.status is Status.ERROR or result.crash is not None:
        ET.SubElement(case, "error", message=result.crash or result.reason or "", type="error")
    elif result.status in (Status.UNKNOWN, Status.SKIP):
        ET.SubElement(case, "skipped", message=f"{result.status.value}: {result.reason}")
    quiet = [f for f in result.findings if f not in loud]
    if quiet:
        ET.SubElement(case, "system-out").text = "\n\n".join(_plain(report, finding) for finding in quiet)
    return case


def _plain(report: Report, finding: ReportFinding) -> str:
    ignored = f"\nignored: {finding.ignored.reason} ({finding.ignored.by})" if finding.ignored else ""
    evidence = "\n".join(evidence_lines(finding.evidence, finding.ranks))
    because = f" caused by: {finding.explained_by}" if finding.explained_by else ""
    sure = f"confidence: {confidence(finding)}{because and ';'}{because}"
    parts = {"impact": finding.effect, "fix": finding.fix}
    rest = "".join(f"\n{name}: {text}" for name, text in parts.items() if text)
    return f"{finding.summary}\nwhere: {place(finding, report)}\n{sure}\n{evidence}{rest}{ignored}"


def render_github(report: Report, prefix: str = "") -> str:
    """Return workflow commands: an annotation for each finding that is not ignored, and for each crash.

    Each message starts with ``prefix``."""
    report, prefix = printable(report), _github_text(spelt_out(prefix))
    lines = []
    for result in report.results:
        title = f"title={_github_property(f'{result.id} {result.name}')}::{prefix}"
        for finding in (finding for finding in result.findings if finding.stands):
            source, location = finding.source, ""
            if source is not None:
                line = f"line={source.line}," if source.line else ""
                location = f"file={_github_property(source.file)},{line}"
            level = _GITHUB_LEVEL[finding.severity]
            lines.append(f"::{level} {location}{title}{_github_text(_plain(report, finding))}")
        if (crash := crash_of(result)) is not None:
            lines.append(f"::warning {title}{_github_text(f'the check failed to run: {crash}')}")
    lines.append(f"rankdoctor: {prefix}{report.verdict}; {counts_line(report)}; {_github_text(coverage_line(report))}")
    return "\n".join(lines) + "\n"


def _github_text(text: str) -> str:
    """Escape what would end a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_text(text).replace(":", "%3A").replace(",", "%2C")


def render_openmetrics(report: Report) -> str:
    """Return the report as gauges in the text format of OpenMetrics.

    Gauges without units and timestamps are the same in Prometheus' own text format, which node_exporter's textfile
    collector reads (https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md).
    """
    started = datetime.datetime.fromisoformat(report.started).timestamp()
    findings = Counter(
        (result.id, result.name, finding.severity.value)
        for result in report.results
        for finding in result.findings
        if finding.stands
    )
    coverage = report.coverage
    lines = [
        *_gauge("timestamp_seconds", "Time at which the check began, since the epoch.", [({}, started)]),
        *_gauge("duration_seconds", "Time that the check took.", [({}, report.seconds)]),
        *_gauge("exit_code", "Exit code: 0 nothing found, 1 found, 3 inconclusive.", [({}, report.exit_code)]),
        *_gauge(
            "verdict",
            "1 for the verdict of the report, 0 for the others.",
            [({"verdict": one}, int(one == report.verdict)) for one in get_args(VerdictWord)],
        ),
        *_gauge("results", "Checks by status.", [({"status": one}, count) for one, count in coverage.checks.items()]),
        *_gauge(
            "ranks",
            "Ranks that were seen and expected.",
            [({"state": "seen"}, coverage.ranks_seen), ({"state": "expected"}, coverage.ranks_expected)],
        ),
        *_gauge(
            "findings",
            "Findings that are not ignored.",
            [({"id": id_, "name": name, "severity": worst}, n) for (id_, name, worst), n in findings.items()],
        ),
        "# EOF",
    ]
    return "\n".join(lines) + "\n"


def _gauge(name: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    name = f"rankdoctor_check_{name}"
    yield f"# TYPE {name} gauge"
    yield f"# HELP {name} {meaning}"
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_label_value(text)}"' for key, text in labels.items())
        yield f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"


def _label_value(text: str) -> str:
    return spelt_out(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


MACHINE_FORMATS = {
    "json": render_json,
    "junit": render_junit,
    "github": render_github,
    "openmetrics": render_openmetrics,
}
"""Format -> function that renders a report without its job."""

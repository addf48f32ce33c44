"""The report as OpenMetrics: read by the parsers of prometheus_client, and by promtool where it is installed."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from doctor.api import Finding, Severity
from doctor.core.settings import IgnoreEntry, Settings
from doctor.report.machine_formats import render_openmetrics
from tests.lab.needs import ROOT
from tests.lab.speed import patience
from tests.sinks.reports import DIED, SLOW, report_of, result_of

parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="needs prometheus-client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402 - after the skip

PROMTOOL = shutil.which("promtool")


def _samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """All samples; both formats give the same."""
    read = [
        {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in families(text)
            for sample in family.samples
        }
        for families in (parser.text_string_to_metric_families, text_string_to_metric_families)
    ]
    assert read[0] == read[1]
    return read[0]


def test_findings_statuses_and_the_verdict_are_gauges() -> None:
    slow = result_of("RUN003", "rank-straggling", SLOW, Finding("another"), severity=Severity.WARNING)
    settings = Settings(ignore=(IgnoreEntry("NET001", "known", by="here"),))
    report = report_of(
        slow, result_of("RUN004", "rank-died", DIED), result_of("NET001", "x", Finding("one")), settings=settings
    )
    samples = _samples(render_openmetrics(report))
    prefix = "rankdoctor_check_"
    assert {labels: value for (name, labels), value in samples.items() if name == f"{prefix}findings"} == {
        ("RUN003", "rank-straggling", "warning"): 2.0,
        ("RUN004", "rank-died", "error"): 1.0,
    }
    assert samples[f"{prefix}exit_code", ()] == 1.0
    verdicts = {labels: value for (name, labels), value in samples.items() if name == f"{prefix}verdict"}
    assert verdicts == {("pass",): 0.0, ("fail",): 1.0, ("inconclusive",): 0.0}
    assert samples[f"{prefix}ranks", ("seen",)] == 4.0
    assert samples[f"{prefix}results", ("fail",)] >= 2.0


def test_a_name_of_a_plugin_can_t_break_the_format() -> None:
    report = report_of(result_of("RUN003", "x", Finding("one")))
    named = tuple(msgspec.structs.replace(one, name='a"b\\c\nd') for one in report.results)
    report = msgspec.structs.replace(report, results=named)
    (labels,) = (labels for name, labels in _samples(render_openmetrics(report)) if name == "rankdoctor_check_findings")
    assert labels[0] == "RUN003"
    assert labels[1].startswith('a"b')


def test_a_check_writes_it_for_the_textfile_collector(tmp_path: Path) -> None:
    file = tmp_path / "rankdoctor.prom"
    command = [sys.executable, "-m", "doctor", "check", "--gather", "none", "--format", "openmetrics", "-o", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode in (0, 1), done.stderr
    text = file.read_text()
    assert text.endswith("# EOF\n")
    assert _samples(text)["rankdoctor_check_exit_code", ()] == done.returncode
    assert "# TYPE rankdoctor_check_findings gauge" in text
    # A comment but TYPE and HELP is ignored by the collector, and it refuses samples with timestamps.
    assert all(len(line.rpartition("}")[2].split()) <= 2 for line in text.splitlines() if not line.startswith("#"))
    assert stat.S_IMODE(file.stat().st_mode) & 0o400
    if PROMTOOL is not None:
        checked = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=patience(60)
        )
        assert checked.returncode == 0, checked.stderr

"""What is known of a run over many looks at it."""

import msgspec
import pytest

from doctor.api import Severity
from doctor.core.check import check
from doctor.core.check_registry import CheckRegistry
from doctor.core.finding import Finding
from doctor.core.settings import Settings
from doctor.monitor.finding_history import FindingHistory, finding_key
from doctor.session import judge
from doctor.testing import running

WORDS = {"effect": "it hurts", "fix": "mend it"}


def _report(*findings, settings=None):
    @check(id="RUN901", severity=Severity.WARNING, when="R")
    def planted(job):
        """Ask whether something was planted."""
        yield from findings

    return judge(running().job(), CheckRegistry((planted,)), settings or Settings())


def test_a_finding_is_news_once_though_its_numbers_change():
    chart = FindingHistory()
    assert [one.finding.summary for one in chart.note(_report(Finding("3 MB a step", ranks=(1,), **WORDS)))] == [
        "3 MB a step"
    ]
    assert chart.note(_report(Finding("4 MB a step", ranks=(1,), **WORDS))) == []
    assert [finding.summary for finding in chart.report.results[0].findings] == ["4 MB a step"]


def test_another_rank_and_a_higher_severity_are_news():
    chart = FindingHistory()
    chart.note(_report(Finding("slow", ranks=(1,), **WORDS)))
    assert chart.note(_report(Finding("slow", ranks=(0,), **WORDS)))
    assert chart.note(_report(Finding("worse", ranks=(1,), severity=Severity.ERROR, **WORDS)))
    assert chart.note(_report(Finding("slow", ranks=(0, 1), **WORDS))) == []


def _planted(*ids, family="DATA"):
    """A report of two checks, the first of which explains the second; ``ids`` find something."""
    first, second = f"{family}901", f"{family}902"

    @check(id=first, severity=Severity.WARNING, when="R")
    def cause(job):
        """Ask whether something was planted."""
        if 901 in ids:
            yield Finding("the cause", ranks=(0, 1), explains=(second,), **WORDS)

    @check(id=second, severity=Severity.ERROR, when="R")
    def consequence(job):
        """Ask whether something else was planted."""
        if 902 in ids:
            yield Finding("the consequence", ranks=(0, 1), **WORDS)

    return judge(running().job(), CheckRegistry((cause, consequence)), Settings())


def _loud(chart, report):
    return [one.finding.summary for one in chart.note(report) if one.is_loud]


def test_a_consequence_of_a_known_cause_is_not_loud():
    chart = FindingHistory()
    assert _loud(chart, _planted(901)) == ["The cause"]
    (news,) = chart.note(_planted(901, 902))
    assert (news.finding.summary, news.is_loud) == ("The consequence", False)
    assert chart.report.result("DATA902").findings[0].severity is Severity.ERROR


def test_progress_findings_are_loud_whatever_their_cause():
    chart = FindingHistory()
    chart.note(_planted(901, family="RUN"))
    assert _loud(chart, _planted(901, 902, family="RUN")) == ["The consequence"]


def test_a_consequence_is_loud_if_its_cause_was_not_reported():
    assert _loud(FindingHistory(), _planted(902)) == ["The consequence"]
    assert _loud(FindingHistory(), _planted(901, 902)) == ["The cause", "The consequence"]


def test_what_was_found_stays_when_it_is_not_seen_any_more():
    chart = FindingHistory()
    chart.note(_report(Finding("slow", ranks=(1,), severity=Severity.ERROR, **WORDS)))
    chart.note(_report())
    assert chart.report.exit_code == 1
    assert chart.report.verdict == "fail"
    assert chart.report.primary == "RUN901"
    assert chart.report.coverage.checks["fail"] == 1


def test_what_was_found_for_a_stall_is_a_remark_once_the_run_goes_on():
    chart = FindingHistory()
    stall = Finding("it stands still", ranks=(1,), severity=Severity.ERROR, **WORDS)
    (news,) = chart.note(_report(stall))
    other = ("RUN901", (0,), ())
    assert chart.downgrade({other}, 12.4) == [], "what was found of others stays as it is"
    (demoted,) = chart.downgrade({finding_key(news)}, 12.4)
    (finding,) = chart.report.results[0].findings
    assert demoted.finding == finding
    assert (finding.summary, finding.severity) == ("it stands still; training resumed after 12 s", Severity.INFO)
    assert (chart.report.verdict, chart.report.exit_code, chart.report.primary) == ("pass", 0, None)
    chart.note(_report())
    assert chart.report.verdict == "pass"
    assert chart.note(_report(stall)), "the same once more is news"
    assert chart.report.verdict == "fail"


def test_a_healthy_run_stays_healthy():
    chart = FindingHistory()
    for _ in range(3):
        assert chart.note(_report()) == []
    assert (chart.report.exit_code, chart.report.primary) == (0, None)


def test_another_rank_goes_on_from_the_report_on_disk(tmp_path):
    first, second = FindingHistory(), FindingHistory()
    first.note(_report(Finding("slow", ranks=(1,), **WORDS)))
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(first.report))
    second.take_over(path)
    assert second.note(_report(Finding("slow", ranks=(1,), **WORDS))) == []


def test_the_report_of_another_run_is_no_matter_of_this_one(tmp_path):
    chart, path = FindingHistory(), tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(_report(), run="aa-1")))
    chart.take_over(path, "bb-1")
    assert chart.report is None
    chart.take_over(path, "aa-1")
    assert chart.report is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_report_is_passed_over(tmp_path, content):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    chart = FindingHistory()
    chart.take_over(path)
    chart.take_over(tmp_path / "none")
    assert chart.report is None

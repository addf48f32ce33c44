import msgspec
import pytest

from doctor.api import Finding, Severity, Source, check
from doctor.core.check_registry import CheckRegistry
from doctor.core.job import UNKNOWN_HOST
from doctor.core.report_document import ReportInput
from doctor.core.settings import Settings
from doctor.facts import SoftwareFacts
from doctor.report.formatting import place
from doctor.report.narrative import (
    LogQuote,
    commands,
    confidence,
    headline,
    lines_of_ranks,
    narrative_of,
    quotes,
    to_collect,
)
from doctor.session import examine, judge
from doctor.testing import healthy
from tests.report.pages import logged_job


def checked(check_id, *findings, severity=Severity.ERROR):
    def faulty_thing(job):
        yield from findings

    faulty_thing.__name__ = f"faulty_{check_id.lower()}"
    return check(id=check_id, severity=severity, needs=(SoftwareFacts,))(faulty_thing)


def report_of(*checks, hosts=2):
    return judge(healthy(hosts, 2).job(), CheckRegistry(checks), Settings())


@pytest.mark.parametrize(
    ("finding", "sentence"),
    [
        (Finding("eth9 is not there", ranks=(2, 3)), "Ranks 2-3 (node1): eth9 is not there."),
        (Finding("rank 2 failed first: KeyError", ranks=(2,)), "Rank 2 on node1 failed first: KeyError."),
        (Finding("only rank 0 calls it; rank 1 waits", ranks=(0,)), "Only rank 0 on node0 calls it; rank 1 waits."),
        (Finding("ranks 0 and 2 differ", ranks=(0, 2)), "Ranks 0 and 2 on node0, node1 differ."),
        (Finding("ranks 2 and 3 differ", ranks=(2, 3)), "Ranks 2 and 3 on node1 differ."),
        (Finding("ranks 2-3 differ", ranks=(2, 3)), "Ranks 2-3 on node1 differ."),
        (Finding("ranks 0, 1 and 3 differ", ranks=(0, 1, 3)), "Ranks 0, 1 and 3 on node0, node1 differ."),
        (Finding("ranks 0 and 1 differ", ranks=(0, 1, 3)), "Ranks 0 and 1 differ (node0, node1)."),
        (Finding("rank 0 waits for rank 3", ranks=(3,)), "Rank 0 waits for rank 3 (node1)."),
        (Finding("node1: rank 3 is gone", ranks=(3,)), "node1: rank 3 is gone."),
        (Finding("nobody came"), "Nobody came."),
        (Finding("NCCL 2.20, elsewhere 2.27"), "NCCL 2.20, elsewhere 2.27."),
        (Finding("gpu-03:29500 can't be reached"), "gpu-03:29500 can't be reached."),
        (Finding("the disk is full", hosts=("node7",)), "The disk is full (node7)."),
    ],
)
def test_the_sentence_names_rank_and_host(finding, sentence):
    assert headline(report_of(checked("NET901", finding))) == sentence


def test_a_host_that_nobody_knows_is_not_named():
    report = report_of(checked("NET901", Finding("eth9 is not there", ranks=(2,), hosts=(UNKNOWN_HOST,))))
    assert headline(report) == "Rank 2: eth9 is not there."
    assert place(report.results[0].findings[0], report) == "rank 2"


def test_without_a_cause_the_sentence_says_why():
    assert headline(report_of(checked("NET901"))) == "No problems found (1 of 1 check applied)."
    report = report_of(checked("NET901", Finding("x", severity=Severity.INFO)))
    assert headline(report) == "No problems found (1 of 1 check applied)."
    left = msgspec.structs.replace(report, verdict="inconclusive", inputs=(ReportInput("job.log", "log"),))
    assert headline(left).startswith("The cause could not be determined: the run failed, but the inputs do not show")
    unclear = msgspec.structs.replace(report, verdict="inconclusive")
    assert headline(unclear) == "The cause could not be determined: required facts are missing."


def test_every_finding_has_one_part():
    cause = Finding("cause", explains=("NET902",), confidence=0.9)
    report = report_of(
        checked("NET901", Finding("another cause", confidence=0.5), cause),
        checked("NET902", Finding("consequence")),
        checked("NET903", Finding("apart", severity=Severity.WARNING)),
        checked("NET904", Finding("remark", severity=Severity.INFO)),
    )
    story = narrative_of(report)
    assert story.primary.finding.summary == "cause"
    assert [one.id for one in story.followed] == ["NET902"]
    assert [one.finding.summary for one in story.others] == ["another cause", "apart"]
    assert [one.finding.summary for one in story.remarks] == ["remark"]


@pytest.mark.parametrize(
    ("value", "words"),
    [(1, "very high (1)"), (0.9, "very high (0.9)"), (0.8, "high (0.8)"), (0.5, "moderate (0.5)"), (0.0, "low (0)")],
)
def test_confidence_in_words(value, words):
    report = report_of(checked("NET901", Finding("x", confidence=value)))
    assert confidence(report.results[0].findings[0]) == words


def test_what_can_be_pasted():
    assert commands("set `X` or `export X=1`; `export X=1` again, then `ip -br address`.") == [
        "export X=1",
        "ip -br address",
    ]


def test_lines_are_taken_apart():
    said = ["logs/job.log:12: rank 3: ValueError: a: b", "job.log:4: RuntimeError: x", "by hand"]
    report = report_of(checked("NET901", Finding("x", evidence={"said": said})))
    assert quotes(report.results[0].findings[0]) == [
        LogQuote("logs/job.log:12", "rank 3", "ValueError: a: b"),
        LogQuote("job.log:4", "", "RuntimeError: x"),
        LogQuote("", "", "by hand"),
    ]


def test_lines_of_a_rank_come_with_their_stack():
    job = logged_job(
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "/home/me/train.py", line 8, in step',
        "[rank2]:     loss = batch['label']",
        "[rank2]: KeyError: 'label'",
        hostile="",
    )
    lines = lines_of_ranks(job, (2,))
    assert LogQuote("job.log:9", "rank 2", "KeyError: 'label'") in lines
    assert lines[-1].text.strip() == "at /home/me/train.py:8 in step"
    assert lines_of_ranks(None, (2,)) == []


def test_what_to_collect_next_time_is_said_once():
    report = examine(logged_job(hostile=""))
    results = tuple(
        msgspec.structs.replace(result, reason="hidden; to see it: run as root" if number < 2 else result.reason)
        for number, result in enumerate(report.results)
    )
    first, second = (result.id for result in report.results[:2])
    assert (f"{first}, {second}", "run as root") in to_collect(msgspec.structs.replace(report, results=results))


def test_a_source_is_no_quote():
    report = report_of(checked("NET901", Finding("x", source=Source("a.py", 3))))
    assert quotes(report.results[0].findings[0]) == []

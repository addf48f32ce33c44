"""Checks of other people: whatever they do, they end as a crash and the report goes on."""

import msgspec
import pytest
from msgspec.structs import replace

from doctor.api import Finding, Scope, Severity, Skip, Status, Unknown, check
from doctor.core import check_runner as runner
from doctor.core.check_registry import CheckRegistry
from doctor.core.settings import Settings
from doctor.facts import SoftwareFacts
from doctor.session import judge
from doctor.testing import healthy
from tests.lab.cases import each_case


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


class Bare(BaseException):
    pass


def plugin(body, **options):
    """A check of somebody else whose body is a plain function of the job."""

    def strange_thing(job):
        return body(job)

    options = {"id": "ACME001", "severity": Severity.WARNING, "needs": (SoftwareFacts,), **options}
    return replace(check(**options)(strange_thing), origin="acme")


def looks_at_software():
    def plain_thing(job):
        for _, identical in job.each(SoftwareFacts):
            yield Finding("seen", ranks=identical.ranks, severity=Severity.INFO)

    return check(id="VER901", severity=Severity.INFO, needs=(SoftwareFacts,))(plain_thing)


def outcome(*bodies):
    """The report on plugins, with a built-in check after them that must not notice."""
    plugins = [plugin(body, id=f"ACME{number:03d}") for number, body in enumerate(bodies)]
    report = judge(healthy(2, 2).job(), CheckRegistry((*plugins, looks_at_software())), Settings())
    msgspec.json.encode(report)
    assert report.results[-1].findings[0].ranks == (0, 1, 2, 3)
    return report


def raising(error):
    def body(job):
        raise error

    return body


def itself():
    evidence = {}
    evidence["again"] = evidence
    return evidence


RAISED = [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), Bare("x"), Unspeakable(), RecursionError("deep")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_is_a_crash(error, capfd):
    report = outcome(raising(error))
    assert report.results[0].status is Status.ERROR
    assert type(error).__name__ in report.results[0].reason
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)
    assert capfd.readouterr().err == ""


def test_a_message_of_many_lines_becomes_one():
    assert outcome(raising(ValueError("a\nb\n" * 1000))).results[0].reason.startswith("ValueError: a b a b")
    assert len(outcome(raising(ValueError("x" * 10_000))).results[0].reason) < 400


@each_case(
    "verdict",
    [
        Finding(5),
        Finding(None),
        Finding("s", ranks=3),
        Finding("s", ranks=("a", None)),
        Finding("s", ranks=([],)),
        Finding("s", hosts="node0"),
        Finding("s", hosts=(1,)),
        Finding("s", severity="fatal"),
        Finding("s", confidence="high"),
        Finding("s", explains=3),
        Finding("s", source="train.py"),
        Finding("s", fix=5),
        Finding("s", evidence=[1]),
        Finding("s", evidence={"a": object()}),
        Finding("s", evidence={(1, 2): 3}),
        Finding("s", evidence=itself()),
        Skip(None),
        Skip(object()),
        Unknown("why", unhide=5),
        "bad",
        None,
    ],
)
def test_a_verdict_out_of_form_is_a_crash(verdict):
    assert outcome(lambda job: iter([verdict])).results[0].status is Status.ERROR


def test_what_json_can_hold_is_kept_as_json_holds_it():
    evidence = {"a_set": {1}, "nan": float("nan"), "huge": 10**30, "bytes": "name\udcff"}
    (finding,) = outcome(lambda job: iter([Finding("s", evidence=evidence)])).results[0].findings
    assert finding.evidence == {"a_set": [1], "nan": None, "huge": 10**30, "bytes": "name\ufffd"}


def test_what_is_changed_afterwards_does_not_count():
    def body(job):
        evidence = {"a": 1}
        yield Finding("s", evidence=evidence)
        evidence["a"] = object()

    assert outcome(body).results[0].findings[0].evidence == {"a": 1}


def test_the_job_of_the_others_can_not_be_changed():
    def body(job):
        for bearer in (*job.ranks, *job.hosts):
            bearer.sections.clear()
        job.ranks = ()
        job.world_size = 0
        yield Skip("done")

    assert outcome(body, body).job.world_size == 4


@pytest.mark.timeout(60)
def test_one_that_yields_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(runner, "MOST_VERDICTS", 50)

    def body(job):
        while True:
            yield Finding("again")

    (result, _) = outcome(body).results
    assert (result.status, result.findings) == (Status.ERROR, ())


def test_a_crash_after_a_warning_leaves_no_green():
    def body(job):
        yield Finding("bad")
        raise ValueError("oops")

    report = outcome(body)
    result = report.results[0]
    assert (result.status, result.reason) == (Status.FAIL, None)
    assert "ValueError: oops" in result.crash
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)


def test_the_document_has_no_field_for_a_crash_that_did_not_happen():
    document = msgspec.to_builtins(outcome(lambda job: iter(())))
    assert "error" not in document["results"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"id": "lower1"},
        {"id": "NET٠٠٧"},
        {"id": 5},
        {"severity": "error"},
        {"scope": "galaxy"},
        {"when": ""},
        {"when": "PX"},
        {"needs": SoftwareFacts},
        {"needs": ("software",)},
        {"needs": (str,)},
    ],
)
def test_metadata_out_of_form_are_refused_when_the_check_is_made(options):
    with pytest.raises(ValueError):
        plugin(lambda job: None, **options)


def test_a_check_is_named_after_a_function():
    with pytest.raises(ValueError, match="is not a valid name"):
        check(id="ACME001", severity=Severity.ERROR, scope=Scope.RANK)(lambda job: None)

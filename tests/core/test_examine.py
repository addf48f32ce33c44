import time

import pytest
from msgspec.structs import replace

from doctor.api import Finding, Scope, Severity, Skip, Status, Unknown, check
from doctor.core import check_runner as runner
from doctor.core.check_registry import BrokenPlugin, CheckRegistry
from doctor.core.check_runner import examine_job as examine
from doctor.core.report_document import Ignored
from doctor.core.report_summary import primary_of
from doctor.facts import (
    EstimateFacts,
    GpuFacts,
    HostFacts,
    MissingReason,
    PathFacts,
    ProcessFacts,
    RunMemoryFacts,
    SoftwareFacts,
)
from doctor.testing import healthy, running


def make(judge=None, **options):
    """A check from a plain function; by default it finds nothing."""

    def nothing(job):
        return iter(())

    options = {"id": "ENV901", "severity": Severity.ERROR, "needs": (SoftwareFacts,), **options}
    return check(**options)(judge or nothing)


def one(job, checks, **options):
    (result,) = examine(job, CheckRegistry((checks,)), **options)
    return result


JOB = healthy(hosts=2, per_host=2)


def test_nothing_found_on_all_ranks_is_ok():
    result = one(JOB.job(), make())
    assert (result.status, result.seen, result.expected, result.reason) == (Status.PASS, 4, 4, None)


def test_hosts_are_counted_where_the_scope_is_the_host():
    result = one(JOB.job(), make(scope=Scope.HOST, needs=(HostFacts,)))
    assert (result.status, result.seen, result.expected) == (Status.PASS, 2, 2)


def test_what_the_machine_lacks_is_a_skip():
    result = one(healthy(1, 2, gpus=0).job(), make(needs=(GpuFacts,)))
    assert (result.status, result.expected, result.reason) == (Status.SKIP, 0, "no NVIDIA driver")


def test_what_nobody_measured_is_a_skip():
    result = one(JOB.job(), make(needs=(PathFacts,), scope=Scope.HOST))
    assert (result.status, result.reason) == (Status.SKIP, "not measured")


@pytest.mark.parametrize("lack", [MissingReason.HIDDEN, MissingReason.FAILED, MissingReason.TIMEOUT])
def test_what_could_not_be_had_is_unknown(lack):
    result = one(JOB.drop(SoftwareFacts, lack, "no permission").job(), make())
    assert (result.status, result.reason) == (Status.UNKNOWN, "no permission")


def test_a_clean_result_without_one_rank_is_unknown():
    result = one(JOB.drop(SoftwareFacts, MissingReason.TIMEOUT, "too slow", ranks=(3,)).job(), make())
    assert (result.status, result.seen, result.expected) == (Status.UNKNOWN, 3, 4)
    assert result.reason == "1 of 4: too slow"


def test_a_host_is_unknown_when_one_of_its_ranks_is():
    result = one(
        JOB.drop(ProcessFacts, MissingReason.HIDDEN, "no", ranks=(3,)).job(),
        make(scope=Scope.HOST, needs=(ProcessFacts,)),
    )
    assert (result.status, result.seen, result.expected) == (Status.UNKNOWN, 1, 2)


def test_a_finding_beats_what_is_unknown():
    def judge(job):
        yield Finding("bad", ranks=(1,))
        yield Unknown("and one could not be seen", ranks=(0,))

    result = one(JOB.drop(SoftwareFacts, MissingReason.TIMEOUT, ranks=(3,)).job(), make(judge))
    assert result.status is Status.FAIL
    assert result.findings[0].hosts == ("node0",)


def test_unknown_says_how_to_see_it():
    def judge(job):
        yield Unknown("hidden", unhide="run as root")

    assert one(JOB.job(), make(judge)).reason == "hidden; to see it: run as root"


def test_a_check_may_say_that_it_does_not_apply():
    def judge(job):
        yield Skip("one host")

    result = one(JOB.job(), make(judge))
    assert (result.status, result.reason) == (Status.SKIP, "one host")


def test_an_absent_rank_is_no_green():
    result = one(JOB.only((0, 1, 2), absent=(3,)).job(), make())
    assert (result.status, result.seen, result.expected) == (Status.UNKNOWN, 3, 4)


def test_comparing_needs_the_others():
    lone = JOB.only((0,)).job()
    assert one(lone, make()).status is Status.PASS
    compared = one(lone, make(compares_ranks=True))
    assert (compared.status, compared.reason) == (Status.UNKNOWN, "other ranks not gathered")
    assert one(healthy(1, 1).job(), make(compares_ranks=True)).status is Status.SKIP


def test_a_check_that_needs_peers_is_not_called_for_one_rank():
    def judge(job):
        yield Finding("found")

    peers = make(judge, needs_peers=True)
    lone = one(healthy(1, 1).job(), peers)
    assert (lone.status, lone.reason) == (Status.SKIP, "one process: nothing to compare it with")
    assert one(JOB.job(), peers).status is Status.FAIL
    assert one(JOB.only((0,)).job(), peers).status is Status.FAIL, "one rank of a larger job"
    assert one(healthy(1, 1).expecting(JOB).job(), make(judge, needs_peers=True, uses_baseline=True)).findings


def test_a_check_that_raises_is_a_crash_and_the_report_goes_on():
    def judge(job):
        raise LookupError("oops")
        yield

    broken, fine = make(judge), make(id="ENV902")
    first, second = examine(JOB.job(), CheckRegistry((broken, fine)))
    assert first.status is Status.ERROR
    assert "LookupError: oops (test_examine.py:" in first.reason
    assert second.status is Status.PASS


def test_findings_before_a_crash_are_kept():
    def judge(job):
        yield Finding("seen in time")
        raise ZeroDivisionError

    result = one(JOB.job(), make(judge))
    assert result.status is Status.FAIL
    assert result.findings[0].summary == "seen in time"


def test_yielding_anything_else_is_a_crash():
    def judge(job):
        yield "bad"

    assert one(JOB.job(), make(judge)).status is Status.ERROR


def test_a_plugin_that_never_ends_is_a_crash(monkeypatch):
    monkeypatch.setattr(runner, "PLUGIN_DEADLINE", 0.2)

    def judge(job):
        time.sleep(60)
        yield

    plugin = replace(make(judge), origin="some-distribution")
    result = one(JOB.job(), plugin)
    assert (result.status, result.reason) == (Status.ERROR, "it did not finish within 0.2 s")


def test_a_plugin_that_failed_to_load_is_a_crash_line():
    (result,) = examine(JOB.job(), CheckRegistry((), (BrokenPlugin("extra", "some-dist", "ImportError: no"),)))
    assert result.status is Status.ERROR
    assert "some-dist" in result.reason


def test_limits_reach_the_check_that_has_them():
    def judge(job, *, most: float = 3):
        if len(job.ranks) > most:
            yield Finding("too many")

    assert one(JOB.job(), make(judge)).status is Status.FAIL
    assert one(JOB.job(), make(judge), limits={"ENV901.most": 9, "ENV902.most": 1}).status is Status.PASS


def test_what_is_ignored_stays_visible_and_does_not_count():
    def judge(job):
        yield Finding("known")

    result = one(JOB.job(), make(judge), ignore=lambda *_: Ignored("accepted", "doctor.toml:3"))
    assert result.status is Status.PASS
    assert result.findings[0].ignored == Ignored("accepted", "doctor.toml:3")


def finds(**finding):
    def judge(job):
        yield Finding("bad", **finding)

    return judge


def test_the_cause_is_primary_and_its_consequence_points_to_it():
    cause = make(finds(ranks=(1,), explains=("NET901",)), id="GPU901")
    consequence = make(finds(ranks=(0, 1)), id="NET901")
    unrelated = make(finds(ranks=(3,)), id="ENV901")
    results = examine(JOB.job(), CheckRegistry((unrelated, consequence, cause)))
    assert results[1].findings[0].explained_by == "GPU901"
    assert primary_of(results) == "GPU901"


def test_a_cause_on_other_ranks_explains_nothing():
    cause = make(finds(ranks=(1,), explains=("NET901",)), id="GPU901")
    other = make(finds(ranks=(2,)), id="NET901")
    results = examine(JOB.job(), CheckRegistry((cause, other)))
    assert results[1].findings[0].explained_by is None


def test_what_is_only_good_to_know_is_never_primary():
    results = examine(JOB.job(), CheckRegistry((make(finds(), severity=Severity.INFO),)))
    assert results[0].status is Status.FAIL
    assert primary_of(results) is None


def test_errors_come_before_warnings():
    warning = make(finds(), severity=Severity.WARNING, id="ENV901")
    error = make(finds(), id="NET901")
    assert primary_of(examine(JOB.job(), CheckRegistry((warning, error)))) == "NET901"


def test_a_remark_is_primary_where_an_error_follows_from_it():
    remark = make(finds(explains=("NET901",)), id="ENV901", severity=Severity.INFO)
    error = make(finds(), id="NET901")
    results = examine(JOB.job(), CheckRegistry((remark, error)))
    assert results[1].findings[0].explained_by == "ENV901"
    assert primary_of(results) == "ENV901"


def serving(**options):
    """A check that takes what a run shows in place of an estimate."""
    return make(needs=(GpuFacts, EstimateFacts), or_needs=(RunMemoryFacts,), **options)


def test_what_serves_instead_is_as_good():
    result = one(running(1, 2).drop(GpuFacts, MissingReason.HIDDEN, "no").job(), serving())
    assert (result.status, result.seen, result.expected) == (Status.PASS, 2, 2)


def test_who_has_neither_is_missing():
    run = running(1, 4).drop(RunMemoryFacts, MissingReason.FAILED, "broke", ranks=(3,))
    result = one(run.drop(GpuFacts, MissingReason.HIDDEN, "not shown").job(), serving())
    assert (result.status, result.seen, result.expected) == (Status.UNKNOWN, 3, 4)
    assert result.reason == "1 of 4: not shown"


def test_without_a_run_nothing_changes():
    for sketch in (healthy(1, 2), healthy(1, 2, gpus=0), healthy(1, 2).put(EstimateFacts(), ranks=(0,))):
        plain, served = (one(sketch.job(), made) for made in (make(needs=(GpuFacts, EstimateFacts)), serving()))
        assert (served.status, served.reason, served.seen) == (plain.status, plain.reason, plain.seen)
        assert served.expected == plain.expected


def test_or_needs_is_made_of_sections():
    with pytest.raises(ValueError, match="or_needs is a tuple of types of sections"):
        make(or_needs=("run-memory",))

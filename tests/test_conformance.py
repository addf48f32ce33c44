"""Every check, built-in or of a plugin, keeps the same promises."""

import pytest
from msgspec.structs import replace

from doctor.api import Finding, Severity, Skip, Status, check
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job as examine
from doctor.core.facts import SECTIONS
from doctor.core.job import build_job
from doctor.facts import GpuFacts, SoftwareFacts, TorchBuild
from doctor.knowledge.log_patterns import known_patterns
from doctor.testing import Fails, Passes, healthy, logged
from tests.lab.cases import assert_each
from tests.lab.shell import fault_of_fix
from tests.lab.wording import fault_of_prose, fault_of_summary

CHECKS = sorted(builtin_checks(), key=lambda check: check.id)
BY_ID = [(check.id, (check,)) for check in CHECKS]


def _run(check, sketch):
    (result,) = examine(sketch.job(), CheckRegistry((check,)))
    assert result.crash is None, result.crash  # what was found before it broke is kept
    return result


def test_metadata():
    assert_each(_is_documented, BY_ID)
    assert_each(_has_failing_and_passing_cases, BY_ID)


def _is_documented(check):
    assert check.question.startswith("Ask ")
    assert check.effect, "the docstring lacks 'Why it hurts:'"
    assert check.fix, "the docstring lacks 'Fix:'"
    assert set(check.when) <= set("PRM")
    assert check.when
    assert all(SECTIONS[section.key] is section for section in check.needs)


def _has_failing_and_passing_cases(check):
    cases = list(check.cases())
    assert any(isinstance(case, Fails) for case in cases)
    assert any(isinstance(case, Passes) for case in cases)
    assert len({case.name for case in cases}) == len(cases)


def test_each_kind_of_impact_is_that_of_a_finding():
    assert_each(_has_findings_for_its_impacts, [(check.id, (check,)) for check in CHECKS if check.impacts])


def _has_findings_for_its_impacts(check):
    lines = [line for one in known_patterns() if one.check == check.id for line in one.examples]
    sketches = [*(case.sketch for case in check.cases()), *map(logged, lines)]
    effects = {finding.effect for sketch in sketches for finding in _run(check, sketch).findings}
    assert set(check.impacts.values()) - effects == set()


def test_an_impact_belongs_to_the_first_pattern_that_matches():
    def kinds(job):
        """Ask.

        Why it hurts: in general.
        """
        yield Finding("disk 1 is full")
        yield Finding("disk 2 is slow")
        yield Finding("disk 3 is full", effect="its own")

    made = check(id="ACME001", severity=Severity.ERROR, impacts={r"\d is full": "nothing is written", r"full": "no"})(
        kinds
    )
    (result,) = examine(healthy(1, 1).job(), CheckRegistry((made,)))
    assert [finding.effect for finding in result.findings] == ["nothing is written", "In general.", "its own"]
    with pytest.raises(ValueError, match="ACME001: impacts has an invalid pattern"):
        check(id="ACME001", severity=Severity.ERROR, impacts={"(": "no"})(kinds)


def test_checks_that_use_a_baseline_are_proven_with_one():
    assert_each(_is_proven_with_a_baseline, [(check.id, (check,)) for check in CHECKS if check.uses_baseline])


def test_checks_that_need_peers_find_nothing_in_one_rank():
    """Each rank of all cases of all checks as a job of its own, which these checks are then not called for."""
    sketches = [case.sketch for check in CHECKS for case in check.cases() if case.sketch.evidence is None]
    alone = {repr(one.sections): one._replace(rank=0) for sketch in sketches for one in sketch.members}
    jobs = [build_job([member], world_size=1) for member in alone.values()]
    assert len(jobs) > 1000
    needing = [check for check in CHECKS if check.needs_peers]
    assert needing
    assert_each(_finds_nothing_in, [(check.id, (check, jobs)) for check in needing])


def _finds_nothing_in(check, jobs):
    yielded = [verdict for job in jobs for verdict in check.judge(job)]
    assert all(isinstance(verdict, Skip) for verdict in yielded)


def _is_proven_with_a_baseline(check):
    expecting = [case for case in check.cases() if case.sketch.expected is not None]
    assert any(isinstance(case, Fails) for case in expecting)
    assert any(isinstance(case, Passes) for case in expecting)
    for case in expecting:
        assert case.sketch.expected.expected is None
        without = _run(check, replace(case.sketch, expected=None))
        if isinstance(case, Fails):
            found = {rank for finding in without.findings for rank in finding.ranks}
            assert found != set(case.ranks), f"the expectation changes nothing in {case.name!r}"


_UNLIKE = (
    healthy(1, 1, rdma=1)
    .alter(SoftwareFacts, python="3.9.1", torch=TorchBuild("2.1.0"), packages=(), nccl_libraries=())
    .alter(GpuFacts, driver_version="535.1")
    .gpu(0, name="NVIDIA T4", memory_total=16 << 30)
    .environ(NCCL_ALGO="Tree", TORCH_DISTRIBUTED_DEBUG="DETAIL")
)


"""A job that differs in everything from those of the cases: smaller, with other hardware and other software."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_cases(check):
    assert_each(_gives_the_result, [(case.name, (check, case)) for case in check.cases()])


def _gives_the_result(check, case):
    result = _run(check, case.sketch)
    _assert_as_claimed(check, case, result)
    assert [fault for finding in result.findings if (fault := fault_of_fix(finding.fix))] == []
    assert [(fault, one.summary) for one in result.findings if (fault := fault_of_summary(one.summary))] == []
    assert [(fault, one.fix) for one in result.findings if (fault := fault_of_prose(one.fix))] == []
    if not check.uses_baseline:  # then a baseline may not change the result
        expecting = _run(check, case.sketch.expecting(_UNLIKE))
        assert (expecting.status, expecting.reason) == (result.status, result.reason)
        assert expecting.findings == result.findings


def _assert_as_claimed(check, case, result):
    assert result.status is not Status.ERROR, result.reason
    if isinstance(case, Passes):
        loud = [f for f in result.findings if case.silent or f.severity is not Severity.INFO]
        assert not loud, loud
        return
    assert result.findings, (result.status, result.reason)
    assert {rank for finding in result.findings for rank in finding.ranks} == set(case.ranks)
    if case.hosts:
        assert {host for finding in result.findings for host in finding.hosts} == set(case.hosts)
    assert result.severity is (case.severity or check.severity)
    assert all(finding.summary and finding.effect and finding.fix for finding in result.findings)

"""Every check, built-in or guest, keeps the same promises."""

from dataclasses import replace

import pytest

from doctor.api import GpuFacts, Severity, Sick, SoftwareFacts, Status, TorchBuild, Well, healthy
from doctor.catalog import Catalog, builtin_checks
from doctor.examining import examine_job as examine
from doctor.facts import SECTIONS

CHECKS = sorted(builtin_checks(), key=lambda check: check.id)
CASES = [(check, case) for check in CHECKS for case in check.cases()]


def _run(check, sketch):
    (result,) = examine(sketch.job(), Catalog((check,)))
    assert result.crash is None, result.crash  # what was found before it broke is kept
    return result


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_says_what_it_is(check):
    assert check.question.startswith("Ask ")
    assert check.effect, "the docstring lacks 'Why it hurts:'"
    assert check.fix, "the docstring lacks 'Fix:'"
    assert set(check.when) <= set("PRM")
    assert check.when
    assert all(SECTIONS[section.key] is section for section in check.needs)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_is_proven_sick_and_well(check):
    cases = list(check.cases())
    assert any(isinstance(case, Sick) for case in cases)
    assert any(isinstance(case, Well) for case in cases)
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("check", [check for check in CHECKS if check.expects], ids=lambda check: check.id)
def test_what_takes_an_expectation_is_proven_with_one(check):
    expecting = [case for case in check.cases() if case.sketch.expected is not None]
    assert any(isinstance(case, Sick) for case in expecting)
    assert any(isinstance(case, Well) for case in expecting)
    for case in expecting:
        assert case.sketch.expected.expected is None
        without = _run(check, replace(case.sketch, expected=None))
        if isinstance(case, Sick):
            found = {rank for finding in without.findings for rank in finding.ranks}
            assert found != set(case.ranks), f"the expectation changes nothing in {case.name!r}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_only_what_takes_an_expectation_looks_at_it(check):
    """Another job altogether is expected: smaller, elsewhere, with other hardware and other software."""
    if check.expects:
        return
    for case in check.cases():
        plain, expecting = (_run(check, sketch) for sketch in (case.sketch, case.sketch.expecting(_UNLIKE)))
        assert (expecting.status, expecting.reason, expecting.findings) == (
            plain.status,
            plain.reason,
            plain.findings,
        ), case.name


_UNLIKE = (
    healthy(1, 1, rdma=1)
    .alter(SoftwareFacts, python="3.9.1", torch=TorchBuild("2.1.0"), packages=(), nccl_libraries=())
    .alter(GpuFacts, driver_version="535.1")
    .gpu(0, name="NVIDIA T4", memory_total=16 << 30)
    .environ(NCCL_ALGO="Tree", TORCH_DISTRIBUTED_DEBUG="DETAIL")
)


@pytest.mark.parametrize(("check", "case"), CASES, ids=[f"{check.id}-{case.name}" for check, case in CASES])
def test_case(check, case):
    result = _run(check, case.sketch)
    assert result.status is not Status.CRASH, result.reason
    if isinstance(case, Well):
        loud = [f for f in result.findings if case.silent or f.severity is not Severity.INFO]
        assert not loud, loud
        return
    assert result.findings, (result.status, result.reason)
    assert {rank for finding in result.findings for rank in finding.ranks} == set(case.ranks)
    if case.hosts:
        assert {host for finding in result.findings for host in finding.hosts} == set(case.hosts)
    assert result.severity is (case.severity or check.severity)
    assert all(finding.summary and finding.effect and finding.fix for finding in result.findings)

"""The exit code of a process that can't tell who wrote the verdict."""

import threading

import pytest

from doctor.cluster.gather.local_verdict import EXIT_CODES_BY_SEVERITY, LocalVerdict, worse_exit_code
from doctor.cluster.transport.signing import Secret
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.job import Member, build_job
from doctor.core.settings import Settings
from doctor.facts import ProgressFacts
from doctor.session import judge
from doctor.testing import Passes
from tests.cluster.ranks import hurry, new_ranks, run

BEFORE_A_RUN = [check for check in builtin_checks() if "P" in check.when]


def test_a_received_verdict_only_makes_it_worse():
    worse = {
        (own, told): worse_exit_code(own, told) for own in EXIT_CODES_BY_SEVERITY for told in EXIT_CODES_BY_SEVERITY
    }
    assert [worse[own, 0] for own in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert [worse[0, told] for told in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert [worse[1, told] for told in (0, 1, 2, 3)] == [1, 1, 1, 1]
    assert [worse[3, told] for told in (0, 1, 2, 3)] == [3, 1, 2, 3]


@pytest.mark.parametrize(("own", "told", "code"), [(0, 0, 0), (1, 0, 1), (3, 0, 3), (0, 1, 1), (0, 3, 3), (0, 77, 3)])
def test_ranks_without_a_key(boards, monkeypatch, own, told, code):
    hurry(monkeypatch)
    ranks = new_ranks(boards, range(2), 2, judge=lambda job: told, own_code=lambda job: own)
    assert run(*ranks) == [told, code]


@pytest.mark.parametrize("told", [0, 1, 3])
def test_ranks_with_a_key_go_by_the_verdict(boards, monkeypatch, told):
    hurry(monkeypatch)
    secret = Secret(b"k" * 16, "test")
    ranks = new_ranks(boards, range(2), 2, judge=lambda job: told, own_code=lambda job: 1, secret=secret)
    assert run(*ranks) == [told, told]


def test_a_judge_that_breaks_confirms_nothing():
    def breaks(job):
        raise RuntimeError

    assert LocalVerdict(breaks, lambda: None).wait() is None
    assert LocalVerdict(lambda job: 9, lambda: None).wait() is None


def test_it_is_begun_once():
    went = threading.Barrier(1)
    verdict = LocalVerdict(lambda job: went.wait(5), lambda: None)
    verdict.begin()
    verdict.begin()
    assert verdict.wait() == 0


@pytest.mark.parametrize("check", BEFORE_A_RUN, ids=lambda check: check.id)
def test_a_rank_of_a_healthy_job_is_healthy_alone(check):
    """What is unknown because the others are not there is no reason to leave with anything but 0."""
    for case in check.cases():
        if not isinstance(case, Passes):
            continue
        job = case.sketch.job()
        if any(rank.find(ProgressFacts) for rank in job.ranks):
            continue  # of a run, not before one
        whole = judge(job, CheckRegistry((check,)), Settings(), must_be_complete=False).exit_code
        for rank in job.ranks[:4]:
            member = Member(rank.number, {**rank.host.sections, **rank.sections}, rank.host.identity)
            alone = build_job([member], world_size=job.world_size)
            code = judge(alone, CheckRegistry((check,)), Settings(), must_be_complete=False).exit_code
            assert worse_exit_code(code, whole) == whole, case.name

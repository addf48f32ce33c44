"""Faults planted at random places of simulated jobs: who is blamed by the dumps that they leave."""

import pytest

from doctor.analysis.hang.diagnosis_rules import diagnose_stall
from doctor.core.job import Member, build_job
from tests.analysis.simulated import SimulatedJob

SEEDS = range(15)
KINDS = {
    "stops": {"missing"},
    "gone": {"unresponsive"},
    "device": {"behind"},
    "skips": {"one-sided", "differ"},
    "other-size": {"one-sided", "differ"},
    "other-call": {"one-sided", "differ"},
}


def judged(job, dumps):
    found = diagnose_stall(build_job(Member(rank, {"flight-recorder": facts}) for rank, facts in dumps.items()))
    assert found is not None, job.fault
    return found


@pytest.mark.parametrize("only_open", [False, True], ids=["full", "open-entries"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_with_the_fault_and_nobody_else(kind, only_open):
    named = 0
    for seed in SEEDS:
        job = SimulatedJob(seed, kind)
        found = judged(job, job.dumps(only_open=only_open))
        if found.kind != "undetermined":
            named += 1
            assert (found.ranks, found.kind in KINDS[kind]) == ((job.fault.rank,), True), (seed, found.kind)
    assert named >= 0.9 * len(SEEDS)


def test_a_ring_that_was_overwritten():
    for seed in SEEDS:
        job = SimulatedJob(seed, "stops")
        assert judged(job, job.dumps(most=max(job.ahead + 2, 8))).ranks == (job.fault.rank,)


def test_a_job_that_came_to_its_end():
    job = SimulatedJob(0, "none")
    assert job.device == [len(program) for program in job.programs]
    assert diagnose_stall(build_job(Member(r, {"flight-recorder": one}) for r, one in job.dumps().items())) is None

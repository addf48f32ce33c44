"""Collectives of real groups over loopback: well, with a wrong sum, and with ranks that are missing or stand still."""

import os
import signal

import pytest

from doctor.analysis.fabric.pairing import TURNS
from doctor.core.facts import CollectiveFacts
from doctor.facts import MissingReason, TrainerFacts
from doctor.probes.collectives import group_driver, stage
from doctor.probes.collectives.group_limits import FIRST_BYTES
from tests.probes.groups import JOIN, WRONG_SUM, Party, environ_of, facts, findings, on_one_host

pytest.importorskip("torch")

OPERATIONS = ["all_reduce", "all_gather", "all_to_all"]
WRONG = 2


@pytest.fixture(scope="module")
def party():
    """Four processes; torch knows the back end wrong_sum, whose rank 2 is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(WRONG_SUM))
        made = Party([environ_of(rank, 4, WRONG_SUM_RANK=str(WRONG)) for rank in range(4)])
        yield made
        made.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(stage, "PATIENCE", 1.5)
    monkeypatch.setattr(stage, "set_up_seconds", lambda backend: 3.0)


def asking_for(backend, ranks):
    return on_one_host(ranks).put(TrainerFacts(source="fabric run", backend=backend))


def test_two_ranks(party):
    job, told = party.survey(on_one_host(2))
    for rank, found in enumerate(facts(job)):
        assert (found.backend, found.device, found.error) == ("gloo", "cpu", None), rank
        assert [result.operation for result in found.results] == OPERATIONS
        assert all(result.received == result.expected and result.members == (0, 1) for result in found.results)
        assert [timing.bytes for timing in found.timings[:2]] == [8, 4096]
        assert [timing.bytes for timing in found.timings].count(8) == 1, "one group, nothing to compare it with"
        assert all(timing.seconds > 0 and timing.axis == "world" for timing in found.timings)
    assert findings(job, "NET025") == findings(job, "NET027") == []
    assert told[0] == "groups: 2 processes load torch at once, at most 60 s"
    assert "gloo of 2 ranks" in told[2]
    assert told[1].startswith("groups: one process, rank 0, creates a rendezvous store for 2 ranks")
    assert "MB a rank and" in told[2]


def test_a_mesh_is_used_along_each_axis(party):
    job, _ = party.survey(on_one_host(4), mesh="dp=2:1MiB,tp=2")
    ran = [{(result.axis, result.members) for result in found.results} for found in facts(job)]
    world = ("world", (0, 1, 2, 3))
    assert ran[0] == {world, ("dp", (0, 2)), ("tp", (0, 1))}
    assert ran[3] == {world, ("dp", (1, 3)), ("tp", (2, 3))}
    assert all(result.received == result.expected for found in facts(job) for result in found.results)
    timed = {(timing.axis, timing.bytes) for found in facts(job) for timing in found.timings}
    assert ("dp", 1 << 20) in timed
    assert max(length for axis, length in timed if axis == "tp") <= 8 << 20
    assert findings(job, "NET025") == []


def test_a_wrong_sum_is_that_of_the_rank_which_got_it(party):
    job, _ = party.survey(asking_for("wrong_sum", 4), mesh="dp=2,tp=2")
    found = findings(job, "NET025")
    assert [finding.ranks for finding in found] == [(WRONG,)] * 3
    assert found[0].summary.startswith("all_reduce of float32 over wrong_sum returned ")
    assert found[0].summary.endswith(" on rank 2")
    assert {word for finding in found for word in ("dp", "tp") if f"({word} group)" in finding.summary} == {"dp", "tp"}
    assert findings(job, "NET027") == []


def test_the_same_back_end_where_nobody_is_wrong(party):
    job, _ = party.survey(asking_for("wrong_sum", 2))
    assert facts(job)[0].backend == "wrong_sum"
    assert [result.operation for result in facts(job)[1].results] == OPERATIONS, "all-to-all by pairs"
    assert [[one.source for one in found.exchanges] for found in facts(job)] == [[1] * TURNS, [0] * TURNS]
    assert all(one.bytes >= FIRST_BYTES and one.seconds > 0 for found in facts(job) for one in found.exchanges)
    assert findings(job, "NET025") == findings(job, "NET027") == []


def test_all_pairs_of_a_host_exchange_messages(party):
    job, told = party.survey(asking_for("wrong_sum", 4))
    met = [sorted({one.source for one in found.exchanges}) for found in facts(job)]
    assert met == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert [found.exchange_error for found in facts(job)] == [None] * 4
    assert "then pair by pair up to 8 MiB" in told[2]
    assert findings(job, "NET014") == []


def test_gloo_needs_no_messages_of_pairs(party):
    job, told = party.survey(on_one_host(2))
    assert [found.exchanges for found in facts(job)] == [(), ()]
    assert "pair by pair" not in told[2]


def test_a_mesh_of_another_job_is_an_error_of_all(party):
    job, told = party.survey(on_one_host(3), mesh="dp=2,tp=2")
    assert {found.error for found in facts(job)} == {"the mesh dp=2,tp=2 has 4 ranks, the job 3"}
    [finding] = findings(job, "NET027")
    assert finding.ranks == (0, 1, 2)
    assert len(told) == 1, "nothing is run"


def test_nccl_is_not_replaced_by_another_back_end(party):
    job, _ = party.survey(asking_for("nccl", 2))
    [missing] = {rank.missing(CollectiveFacts) for rank in job.ranks}
    assert missing.lack is MissingReason.HIDDEN
    assert missing.reason.startswith("the backend nccl is not available")


def test_without_time_nobody_begins_another_step(party, monkeypatch):
    monkeypatch.setattr(group_driver, "STEP_PATIENCE", 1000.0)
    job, _ = party.survey(on_one_host(2))
    assert [(found.error, found.results, found.timings) for found in facts(job)] == [(None, (), ())] * 2
    assert findings(job, "NET027") == []


def test_one_process_has_nobody_to_exchange_with(party):
    job, told = party.survey(on_one_host(1))
    assert facts(job) == [None]
    assert len(told) == 1


def test_a_rank_that_never_comes_is_named(party, impatient):
    job, _ = party.survey(on_one_host(3), without=(1,))
    found = facts(job)
    assert [one and one.error for one in found] == ["rank 1 did not join", None, "rank 1 did not join"]
    [finding] = findings(job, "NET027")
    assert finding.ranks == (1,)
    assert finding.severity == "error"
    assert "could not be created: rank 1 did not join" in finding.summary


def test_a_rank_that_stands_still_is_named_and_its_child_ended(party, impatient):
    def stop(step):
        if step == JOIN:
            os.kill(party.child(2)._child.pid, signal.SIGSTOP)

    job, _ = party.survey(on_one_host(3), before=stop)
    assert "no answer within" in facts(job)[2].error
    [finding] = findings(job, "NET027")
    assert finding.ranks == (2,)

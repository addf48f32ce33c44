"""A collective that breaks because of one setting, tried again by real children on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from doctor.api import Job
from doctor.facts import (
    Address,
    CollectiveFacts,
    CollectiveResult,
    CollectiveTiming,
    GpuFacts,
    Interface,
    InterfaceFacts,
    Trial,
    TrialFacts,
)
from doctor.probes.ablation import group_trials
from doctor.probes.ablation.experiments import TrialRequest, trial_requests
from doctor.probes.ablation.group_trials import GroupTrialOutcome, PrepareTrial, RunTrial, group_plan, outcome_of
from doctor.probes.ablation.setting_variants import MOST_VARIANTS, variants_for
from doctor.probes.ablation.stage import WhyStage
from doctor.probes.ablation.trials import RecordTrials
from doctor.probes.base import ProbeParticipant
from doctor.testing import healthy
from doctor.testing.cases import JobBuilder
from doctor.testing.collective_timings import exchanged, timed_on_mesh, usual_seconds
from tests.lab.needs import ROOT, clean_environ
from tests.probes.staged import staged

BROKEN = CollectiveFacts(backend="gloo", error="Unable to find address for: nosuch0")


def broken(sketch: JobBuilder) -> JobBuilder:
    return sketch.put(BROKEN)


def one_interface(name: str) -> InterfaceFacts:
    return InterfaceFacts(interfaces=(Interface(name, addresses=(Address("inet", "10.0.0.1", 24),)),))


def trials(job: Job) -> list:
    return [trial for rank in job.ranks if (facts := rank.find(TrialFacts)) for trial in facts.trials]


def test_the_interface_that_a_group_works_on(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(group_trials, "SET_UP_SECONDS", 3.0)
    monkeypatch.setattr(group_trials, "PATIENCE", 2.0)
    sketch = broken(healthy(1, 2, gpus=0).environ(GLOO_SOCKET_IFNAME="nosuch0").put(one_interface("lo")))
    environ = {**clean_environ(ROOT), "GLOO_SOCKET_IFNAME": "nosuch0"}
    found = staged(sketch.members, [WhyStage(), WhyStage()], environ)
    [trial] = set(trials(found.job))
    assert (trial.subject, trial.setting, trial.restores) == (
        "collective",
        "export GLOO_SOCKET_IFNAME=lo  # for all ranks",
        True,
    )
    assert trial.before is None
    assert trial.after > 0
    *tried, told = found.orders
    assert all(orders.words for orders in tried)
    assert told.words == "", "nothing is run"


def test_a_group_that_works_by_now_is_mended_by_nothing():
    pytest.importorskip("torch")
    sketch = broken(healthy(1, 2, gpus=0).put(one_interface("eth9")).environ(GLOO_SOCKET_IFNAME="eth8"))
    environ = {**clean_environ(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    [trial] = set(trials(staged(sketch.members, [WhyStage(), WhyStage()], environ).job))
    assert (trial.knob, trial.restores) == ("nothing changed", False)


def test_those_to_blame_try_first():
    job = healthy(2, 2).put(BROKEN, ranks=(0, 1, 3)).put(CollectiveFacts(backend="gloo", error="x"), ranks=(2,)).job()
    [question] = trial_requests(job)
    assert question.subject == "collective"
    assert sorted(question.ranks) == [0, 1, 2, 3]


def test_a_wrong_sum_is_a_question():
    wrong = CollectiveFacts(backend="nccl", results=(CollectiveResult("all_reduce", "nccl", 6.0, 5.0),))
    [question] = trial_requests(healthy(1, 4).put(wrong, ranks=(2,)).job())
    assert (question.ranks[0], question.backend) == (2, "nccl")


def test_a_group_that_could_not_be_tried_for_want_of_a_back_end_is_none():
    assert trial_requests(healthy(1, 2).put(CollectiveFacts(error="the mesh has 8 ranks, the job 2")).job()) == ()


@pytest.mark.parametrize(
    ("facts", "value"),
    [
        (CollectiveFacts(error="no"), None),
        (CollectiveFacts(timings=(CollectiveTiming("all_reduce", "gloo", 0, error="late"),)), None),
        (CollectiveFacts(results=(CollectiveResult("all_reduce", "gloo", 6.0, None),)), None),
        (CollectiveFacts(), None),
        (
            CollectiveFacts(
                timings=tuple(
                    CollectiveTiming("all_reduce", "gloo", size, seconds)
                    for size, seconds in ((8, 0.1), (1000, 0.5), (1000, 0.25))
                )
            ),
            4000.0,
        ),
    ],
)
def test_the_outcome_of_a_rank(facts: CollectiveFacts, value: float | None):
    assert outcome_of(facts, 1000).value == value
    assert bool(outcome_of(facts, 1000).error) == (value is None)


def test_the_outcome_is_that_of_the_size_that_was_asked_for():
    timings = tuple(CollectiveTiming("all_reduce", "nccl", size, 1e-5) for size in (8, 4096, 1 << 20))
    asked = {size: outcome_of(CollectiveFacts(timings=timings), size).value for size in (8, 4096, 1 << 20)}
    assert asked == pytest.approx({8: 8e5, 4096: 4096e5, 1 << 20: 1e5 * (1 << 20)})


def names(sketch: JobBuilder, backend: str, *, is_small: bool = False) -> list[str]:
    return [f"{knob.name}={knob.value}" for knob in variants_for(sketch.job().ranks, backend, is_small=is_small)]


def spare(sketch: JobBuilder, count: int) -> JobBuilder:
    """Hosts that have so many interfaces besides the one in use."""

    def more(old: tuple[Interface, ...]) -> tuple[Interface, ...]:
        own = (Interface(f"eth{n}", addresses=(Address("inet", f"10.{n}.0.1", 24),)) for n in range(1, count + 1))
        return (*old, *own)

    return sketch.alter(InterfaceFacts, interfaces=more)


def test_one_knob_of_each_kind_before_a_second_of_any():
    first = ["NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_SOCKET_IFNAME==eth1"]
    order = "CUDA_VISIBLE_DEVICES=7,6,5,4,3,2,1,0"
    assert names(spare(healthy(2, 8, rdma=8), 3), "nccl") == [*first, order]
    one_each = spare(healthy(2, 1, rdma=1), 2)
    assert names(one_each, "nccl")[:3] == [first[2], first[3], "NCCL_SOCKET_IFNAME==eth2"]
    assert not [name for name in names(spare(healthy(1, 4), 3), "nccl") if "IFNAME" in name]


def test_what_is_switched_off_is_switched_on():
    off = healthy(2, 4, rdma=4).environ(NCCL_P2P_DISABLE="1", NCCL_IB_DISABLE="1")
    assert names(off, "nccl")[:3] == ["NCCL_P2P_DISABLE=0", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=0"]
    assert names(healthy(1, 4).environ(ranks=(1,), NCCL_SHM_DISABLE="1"), "nccl")[1] == "NCCL_SHM_DISABLE=0"


def test_the_latency_of_small_messages_is_no_matter_of_algorithms():
    assert names(healthy(1, 4), "nccl", is_small=True) == names(healthy(1, 4), "nccl")[:3]


def test_a_back_end_that_nobody_knows_has_no_knobs():
    assert names(spare(healthy(2, 1, gpus=0), 1), "ucc") == []
    assert names(spare(healthy(2, 1, gpus=0), 1), "cpu:gloo") == ["GLOO_SOCKET_IFNAME=eth1"]


Brings = Callable[[frozenset[int], Mapping[str, str]], float | None]
"""What a group of these ranks brings with these changes to the environment, bytes a second."""


def test_who_shows_what_is_usual_is_said_before():
    question, job = pair_of_a_rail()
    posts = [ProbeParticipant(str(rank.number), rank, rank.host.index, True, 1, "") for rank in job.ranks]
    assert ": 2 healthy ranks once more with nothing changed, " in next(group_plan(question, job, posts)).words
    bare = next(group_plan(question._replace(controls=()), job, posts))
    assert ": 2 ranks once more with nothing changed, " in bare.words


def played(question: TrialRequest, job: Job, brings: Brings) -> tuple[dict[int, tuple[Trial, ...]], list[set[int]]]:
    """The steps of the trials of a collective, without children: who is told what, and who joined in each step."""
    posts = [ProbeParticipant(str(rank.number), rank, rank.host.index, True, 1, "") for rank in job.ranks]
    plan, joined, changes = group_plan(question, job, posts), [], {}
    orders = next(plan)
    while True:
        tasks = {
            int(token): msgspec.msgpack.decode(order, type=PrepareTrial | RunTrial | RecordTrials)
            for token, order in orders.by_token.items()
        }
        told = {rank: task.trials for rank, task in tasks.items() if isinstance(task, RecordTrials)}
        if told:
            return told, joined
        note = b"29500"
        for task in tasks.values():
            if isinstance(task, PrepareTrial):
                changes = dict([task.experiment.setting]) if task.experiment else {}
        if any(isinstance(task, RunTrial) for task in tasks.values()):
            joined.append(set(tasks))
            note = msgspec.msgpack.encode(GroupTrialOutcome(brings(frozenset(tasks), changes), ""))
        orders = plan.send([post._replace(note=note) if int(post.token) in tasks else post for post in posts])


def pair_of_a_rail() -> tuple[TrialRequest, Job]:
    sketch = spare(exchanged(lambda one, other: one // 4 != other // 4 and 5 in (one, other)), 1)
    job = sketch.job()
    [question] = trial_requests(job)
    return question, job


def test_a_slow_rail_is_held_against_a_pair_that_is_well():
    question, job = pair_of_a_rail()

    def brings(ranks: frozenset[int], changes: Mapping[str, str]) -> float:
        return 20e9 if 5 not in ranks or changes.get("NCCL_SOCKET_IFNAME") == "=eth1" else 2e9

    told, joined = played(question, job, brings)
    assert joined[0] == {*question.controls}
    assert all(group == {*question.ranks} for group in joined[1:])
    assert told.keys() == {*question.ranks}
    assert [trial.knob for trial in told[5] if trial.restores] == ["NCCL_SOCKET_IFNAME==eth1"]
    assert {(trial.before, trial.unit) for trial in told[5]} == {(2e9, "B/s")}


def test_a_pair_whose_collective_is_as_fast_as_that_of_others_is_mended_by_nothing():
    question, job = pair_of_a_rail()
    told, joined = played(question, job, lambda ranks, changes: 20e9)
    assert [(trial.knob, trial.restores) for trial in told[5]] == [("nothing changed", False)]
    assert len(joined) == 2


def test_without_an_answer_of_the_controls_nothing_is_tried():
    question, job = pair_of_a_rail()
    told, joined = played(question, job, lambda ranks, changes: 20e9 if 5 in ranks else None)
    assert [trial.knob for trial in told[5]] == ["not tried"]
    assert len(joined) == 1


def late_with_p2p_off(seconds: float) -> tuple[TrialRequest, Job]:
    slow = timed_on_mesh(
        lambda axis, group, size, turn: seconds if size <= 4096 else usual_seconds(axis, group, size, turn),
        backend="nccl",
    )
    job = slow.environ(NCCL_P2P_DISABLE="1").job()
    [question] = trial_requests(job)
    return question, job


@pytest.mark.parametrize(("mended", "restores"), [(45e-6, True), (55e-6, False)])
def test_late_small_messages_are_mended_by_what_is_below_the_limit(mended: float, restores: bool):
    question, job = late_with_p2p_off(90e-6)

    def brings(ranks: frozenset[int], changes: Mapping[str, str]) -> float:
        return question.bytes / (mended if changes.get("NCCL_P2P_DISABLE") == "0" else 90e-6)

    told, _ = played(question, job, brings)
    first = told[question.ranks[0]][0]
    assert (first.knob, first.restores, first.unit) == ("NCCL_P2P_DISABLE=0", restores, "s")
    assert (first.before, first.after) == pytest.approx((90e-6, mended))
    assert not [trial for trial in told[question.ranks[0]][1:] if trial.restores]


def test_knobs_of_nccl_only_where_they_can_apply():
    assert names(healthy(1, 4), "nccl") == [
        "NCCL_P2P_DISABLE=1",
        "NCCL_SHM_DISABLE=1",
        "CUDA_VISIBLE_DEVICES=3,2,1,0",
        "NCCL_ALGO=Ring",
        "NCCL_PROTO=Simple",
    ]
    assert names(healthy(2, 1, rdma=1), "nccl") == ["NCCL_IB_DISABLE=1", "NCCL_ALGO=Ring", "NCCL_PROTO=Simple"]
    assert "NCCL_IB_DISABLE=1" not in names(healthy(2, 1), "nccl")
    assert "NCCL_P2P_DISABLE=1" not in names(healthy(1, 4).environ(NCCL_P2P_DISABLE="1"), "nccl")
    assert len(names(healthy(2, 8, rdma=8), "nccl")) == MOST_VARIANTS


def test_devices_in_another_order_only_where_nobody_chose_among_them():
    chosen = healthy(1, 4).environ(CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert not [name for name in names(chosen, "nccl") if name.startswith("CUDA")]
    uneven = healthy(2, 2).alter(GpuFacts, hosts=("node1",), gpus=())
    assert not [name for name in names(uneven, "nccl") if name.startswith("CUDA")]


def test_gloo_has_other_interfaces_alone():
    assert names(healthy(2, 1, gpus=0), "gloo") == []
    second = healthy(2, 1, gpus=0).alter(
        InterfaceFacts, interfaces=lambda old: (*old, Interface("eth1", addresses=(Address("inet", "10.1.0.1", 24),)))
    )
    assert names(second, "gloo") == ["GLOO_SOCKET_IFNAME=eth1"]
    one_alone = second.alter(InterfaceFacts, hosts=("node1",), interfaces=lambda old: old[:2])
    assert names(one_alone, "gloo") == []

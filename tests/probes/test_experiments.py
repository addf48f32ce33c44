"""What a job should try again with one thing changed, and what such trials say of a finding."""

from __future__ import annotations

import pytest

from doctor.analysis.trial_selection import AGAIN, NOT_TRIED
from doctor.api import Finding, Job
from doctor.facts import (
    Address,
    CollectiveFacts,
    Interface,
    InterfaceFacts,
    PathFacts,
    PathSample,
    Reach,
    ReachFacts,
    Transfer,
    TransferFacts,
    Trial,
    TrialFacts,
)
from doctor.probes.ablation.experiments import (
    LATE_SECONDS,
    LOST_SHARE,
    MOST_COLLECTIVES,
    MOST_REQUESTS,
    SLOW_SHARE,
    shared_hosts,
    trial_requests,
)
from doctor.testing import healthy
from doctor.testing.cases import JobBuilder
from doctor.testing.collective_timings import exchanged, slow_with, timed_on_mesh, usual_seconds
from doctor.testing.host_transfers import touching, transferred
from doctor_checks._trial_conclusions import trial_conclusions, with_trials
from tests.lab.cases import each_case
from tests.probes.staged import Staged

MENDS = Trial("path", "other interface eth1", "export GLOO_SOCKET_IFNAME=eth1", True, "node1", 1.2e6, 612e6, "B/s")
HELPS_NOT = Trial("path", "IPv6 on eth0", "", False, "node1", 1.2e6, 1.3e6, "B/s")
TO_1500 = "sudo ip link set dev eth0 mtu 1500  # on node1"
SMALLER = Trial("packet", "smaller packets", TO_1500, True, "node1", None, 1500, "bytes")
BY_ITSELF = Trial("packet", AGAIN, "", False, "node1", None, 9000, "bytes", "1 of 2 times")


def losing(sketch: JobBuilder, *ways: tuple[int, int]) -> JobBuilder:
    """Hosts between which large packets vanish."""
    for own in {own for own, _ in ways}:
        samples = tuple(
            PathSample(f"node{peer}", f"10.0.0.{peer + 1}", full_size_arrived=False) for one, peer in ways if one == own
        )
        sketch = sketch.put(PathFacts(samples=samples), hosts=(f"node{own}",))
    return sketch


def closed(sketch: JobBuilder, own: int, peer: int) -> JobBuilder:
    """A host that gets no connection to another."""
    attempt = Reach(f"node{peer}", f"10.0.0.{peer + 1}", 40000, "silent")
    return sketch.put(ReachFacts(attempts=(attempt,)), ranks=(own,))


def with_second_network(sketch: JobBuilder) -> JobBuilder:
    """Hosts that have ``eth1`` besides, in a network of its own."""

    def more(host: int, old: tuple[Interface, ...]) -> tuple[Interface, ...]:
        return (*old, Interface("eth1", mtu=1500, addresses=(Address("inet", f"10.1.0.{host + 1}", 24),)))

    for host in range(len(sketch.job().hosts)):
        sketch = sketch.alter(InterfaceFacts, hosts=(f"node{host}",), interfaces=lambda old, host=host: more(host, old))
    return sketch


def sending(count: int, slow: set[int]) -> Job:
    """All pairs of hosts have measured one another; those in ``slow`` are slow to everybody."""
    sketch = healthy(count, 1)
    for own in range(count):
        sent = tuple(
            Transfer(
                f"node{peer}",
                "done",
                1e7 if slow & {own, peer} else 1e9 * (1 + 0.01 * peer),
                round=own ^ peer,
                address=f"10.0.0.{peer + 1}",
            )
            for peer in range(count)
            if peer != own
        )
        sketch = sketch.put(TransferFacts(samples=sent), hosts=(f"node{own}",))
    return sketch.job()


def test_a_healthy_job_raises_no_question():
    assert trial_requests(healthy(4, 2).job()) == ()
    assert trial_requests(sending(6, set())) == ()


def test_packets_that_vanish_from_one_host_are_one_question():
    [question] = trial_requests(losing(healthy(3, 1), (2, 0), (2, 1)).job())
    assert (question.subject, question.host, question.peer, question.address) == (
        "packet",
        "node2",
        "node0",
        "10.0.0.1",
    )
    assert question.culprits == ("node2",)


def test_packets_that_vanish_to_one_host():
    [question] = trial_requests(losing(healthy(3, 1), (0, 1), (2, 1)).job())
    assert (question.host, question.peer, question.culprits) == ("node0", "node1", ("node1",))


def test_two_hosts_of_many_are_two_questions():
    found = trial_requests(losing(healthy(6, 1), (0, 5), (1, 5), (2, 5), (1, 4), (2, 4)).job())
    assert [question.culprits for question in found] == [("node5",), ("node4",)]


def test_no_more_questions_than_the_limit():
    ways = [(2 * pair, 2 * pair + 1) for pair in range(4)] + [(8, 9)] * 3
    every = [way for place, way in enumerate(ways) for _ in range(place + 1)]
    assert len(trial_requests(losing(healthy(10, 1), *every).job())) <= MOST_REQUESTS


def test_a_closed_path_is_a_question_where_the_peer_has_another_address():
    sketch = healthy(3, 1)
    assert trial_requests(closed(sketch, 0, 1).job()) == ()
    [question] = trial_requests(closed(with_second_network(sketch), 0, 1).job())
    assert (question.subject, question.host, question.peer, question.usual) == ("path", "node0", "node1", None)


def test_a_path_that_another_attempt_opened_is_no_question():
    opened = ReachFacts(
        attempts=tuple(Reach("node1", "10.0.0.2", 40000, outcome) for outcome in ("silent", "open", "silent"))
    )
    assert trial_requests(with_second_network(healthy(2, 1)).put(opened, ranks=(0,)).job()) == ()


def test_a_slow_host_is_a_question_with_what_is_usual():
    [question] = trial_requests(sending(6, {4}))
    assert (question.subject, question.culprits) == ("path", ("node4",))
    assert "node4" in (question.host, question.peer)
    assert question.address == f"10.0.0.{int(question.peer[4:]) + 1}"
    assert 0.9e9 < question.usual < 1.1e9


def test_a_host_that_loses_packets_is_a_question():
    [question] = trial_requests(transferred(6, lossy=touching(3)).job())
    assert (question.subject, question.culprits, question.lossy) == ("path", ("node3",), True)
    assert "node3" in (question.host, question.peer)
    assert question.address == f"10.0.0.{int(question.peer[4:]) + 1}"
    # What is no finding counts as well.
    assert question.usual * SLOW_SHARE == pytest.approx(1 / LOST_SHARE)


@pytest.mark.parametrize(("lossy", "queued"), [(set(), False), ({3}, True)])
def test_packets_that_a_full_queue_drops_are_no_question(lossy: set[int], queued: bool):
    losing = (lambda source, target, turn: bool(lossy & {source, target})) if lossy else touching(-1)
    assert trial_requests(transferred(6, lossy=losing, queued=queued).job()) == ()


def test_a_slow_path_that_loses_packets_is_tried_once():
    [question] = trial_requests(transferred(6, touching(3), share=0.05, lossy=touching(3)).job())
    assert (question.culprits, question.lossy) == (("node3",), False)


def slow_between_hosts(*slow: int):
    return lambda one, other: one // 4 != other // 4 and bool({one, other}.intersection(slow))


def slow_within(*slow: int):
    return lambda one, other: one // 4 == other // 4 and bool({one, other}.intersection(slow))


def test_a_card_that_is_slow_over_the_back_end_is_a_question_beside_one_that_is_well():
    [question] = trial_requests(exchanged(slow_between_hosts(5)).job())
    assert (question.subject, question.backend, question.usual) == ("collective", "nccl", None)
    assert 5 in question.ranks
    assert len(question.controls) == len(question.ranks) == 2
    assert 5 not in question.controls
    assert {rank % 4 for rank in (*question.ranks, *question.controls)} == {1}
    assert len({rank // 4 for rank in question.controls}) == 2


def test_all_cards_of_a_host_are_one_question():
    [question] = trial_requests(exchanged(slow_between_hosts(4, 5, 6, 7)).job())
    assert {*question.ranks} & {4, 5, 6, 7}
    assert not {*question.controls} & {4, 5, 6, 7}


@each_case("slow", range(16))
def test_a_pair_that_is_well_one_way_alone_shows_nothing_usual(slow: int):
    [question] = trial_requests(exchanged(lambda one, other: one // 4 != other // 4 and one == slow).job())
    assert slow in question.ranks
    assert slow not in question.controls


def test_a_pair_that_is_slow_too_shows_nothing_usual():
    [question] = trial_requests(exchanged(slow_within(1, 5), hosts=6).job())
    assert {1, 5} & {*question.ranks}
    assert {rank // 4 for rank in question.controls} == {2}


def test_ranks_that_are_slow_within_their_host_are_a_question():
    [question] = trial_requests(exchanged(slow_within(5)).job())
    assert 5 in question.ranks
    assert {rank // 4 for rank in question.ranks} == {1}
    assert [rank % 4 for rank in question.controls] == [rank % 4 for rank in question.ranks]
    assert {rank // 4 for rank in question.controls} < {0, 2, 3}
    assert len({rank // 4 for rank in question.controls}) == 1


@pytest.mark.parametrize(
    "sketch",
    [
        exchanged(),
        exchanged(slow_between_hosts(5), share=0.8),
        exchanged(slow_within(5), share=0.8),
        exchanged(slow_within(5), hosts=2),
    ],
)
def test_messages_that_are_about_alike_raise_no_question(sketch: JobBuilder):
    assert trial_requests(sketch.job()) == ()


def small(
    seconds: float, backend: str = "nccl", axes: tuple[str, ...] = ("dp", "tp"), times: float = 1.0
) -> JobBuilder:
    """Small messages along ``axes`` take so long; large ones of groups with rank 6 so many times as long as usual."""
    large = slow_with(6, times=times)
    return timed_on_mesh(
        lambda axis, group, size, turn: seconds if size <= 4096 and axis in axes else large(axis, group, size, turn),
        backend=backend,
    )


def test_late_small_messages_within_a_host_are_a_question():
    [question] = trial_requests(small(80e-6).job())
    assert (question.subject, question.backend, question.bytes, question.is_small) == ("collective", "nccl", 8, True)
    assert len({rank // 4 for rank in question.ranks}) == 1
    # What is no finding counts as well.
    assert question.bytes / (SLOW_SHARE * question.usual) == pytest.approx(LATE_SECONDS)


@pytest.mark.parametrize(
    "sketch", [small(40e-6), small(900e-6, "gloo"), small(80e-6, axes=("dp",)), timed_on_mesh(usual_seconds)]
)
def test_small_messages_that_need_not_be_quick_are_no_question(sketch: JobBuilder):
    assert trial_requests(sketch.job()) == ()


def test_latency_and_bandwidth_of_the_same_ranks_are_two_questions():
    found = trial_requests(small(80e-6, times=9.0).job())
    assert [question.is_small for question in found] == [False, True]
    assert len(found) == MOST_COLLECTIVES


def both(sketch: JobBuilder, other: JobBuilder) -> JobBuilder:
    """What the collectives of ``other`` tell besides."""
    there = {rank.number: rank.find(CollectiveFacts) for rank in other.job().ranks}
    for rank, facts in there.items():
        sketch = sketch.alter(CollectiveFacts, ranks=(rank,), exchanges=facts.exchanges)
    return sketch


def test_no_more_collectives_than_the_limit():
    slow = both(small(80e-6, times=9.0), exchanged(slow_between_hosts(11)))
    assert (
        len([question for question in trial_requests(slow.job()) if question.subject == "collective"])
        == MOST_COLLECTIVES
    )


def test_ranks_in_a_slow_group_are_no_second_question():
    slow = both(timed_on_mesh(slow_with(5, axes=("dp",)), backend="nccl"), exchanged(slow_between_hosts(5)))
    [question] = trial_requests(slow.job())
    assert question.bytes
    assert not question.controls


def test_a_collective_that_breaks_is_why_others_of_its_ranks_are_slow():
    job = small(80e-6, times=9.0).put(CollectiveFacts(backend="nccl", error="unhandled system error"), ranks=(3,)).job()
    [question] = trial_requests(job)
    assert (question.usual, question.bytes) == (None, 0)


def test_a_lossy_path_explains_what_goes_over_it_and_nothing_within_a_host():
    lossy = transferred(4, lossy=touching(0)).job()
    sketch = small(80e-6, times=9.0)
    for host in lossy.hosts:
        sketch = sketch.put(host.find(TransferFacts), hosts=(host.name,)).put(host.find(PathFacts), hosts=(host.name,))
    loss, late = trial_requests(sketch.job())
    assert (loss.lossy, loss.culprits) == (True, ("node0",))
    assert (late.is_small, late.ranks) == (True, (0, 1, 2, 3))


def test_what_lost_packets_explain_is_no_question_of_its_own():
    job = sending(6, {4})
    sketch = losing(healthy(6, 1), (4, 0), (4, 1))
    for host in job.hosts:
        sketch = sketch.put(host.find(TransferFacts), hosts=(host.name,))
    assert [question.subject for question in trial_requests(sketch.job())] == ["packet"]


def test_all_hosts_that_share_as_many_are_shared():
    assert shared_hosts([("a", "b"), ("b", "a")]) == ("a", "b")
    assert shared_hosts([("a", "c"), ("b", "c")]) == ("c",)
    assert shared_hosts([]) == ()


def tried(*trials: Trial, rank: int = 0) -> Job:
    return healthy(3, 1).put(TrialFacts(trials=trials), ranks=(rank,)).job()


def test_what_mends_goes_first_and_has_its_numbers():
    found = trial_conclusions(tried(MENDS, HELPS_NOT), "path", ranks=(0, 1))
    assert found.evidence == {
        "restored by": ["other interface eth1: 612 MB/s, was 1.2 MB/s"],
        "not restored by": ["IPv6 on eth0: 1.3 MB/s, was 1.2 MB/s"],
    }
    assert (
        found.fix("another.")
        == "Run `export GLOO_SOCKET_IFNAME=eth1` on all ranks (tested: this fixes it), or another."
    )


def test_a_comment_of_a_setting_stands_beside_the_command():
    fix = trial_conclusions(tried(SMALLER), "packet", ranks=(1,)).fix("")
    assert fix == "Run `sudo ip link set dev eth0 mtu 1500` on node1 (tested: this fixes it)."


def test_a_fault_that_comes_and_goes_is_told_as_such():
    assert trial_conclusions(tried(BY_ITSELF), "packet", ranks=(0,)).evidence == {
        "measured again": ["nothing changed: 9000 bytes arrive (1 of 2 times)"]
    }


def test_what_could_not_be_tried_is_told():
    reason = Trial("path", NOT_TRIED, "", False, "node1", error="another network: none leads there")
    assert trial_conclusions(tried(reason), "path", ranks=(0,)).evidence == {
        "not tried": ["another network: none leads there"]
    }


def test_trials_of_others_say_nothing():
    assert trial_conclusions(tried(MENDS), "path", ranks=(2,)).evidence == {}
    assert trial_conclusions(tried(MENDS), "packet", ranks=(0,)).evidence == {}
    assert trial_conclusions(healthy(2, 1).job(), "path", ranks=(0,)).evidence == {}


FASTER = Trial("collective", "NCCL_P2P_DISABLE=1", "export NCCL_P2P_DISABLE=1", True, None, 2e9, 20e9, "B/s")
QUICKER = Trial("collective", "NCCL_P2P_DISABLE=0", "export NCCL_P2P_DISABLE=0", True, None, 90e-6, 30e-6, "s")
LOSES = Trial("path", "other interface eth1", "", True, "node1", 20.0, 4000.0, "segments")


def test_trials_of_a_collective_are_those_of_the_ranks_that_had_a_part():
    assert trial_conclusions(tried(FASTER), "collective", ranks=(0, 2)).remedies
    assert not trial_conclusions(tried(FASTER), "collective", ranks=(1, 2)).remedies


def test_what_mends_latency_is_told_of_latency_alone():
    job = tried(FASTER, QUICKER, Trial("collective", NOT_TRIED, "", False, error="no"))
    late = trial_conclusions(job, "collective", ranks=(0,), unit="s")
    assert late.restored_by == ("NCCL_P2P_DISABLE=0: 30 µs, was 90 µs",)
    assert late.not_tried == ("no",)
    slow = with_trials(job, Finding("slow", ranks=(0,)), "collective", unit="B/s")
    assert slow.evidence["restored by"] == ["NCCL_P2P_DISABLE=1: 20 GB/s, was 2 GB/s"]
    assert len(trial_conclusions(job, "collective", ranks=(0,)).restored_by) == 2


def late_and_slow() -> JobBuilder:
    """Late small messages, and rank 6 in slow groups; in the groups that were tried one setting mends each."""
    trials = TrialFacts(trials=(FASTER, QUICKER))
    return small(80e-6, times=9.0).put(trials, ranks=(0, 1, 2, 3, 4, 5, 6, 7))


def test_findings_of_collectives_tell_what_mends_them():
    shared, late = Staged(late_and_slow().job()).result("NET027").findings
    assert shared.ranks == (6,)
    assert shared.fix.startswith("Run `export NCCL_P2P_DISABLE=1` on all ranks (tested: this fixes it)")
    assert late.fix.startswith(
        "Run `export NCCL_P2P_DISABLE=0` on all ranks (tested: this fixes it), or check the links between the GPUs"
    )
    assert late.evidence["restored by"] == ["NCCL_P2P_DISABLE=0: 30 µs, was 90 µs"]


def test_findings_of_collectives_that_nobody_tried_keep_their_way_out():
    shared, late = Staged(small(80e-6, times=9.0).job()).result("NET027").findings
    assert "tried" not in (shared.fix or "")
    assert late.fix.startswith("Check the links between the GPUs")


def test_lost_packets_are_told_as_shares():
    assert trial_conclusions(tried(LOSES), "path", ranks=(0,)).restored_by == (
        "other interface eth1: up to 0.025 % retransmitted, was up to 5 % retransmitted",
    )


def test_both_ends_of_a_path_have_its_trials():
    assert (
        trial_conclusions(tried(MENDS), "path", ranks=(0,)).remedies
        == trial_conclusions(tried(MENDS), "path", ranks=(1,)).remedies
    )


def test_a_finding_keeps_its_own_way_out_where_nothing_mends():
    finding = Finding("slow", ranks=(0,), fix="buy a cable", evidence={"paths": 1})
    assert with_trials(tried(HELPS_NOT), finding, "path").fix == "buy a cable"
    assert with_trials(tried(HELPS_NOT), finding, "path").evidence.keys() == {"paths", "not restored by"}
    assert with_trials(tried(MENDS), finding, "path", otherwise="buy a cable.").fix.endswith(
        "(tested: this fixes it), or buy a cable."
    )
    assert with_trials(healthy(3, 1).job(), finding, "path") == finding

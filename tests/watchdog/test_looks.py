"""Looks between rounds: an alarm is evaluated at once and only once, and nothing else is."""

from types import SimpleNamespace

import pytest

from doctor.core.facts import Checksum, ModelFacts, NonFinite, ReplicaFacts, StepSettings, Variable
from doctor.monitor.watchdog.rounds.periodic_rounds import LOOK, PeriodicRounds, alarms_of
from doctor.testing import running

SAME = ReplicaFacts(checksums=(Checksum(50, "a"), Checksum(100, "b")))
OTHER = ReplicaFacts(checksums=(Checksum(50, "a"), Checksum(100, "c")))
SPOILT = ReplicaFacts(non_finite=(NonFinite(20, "loss", value="nan"),))


def with_rank_1(replica):
    return running(1, 3).put(SAME).put(replica, ranks=(1,))


def settings(rate):
    return ReplicaFacts(settings=(StepSettings(50, (Variable("lr", rate),)),))


@pytest.mark.parametrize(
    ("sketch", "expected"),
    [
        (with_rank_1(SAME), set()),
        (with_rank_1(ReplicaFacts(checksums=(Checksum(50, "a"),))), set()),
        (with_rank_1(OTHER), {("step", "all on 3 ranks")}),
        (with_rank_1(OTHER).alter(ModelFacts, replicated=False), set()),
        (with_rank_1(SPOILT), {("loss", "1")}),
        (running(1, 2).put(settings("0.1")).put(settings("0.5"), ranks=(1,)), {("settings", " on 2 ranks")}),
        (running(1, 2).put(settings("0.1")), set()),
        (
            running(1, 2).put(settings("0.1")).put(settings("0.5"), ranks=(1,)).alter(ModelFacts, replicated=False),
            {("settings", " on 2 ranks")},
        ),
        (running(1, 3).put(settings("0.1")).put(settings("0.5"), ranks=(1,)), {("settings", " on 3 ranks")}),
    ],
    ids=[
        "equal",
        "a step behind",
        "apart",
        "shards",
        "a loss",
        "another rate",
        "the same rate",
        "of shards",
        "on one more rank",
    ],
)
def test_what_does_not_wait_for_a_round(sketch, expected):
    assert alarms_of(sketch.job()) == expected


class Ranks:
    """What a round uses of the watchdog of rank 0, with news in each look."""

    def __init__(self, world_size=3, rank=0):
        self.rank, self.world_size, self.evaluated = rank, world_size, []
        self.posted = self.posted_some = 0
        self.sketch = with_rank_1(SAME)
        self.local_peers = SimpleNamespace(read_announcements=lambda: None)
        self.peer_table = SimpleNamespace(read=lambda connections: True, job=lambda: self.sketch.job())
        self.peer_store = SimpleNamespace(
            alive=["store"], get=lambda name: None, read_all=lambda: None, set_on_best=lambda *given: None
        )

    def update_local_state(self):
        self.posted += 1

    def update_for_look(self):
        self.posted_some += 1

    def refresh_card(self):
        pass

    def evaluate(self, job, trigger):
        self.evaluated.append(trigger)


def played(ranks, seconds, rounds=None, since=0.0):
    rounds = rounds or PeriodicRounds(ranks, 15.0, 0.0)
    for tick in range(1, int(seconds * 2) + 1):
        rounds.step(since + tick / 2)
    return rounds


def test_an_alarm_is_evaluated_at_the_next_look_and_once():
    ranks = Ranks()
    rounds = played(ranks, LOOK + 1)
    assert ranks.evaluated == []
    ranks.sketch = with_rank_1(OTHER)
    played(ranks, LOOK, rounds, since=LOOK + 1)
    assert ranks.evaluated == ["round"]
    played(ranks, 3.5, rounds, since=2 * LOOK + 1)
    assert ranks.evaluated == ["round"]


def test_an_alarm_between_rounds_is_evaluated_with_all_facts_of_this_rank():
    ranks = Ranks()
    rounds = played(ranks, 9)
    assert (ranks.evaluated, ranks.posted, ranks.posted_some) == (["round"], 1, 1)
    ranks.sketch = with_rank_1(OTHER)
    played(ranks, LOOK, rounds, since=9)
    assert (ranks.evaluated, ranks.posted, ranks.posted_some) == (["round"] * 2, 2, 2)


def test_a_rank_that_another_evaluates_posts_all_facts_shortly_before_each_round():
    posted, ranks = [], Ranks(rank=1)
    ranks.update_local_state, ranks.update_for_look = lambda: posted.append("all"), lambda: posted.append("some")
    played(ranks, 40)
    assert posted == ["all", "all", "some", "all", "all", "some", "all", "all"]
    assert not ranks.evaluated


def test_a_healthy_run_is_evaluated_in_rounds_only():
    ranks = Ranks()
    played(ranks, 60)
    assert ranks.evaluated == ["round"] * 4
    assert (ranks.posted, ranks.posted_some) == (4, 8)


def test_a_rank_alone_has_rounds_only():
    ranks = Ranks(world_size=1)
    played(ranks, 60)
    assert (ranks.posted, len(ranks.evaluated)) == (4, 4)

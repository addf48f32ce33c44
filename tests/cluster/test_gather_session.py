"""Whole gatherings: who keeps, who attends, who is lost, and that all leave together."""

import threading
import time

from doctor.cluster.membership.protocol import LeaderAnnouncement
from doctor.cluster.transport.codec import decode
from doctor.core.job import LastSeen
from tests.cluster.ranks import CODE, LIMIT, TIMEOUT, hurry, judges, new_ranks, run, start, until, wait_for
from tests.cluster.scenes import CARRIERS, Scenes
from tests.lab.speed import NEVER, slowness

WORLD = 4
ABSENT = {"timeout": TIMEOUT, "judge": lambda job: 1 if job.absent else 0}
SCENES = Scenes()
played = SCENES.fixture()


@SCENES.scene(CARRIERS)
def test_all_ranks_join(place):
    ranks = new_ranks(place.boards(), range(WORLD), WORLD)
    assert run(*ranks) == [CODE] * WORLD
    assert judges(ranks) == [0]
    assert [rank.number for rank in ranks[0].job.ranks] == [0, 1, 2, 3]
    assert ranks[0].job.absent == ()
    assert ranks[0].job.world_size == WORLD


@SCENES.scene(CARRIERS)
def test_many_ranks_join(place):
    ranks = new_ranks(place.boards(), range(16), 16)
    assert run(*ranks) == [CODE] * 16
    assert len(ranks[0].job.ranks) == 16


@SCENES.scene()
def test_rank_0_joins_last(place):
    ranks = new_ranks(place.boards(), range(WORLD), WORLD)
    start(*ranks[1:])
    time.sleep(0.5)
    start(ranks[0])
    assert wait_for(*ranks) == [CODE] * WORLD


@SCENES.scene()
def test_no_rank_leaves_before_all_have_joined(place):
    late = threading.Event()
    [slow] = new_ranks(place.boards(), [1], 3, key="same", facts_after=late)
    others = new_ranks(place.boards(), [0, 2], 3, key="same")
    start(slow, *others)
    time.sleep(0.5)
    assert all(rank.is_alive() for rank in others)
    late.set()
    assert wait_for(slow, *others) == [CODE] * 3


@SCENES.scene(CARRIERS)
def test_an_absent_rank_is_waited_for_until_the_time_is_up(place):
    ranks = new_ranks(place.boards(), [0, 2, 3], WORLD, **ABSENT)
    assert run(*ranks) == [1] * 3
    assert ranks[0].job.absent == (1,)
    assert all(rank.seconds >= TIMEOUT for rank in ranks)


@SCENES.scene(came=[(1, 2, 3), (3,), (2, 3)])
def test_the_lowest_that_came_keeps_where_rank_0_did_not(place, came):
    ranks = new_ranks(place.boards(), came, WORLD, **ABSENT)
    assert run(*ranks) == [1] * len(came)
    assert judges(ranks) == [came[0]]
    assert ranks[0].job.absent == tuple(sorted({0, 1, 2, 3} - set(came)))
    assert [rank.number for rank in ranks[0].job.ranks] == list(came)
    assert all(rank.seconds >= TIMEOUT for rank in ranks)


def dies_at(rank, what, name):
    """Let ``rank`` die when it is about to do ``what`` to something on the board whose name ends with ``name``."""
    rank.mortal.at = lambda called, where: called == what and where.endswith(name)


@SCENES.scene(
    CARRIERS,
    moment=[("set", "call"), ("append", "hello"), ("fetch", "hello"), ("set", "pulse"), ("set", "verdict")],
)
def test_rank_0_is_killed_before_the_verdict(place, moment):
    """Before it has called, while it waits, and when it has judged: the next one takes its place."""
    ranks = new_ranks(place.boards(), range(3), 3, **ABSENT)
    dies_at(ranks[0], *moment)
    assert run(*ranks) == [None, 1, 1]
    (judge,) = judges(ranks)
    assert judge in (1, 2), "in turn by 0.2 s, which rank 1 may miss on a busy machine"
    assert ranks[judge].job.absent == (0,)


@SCENES.scene(moment=[("fetch", "heard"), ("set", "leave"), ("clear", "")])
def test_rank_0_is_killed_after_the_verdict(place, moment):
    ranks = new_ranks(place.boards(), range(3), 3)
    dies_at(ranks[0], *moment)
    assert run(*ranks) == [None, CODE, CODE]


@SCENES.scene()
def test_a_member_is_killed_before_it_sends_its_facts(place):
    ranks = new_ranks(place.boards(), range(3), 3, **ABSENT)
    dies_at(ranks[1], "append", "facts")
    assert run(*ranks) == [1, None, 1]
    assert ranks[0].job.absent == (1,)
    assert ranks[0].job.last_seen == (LastSeen(1, "node0", "joined"),)


@SCENES.scene()
def test_a_member_is_killed_before_it_acknowledges(place):
    ranks = new_ranks(place.boards(), range(3), 3)
    dies_at(ranks[1], "append", "heard")
    assert run(*ranks) == [CODE, None, CODE]


@SCENES.scene()
def test_rank_0_joins_after_another_rank_evaluated(place):
    first, *others = new_ranks(place.boards(), range(3), 3, timeout=slowness(), judge=lambda job: len(job.absent))
    assert run(*others) == [1, 1]
    assert run(first) == [2]


@SCENES.scene()
def test_processes_with_the_same_rank_are_both_in_the_job(place):
    ranks = new_ranks(place.boards(), [0, 1, 1], 2, key="twins")
    assert run(*ranks) == [CODE] * 3
    assert [rank.number for rank in ranks[0].job.ranks] == [0, 1, 1]


@SCENES.scene()
def test_two_processes_claim_rank_0(place):
    ranks = new_ranks(place.boards(), [0, 0, 1], 3, timeout=TIMEOUT)
    assert run(*ranks) == [CODE] * 3
    [judged] = [rank.job for rank in ranks if rank.job]
    assert [rank.number for rank in judged.ranks] == [0, 0, 1]


@SCENES.scene()
def test_a_rank_twice_and_another_one_not_at_all(place):
    """Two hosts that were started with one number: as many came as were expected, and nobody else is waited for."""
    ranks = new_ranks(place.boards(), [0, 1, 1], 3, timeout=NEVER)
    assert run(*ranks) == [CODE] * 3
    assert [rank.number for rank in ranks[0].job.ranks] == [0, 1, 1]
    assert ranks[0].job.absent == ()
    assert ranks[0].job.ungathered == 1


@SCENES.scene()
def test_ranks_with_different_world_sizes_are_in_one_job(place):
    waiting = threading.Event()
    ranks = new_ranks(place.boards(), [0], 2, key="worlds", facts_after=waiting)
    ranks += new_ranks(place.boards(), [1, 2], 3, key="worlds")
    start(*ranks[1:])
    time.sleep(0.3)
    waiting.set()
    start(ranks[0])
    assert wait_for(*ranks) == [CODE] * 3
    assert [rank.number for rank in ranks[0].job.ranks] == [0, 1, 2]
    assert ranks[0].job.world_size == 2


@SCENES.scene()
def test_a_rank_that_joins_after_the_end_reports_it(place):
    judging = threading.Event()
    ranks = new_ranks(place.boards(), range(2), 2, key="late", judge=lambda job: judging.wait(LIMIT) and CODE)
    start(*ranks)
    board = place.boards()()
    until(lambda: is_closed(board))
    [late] = new_ranks(place.boards(), [1], 2, key="late")
    start(late)
    time.sleep(0.3)
    judging.set()
    assert wait_for(*ranks) == [CODE, CODE]
    assert wait_for(late) == [3]
    assert "not included in the report (doctor explain ENV004)" in late.told[0]


def is_closed(board):
    call = board.get("call")
    return call is not None and board.get(f"{decode(call, LeaderAnnouncement).nonce}/pulse") == b"rest"


def test_rank_0_joins_while_another_rank_coordinates(folder, monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr("doctor.cluster.gather.gather_session.TAKE_OVER", 3.0 * slowness())
    first, *others = new_ranks(folder, range(3), 3, timeout=0.5 * slowness(), judge=lambda job: len(job.ranks))
    start(*others)
    board = folder()
    until(lambda: board.get("call"))
    start(first)
    assert wait_for(first, *others) == [3, 3, 3]
    assert judges([first, *others]) == [0]

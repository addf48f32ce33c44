"""Gatherings on boards that others have used, lose, damage or clear away; keepers that pause; runs that are called off.

Whatever happens, all who are there leave with one exit code, in time, and raise nothing.
"""

import os
import random
import shutil
import threading
import time

from doctor.cluster.gather import member
from doctor.cluster.gather.protocol import GatherVerdict
from doctor.cluster.membership.protocol import LeaderAnnouncement
from doctor.cluster.transport.codec import MalformedMessage, decode, encode
from doctor.cluster.transport.store import StoreLost
from doctor.core.capture import read_capture
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import MARK, OwnFolder
from tests.cluster.ranks import CODE, LIMIT, TIMEOUT, hurry, judges, new_ranks, run, start, until, wait_for
from tests.cluster.scenes import CARRIERS, Scenes
from tests.lab.speed import NEVER, slowness

ABSENT = {"timeout": TIMEOUT, "judge": lambda job: 1 if job.absent else 0}
SCENES = Scenes()
played = SCENES.fixture()


def announcement_of(board):
    """The call that stands on a board."""
    try:
        return decode(board.get("call") or b"", LeaderAnnouncement)
    except MalformedMessage:
        return None


def heartbeat_of(board):
    """The pulse of the gathering that was called."""
    call = announcement_of(board)
    return call and board.get(f"{call.nonce}/pulse")


def leave_behind(board, *, judged):
    """What a run leaves whose keeper was killed: before its verdict, or when it had judged others."""
    board.set("call", encode(LeaderAnnouncement("stale", 0, 30.0)))
    board.set("stale/pulse", b"rest" if judged else b"7")
    if judged:
        board.set("stale/verdict", encode(GatherVerdict.of(1, ["0123456789abcdef"])))


@SCENES.scene(judged=[False, True])
def test_early_ranks_do_not_fall_for_a_run_that_was_killed(place, judged):
    leave_behind(place.boards()(), judged=judged)
    ranks = new_ranks(place.boards(), range(3), 3)
    start(*ranks[1:])
    time.sleep(1.3 * member.MOST_MISSED * member.HEARTBEAT_EVERY)  # longer than any keeper may be silent
    start(ranks[0])
    assert wait_for(*ranks) == [CODE] * 3
    assert judges(ranks) == [0]


@SCENES.scene(judged=[False, True])
def test_what_a_killed_run_left_does_not_put_off_the_one_who_takes_over(place, judged):
    leave_behind(place.boards()(), judged=judged)
    ranks = new_ranks(place.boards(), [1, 2], 3, **ABSENT)
    assert run(*ranks) == [1, 1]
    assert judges(ranks) == [1]


@SCENES.scene()
def test_runs_one_after_another_leave_no_litter(place):
    for _ in range(3):
        ranks = new_ranks(place.boards(), range(3), 3)
        assert run(*ranks) == [CODE] * 3
        assert [rank.number for rank in ranks[0].job.ranks] == [0, 1, 2]
    assert {*os.listdir(place.root)} - {MARK} == {"call", "last"}


@SCENES.scene(CARRIERS)
def test_jobs_side_by_side_keep_apart(place):
    jobs = {
        name: new_ranks(place.boards(name), range(3), 3, judge=lambda job, code=code: code)
        for code, name in enumerate(("one", "other"))
    }
    for ranks in jobs.values():
        start(*ranks)
    assert [wait_for(*ranks) for ranks in jobs.values()] == [[0] * 3, [1] * 3]


def test_of_many_who_take_over_at_once_one_keeps(folder, monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr("doctor.cluster.gather.member.IN_TURN", 0.0)
    ranks = new_ranks(folder, range(1, 9), 9, timeout=0.5 * slowness(), judge=lambda job: 1)
    assert run(*ranks) == [1] * 8
    [judged] = [rank.job for rank in ranks if rank.job]
    assert [rank.number for rank in judged.ranks] == list(range(1, 9))


@SCENES.scene()
def test_a_coordinator_that_pauses_is_not_replaced(place):
    late = threading.Event()
    ranks = new_ranks(place.boards(), range(2), 3, key="pause")
    ranks += new_ranks(place.boards(), [2], 3, key="pause", facts_after=late)
    start(*ranks)
    board = place.boards()()
    until(lambda: heartbeat_of(board))
    ranks[0].mortal.awake.clear()
    time.sleep(2 * member.MOST_MISSED * member.HEARTBEAT_EVERY)  # twice as long as a keeper may be silent
    ranks[0].mortal.awake.set()
    late.set()
    assert wait_for(*ranks) == [CODE] * 3
    assert judges(ranks) == [0]


@SCENES.scene()
def test_one_who_was_asleep_when_all_left_leaves_with_their_code(place):
    judging = threading.Event()
    ranks = new_ranks(place.boards(), range(3), 3, judge=lambda job: judging.wait(LIMIT) and CODE)
    start(*ranks)
    board = place.boards()()
    until(lambda: heartbeat_of(board) == b"rest")
    ranks[2].mortal.awake.clear()
    judging.set()
    assert wait_for(*ranks[:2]) == [CODE, CODE]
    ranks[2].mortal.awake.set()
    assert wait_for(ranks[2]) == [CODE]


@SCENES.scene(outlives=[True, False])
def test_a_lost_store(place, outlives):
    ranks = new_ranks(place.boards(), range(3), 4)
    for rank in ranks:
        rank.mortal.survives_coordinator = outlives
    start(*ranks)
    board = place.boards()()
    until(lambda: announcement_of(board))
    for rank in ranks:
        rank.mortal.lost.set()
    assert wait_for(*ranks) == [3] * 3
    for rank in ranks:
        assert "is no longer reachable: Connection reset by peer" in rank.told[0]
        ended = rank.told[0].endswith("rank 0 exited or stopped before it reached a verdict (doctor explain ENV005)")
        assert ended is (rank is not ranks[0] and not outlives)


@SCENES.scene()
def test_a_store_that_ends_with_rank_0(place):
    ranks = new_ranks(place.boards(), range(3), 4, timeout=NEVER)
    for rank in ranks:
        rank.mortal.survives_coordinator = False
    start(*ranks)
    board = place.boards()()
    until(lambda: announcement_of(board))
    for rank in ranks:
        (rank.mortal.dead if rank is ranks[0] else rank.mortal.lost).set()
    assert wait_for(*ranks) == [None, 3, 3]


@SCENES.scene()
def test_a_rank_that_loses_the_store_writes_its_facts_to_the_folder(place):
    facts = place.folder / "facts"
    ranks = new_ranks(place.boards(), range(2), 3, share=facts)
    start(*ranks)
    board = place.boards()()
    until(lambda: announcement_of(board))
    for rank in ranks:
        rank.mortal.lost.set()
    assert wait_for(*ranks) == [3, 3]
    assert sorted(os.listdir(facts)) == ["rank-0.json", "rank-1.json"]
    capture = read_capture(facts / "rank-1.json")
    assert (capture.world_size, [member.rank for member in capture.members]) == (3, [1])
    assert ranks[1].told[1] == f"its facts are in {facts}/rank-1.json; run: doctor diagnose {facts}"


def test_a_folder_that_does_not_answer_is_not_waited_for_forever(folder, tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr("doctor.cluster.gather.gather_session.PATIENCE", 0.3)
    monkeypatch.setattr(OwnFolder, "write", lambda *_: answer.wait(NEVER))
    [rank] = new_ranks(folder, [1], 2, share=tmp_path)
    rank.mortal.lost.set()
    assert run(rank) == [3]
    answer.set()
    assert rank.told[1] == f"cannot write its facts to {tmp_path}: no answer"


@SCENES.scene(late=[0.0, 0.5])
def test_what_the_judge_can_not_use_ends_all(place, late):
    """A plug-in that is broken, say: the judge knows before anybody else is there."""

    def refuse():
        raise UnusableError("the plug-in is broken")

    [judge] = new_ranks(place.boards(), [0], 3, key="broken", before=refuse)
    others = new_ranks(place.boards(), [1, 2], 3, key="broken")
    start(judge)
    time.sleep(late)
    start(*others)
    assert wait_for(judge, *others) == [2, 2, 2]


@SCENES.scene(raised=[UnusableError, KeyboardInterrupt])
def test_a_judge_that_stops_lets_the_others_go(place, raised):
    def judge(job):
        raise raised("no")

    ranks = new_ranks(place.boards(), range(3), 3, judge=judge)
    assert run(*ranks) == ([2, 2, 2] if raised is UnusableError else [130, 3, 3])


@SCENES.scene()
def test_a_folder_that_is_cleared_away_while_ranks_gather(place):
    ranks = new_ranks(place.boards(), range(3), 4, **ABSENT)
    start(*ranks)
    board = place.boards()()
    until(lambda: announcement_of(board))
    shutil.rmtree(place.root, ignore_errors=True)
    assert set(wait_for(*ranks)) <= {1, 3}


@SCENES.scene(CARRIERS)
def test_malformed_messages_do_not_block_the_verdict(place):
    chance, waiting = random.Random(11), threading.Event()
    ranks = new_ranks(place.boards(), range(3), 4, key="noise")
    ranks += new_ranks(place.boards(), [3], 4, key="noise", facts_after=waiting)
    start(*ranks)
    board = place.boards()()
    nonce = until(lambda: announcement_of(board)).nonce
    for _ in range(60):
        box = chance.choice(["hello", "facts", "measured", "heard"])
        board.append(f"{nonce}/{box}", chance.randbytes(chance.randrange(30)))
    waiting.set()
    assert wait_for(*ranks) == [CODE] * 4
    assert [rank.number for rank in ranks[0].job.ranks] == [0, 1, 2, 3]
    assert " messages of other ranks could not be decoded: " in ranks[0].told[0]


NAMES = ("call", "{}/pulse", "{}/verdict", "{}/leave", "{}/hello", "{}/facts", "{}/measured", "{}/heard", "{}/plan/{}")


@SCENES.scene(CARRIERS, seed=range(4))
def test_any_bytes_under_any_name_at_any_time(place, seed):
    """Nobody raises, and nobody hangs; what the codes are is another matter."""
    chance = random.Random(seed)
    ranks = new_ranks(place.boards(), range(4), 5, **ABSENT)
    start(*ranks)
    board = place.boards()()
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        scribble(board, chance)
        time.sleep(0.01)
    assert all(0 <= code <= 255 for code in wait_for(*ranks))


def scribble(board, chance):
    call = announcement_of(board)
    name = chance.choice(NAMES).format(call.nonce if call else "none", "0123456789abcdef")
    data = chance.randbytes(chance.randrange(40))
    try:
        if chance.random() < 0.5:
            board.append(name, data)
        else:
            board.set(name, data)
    except StoreLost:  # a folder where a file should be, or the other way round
        return

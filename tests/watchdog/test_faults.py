"""Faults caused for real in jobs of three processes: who judges, what it is given, and how soon."""

import json
import os
import signal
import time

import pytest

from doctor.core.capture import merge_captures, read_capture
from doctor.core.facts import ProgressFacts
from doctor.postmortem.inputs import read_inputs
from tests.lab.speed import NEVER, slowness
from tests.watchdog.ranks import LIMIT


def strikes(culprit, strike):
    """A script: all meet and train, then one is struck and the others wait for it."""

    def script(rank):
        rank.watchdog.start()
        rank.watchdog.check_start(LIMIT)
        rank.train(0.4)
        if rank.number == culprit:
            strike(rank)
        rank.stand_still()

    return script


def holds(rank):
    rank.write(struck="lock")
    rank.hold_the_lock()


@pytest.mark.parametrize(
    ("culprit", "store", "number", "state", "letter"),
    [
        (0, "rank 0", signal.SIGSTOP, "stopped", "T"),
        (0, "agent", signal.SIGSTOP, "stopped", "T"),
        (1, "none", signal.SIGSTOP, "stopped", "T"),
        (0, "rank 0", signal.SIGKILL, "gone", "Z"),
        (1, "agent", signal.SIGKILL, "gone", "Z"),
        (0, "none", signal.SIGKILL, "gone", "Z"),
    ],
)
def test_a_rank_that_is_stopped_or_killed(scene, culprit, store, number, state, letter):
    scene.start(strikes(culprit, lambda rank: rank.kill(number)), 3, store=store)
    decision = scene.until_judged("stall")
    judge, *others = sorted({0, 1, 2} - {culprit})
    member = decision["members"][str(culprit)]
    assert decision["rank"] == judge
    assert (member["state"], member["letter"]) == (state, letter)
    assert member["seen_by"] in {judge, *others}, "any rank of its host may be the first to see it"
    assert member["host"] == "here"
    job = merge_captures(read_inputs([scene.directory]).captures)
    assert job.ranks[culprit].find(ProgressFacts).state == state, "what was seen of it is in the judge's record"
    for other in (judge, *others):
        assert decision["members"][str(other)]["seen_by"] is None
        # A killed rank is noticed before the others stand still.
        is_killed = number == signal.SIGKILL
        assert is_killed or "stand_still" in decision["members"][str(other)]["stack"]


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "ended by signal 9 (SIGKILL)"), (signal.SIGTERM, "ended by signal 15 (SIGTERM)")],
)
def test_a_killed_rank_is_judged_while_the_others_go_on(scene, number, message):
    """A launcher ends the others soon after the first; by SIGTERM, which those outlive whom it was not sent."""

    def script(rank):
        rank.watchdog.start()
        rank.watchdog.check_start(LIMIT)
        rank.train(1.0)
        if rank.number == 1:
            rank.kill(number)
        rank.train(30.0)

    scene.start(script, 3, round_seconds=0.2)
    decision = scene.until_judged("stall")
    assert decision["rank"] == 0
    assert decision["members"]["1"]["failure"] == message
    assert decision["members"]["1"]["state"] == "gone"
    assert decision["members"]["0"]["state"] == decision["members"]["2"]["state"] == "running"


@pytest.mark.parametrize(("culprit", "store"), [(0, "rank 0"), (1, "agent"), (0, "none")])
def test_a_rank_whose_interpreter_is_blocked(scene, culprit, store):
    """The stacks come by a signal: no Python runs there."""
    scene.start(strikes(culprit, holds), 3, store=store)
    decision = scene.until_judged("stall")
    member = decision["members"][str(culprit)]
    assert decision["rank"] == (1 if culprit == 0 else 0)
    assert (member["state"], member["stack_from"], member["stack"][0]) == ("silent", "signal", "hold_the_lock")


def test_the_process_of_the_store_is_stopped(scene):
    """All go over to the folder; nobody is to blame but the store."""

    def script(rank):
        rank.watchdog.start()
        rank.watchdog.check_start(LIMIT)
        rank.train(2.0)
        rank.write(struck="store")
        rank.stand_still()

    scene.start(script, 3, store="agent")
    scene.until_judged("before")
    os.kill(scene.agent, signal.SIGSTOP)
    decision = scene.until_judged("stall")
    assert decision["rank"] == 0
    assert {member["stack_from"] for member in decision["members"].values()} == {"interpreter"}


def test_an_exception_before_the_ranks_have_met(scene):
    """It is kept for the moment that they take to find one another, and judged with all of them."""

    def script(rank):
        rank.watchdog.start()
        if rank.number == 1:
            rank.source.fails("of rank 1")
            rank.watchdog.fail(NEVER)
        else:
            while not scene.judged("failure"):
                rank.train(0.1)

    scene.start(script, 2)
    decision = scene.until_judged("failure")
    assert (decision["rank"], sorted(decision["members"])) == (0, ["0", "1"])
    assert decision["members"]["1"]["failure"] == "of rank 1"


@pytest.mark.parametrize("store", ["rank 0", "none"])
def test_an_exception(scene, store):
    """It is judged once. The others' own, which follow, are told the same at once; the record is on the disk."""

    def script(rank):
        rank.watchdog.start()
        rank.watchdog.check_start(LIMIT)
        rank.train(0.4)
        if rank.number == 1:
            rank.write(struck="exception")
        else:
            while not scene.judged("failure"):
                rank.train(0.1)
        rank.source.fails(f"of rank {rank.number}")
        decision = rank.watchdog.fail(NEVER)
        rank.write(decision=decision.words)
        rank.watchdog.stop(LIMIT)

    scene.start(script, 3, store=store)
    scene.wait()
    (decision,) = scene.judged("failure")
    assert decision["rank"] == 0
    assert {number: member["failure"] for number, member in decision["members"].items()} == {
        "0": None,
        "1": "of rank 1",
        "2": None,
    }
    told = [line for line in scene.said() if "decision" in line]
    assert [line["decision"] for line in told] == ["judged by 0"] * 3
    record = read_capture(scene.directory / "rank-1.json").members[0].sections["progress"]
    assert isinstance(record, ProgressFacts)
    assert (record.state, record.failure.message, record.stack_from) == ("failed", "of rank 1", "interpreter")


def test_an_evaluator_without_a_decision_is_replaced(scene):
    def script(rank):
        if rank.number == 0:
            rank.watchdog._evaluate = lambda job, occasion: (rank.write(sleeps=occasion), time.sleep(NEVER))
        rank.watchdog.start()
        rank.train(0.4)
        rank.stand_still()

    scene.start(script, 3)
    assert scene.until_judged("stall")["rank"] == 1
    assert [line["rank"] for line in scene.said() if "sleeps" in line] == [0]


def test_all_end_themselves_where_they_are_asked_to(scene):
    """By SIGTERM, and without further ado where a handler swallows it."""

    def script(rank):
        if rank.number == 1:
            signal.signal(signal.SIGTERM, lambda *_: None)
        rank.watchdog.start()
        rank.train(0.4)
        rank.stand_still()

    scene.start(script, 3, on_hang="abort")
    scene.wait()
    assert scene.codes == {0: -signal.SIGTERM, 1: 1, 2: -signal.SIGTERM}
    told = [line for line in scene.said() if "told" in line]
    assert sorted(line["rank"] for line in told) == [0, 1, 2]
    assert all("aborting (on_hang='abort'): judged by " in line["told"] for line in told), "by 0, or by who replaced it"
    for number in range(3):
        record = json.loads((scene.directory / f"rank-{number}.json").read_text())
        assert record["ranks"][0]["facts"]["progress"]["stack_from"] == "interpreter"


def test_a_verdict_of_a_healthy_run_ends_nothing(scene):
    def script(rank):
        rank.watchdog.start()
        rank.train(0.3)
        rank.stand_still(2.5 * slowness())
        rank.source.state = "ended"
        rank.watchdog.stop(LIMIT)

    scene.start(script, 2, on_hang="abort", faulty=False)
    scene.wait()
    assert scene.codes == {0: 0, 1: 0}
    assert scene.judged("stall")

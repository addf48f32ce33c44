"""The record of where a rank is: what it says, when it calls a standstill a stall, and that it does not grow."""

import threading
import tracemalloc
from types import SimpleNamespace

import pytest

from doctor.monitor.telemetry import progress as room
from doctor.monitor.telemetry.event_log import ENDED, StageEntered
from doctor.monitor.telemetry.progress import (
    COMPUTES,
    FACTOR,
    FIRST,
    FLOOR,
    OUTLIERS,
    PHASE_TIMEOUTS,
    RECENT,
    SLACK,
    Progress,
)


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set."""

    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(room, "monotonic", lambda: clock.now)
    return clock


def mark(progress, point, more=None):
    progress.take([(room.monotonic(), point, more)])


def begin(progress):
    mark(progress, "epoch-start", StageEntered("train", 0))


def _train(progress, clock, steps, seconds=0.1):
    begin(progress)
    for batch in range(steps):
        for point, more in (("step", (batch, 0, batch)), ("backward", None), ("data", True)):
            mark(progress, point, more)
            clock.now += seconds / 3


def assert_limit(progress, clock, seconds):
    """It stalls once the present point has taken so many seconds, and not before."""
    clock.now = progress.since + seconds - 0.5
    assert progress.stall() is None
    clock.now += 1
    assert progress.stall()


def test_a_run_that_moves_does_not_stall(clock):
    progress = Progress()
    _train(progress, clock, 100)
    clock.now += FLOOR - 0.5
    assert progress.stall() is None


def test_a_run_with_short_steps_stalls_after_the_floor(clock):
    progress = Progress()
    _train(progress, clock, 100)
    clock.now += FLOOR + 0.1
    stall = progress.stall()
    assert stall is not None
    assert stall.limit == FLOOR
    assert progress.facts().state == "stalled"


def test_long_steps_are_given_longer(clock):
    progress = Progress()
    _train(progress, clock, 5, seconds=30.0)
    mark(progress, "step")
    assert_limit(progress, clock, FACTOR * 10)


def test_a_first_step_that_was_compiled_is_no_measure(clock):
    progress = Progress()
    _train(progress, clock, 1, seconds=60.0)
    _train(progress, clock, 20)
    clock.now += FLOOR + 0.1
    assert progress.stall().limit == FLOOR


def test_what_took_long_once_may_take_as_long_again_and_little_more(clock):
    progress = Progress()
    _train(progress, clock, 20)
    _train(progress, clock, 1, seconds=90.0)
    _train(progress, clock, 20)
    assert_limit(progress, clock, SLACK * 30)


def test_what_takes_long_again_and_again_is_usual(clock):
    progress = Progress()
    for _ in range(OUTLIERS + 2):
        _train(progress, clock, 20)
        _train(progress, clock, 1, seconds=90.0)
    assert_limit(progress, clock, FACTOR * 30)


def test_the_first_pass_of_a_point_is_given_longer(clock):
    progress = Progress()
    begin(progress)
    mark(progress, "step")
    assert_limit(progress, clock, FIRST)


@pytest.mark.parametrize("point", ["checkpoint", "epoch-start"])
def test_what_is_slow_by_nature_is_given_longer_after_many_quick_passes(clock, point):
    progress = Progress()
    begin(progress)
    for _ in range(3):
        mark(progress, point)
        clock.now += 0.1
        mark(progress, "step")
    mark(progress, point)
    clock.now += PHASE_TIMEOUTS[point] - 1
    assert progress.stall() is None


@pytest.mark.parametrize(("share", "stalls_after"), [(1.0, COMPUTES), (0.5, FIRST), (None, FIRST)])
def test_a_rank_that_computes_where_its_pace_is_unknown_may_take_minutes(clock, monkeypatch, share, stalls_after):
    """Merges of a tokenizer, or an index, between two steps; one that sleeps half of the time waits for something."""
    ran = (lambda native_id: None) if share is None else (lambda native_id: int(share * clock.now * 1e9))
    monkeypatch.setattr(room, "nanoseconds_busy", ran)
    progress = Progress()
    progress.phase_timeouts = {"batch-end": FIRST}
    _train(progress, clock, 100)
    mark(progress, "batch-end")
    began, stalled = clock.now, None
    while stalled is None:
        clock.now += 1.0
        stalled = progress.stall()
    assert clock.now - began == pytest.approx(stalls_after, abs=2.0)


def test_a_rank_that_computes_in_a_step_of_known_pace_stalls(clock, monkeypatch):
    monkeypatch.setattr(room, "nanoseconds_busy", lambda native_id: int(clock.now * 1e9))
    progress = Progress()
    _train(progress, clock, 100)
    assert_limit(progress, clock, FLOOR)


def test_the_user_may_say_when(clock):
    progress = Progress(hang_after=2.0)
    mark(progress, "checkpoint")
    clock.now += 2.5
    assert progress.stall().limit == 2.0


@pytest.fixture
def waiting():
    """A thread in a call of torch.distributed, by its stack, and the record that it keeps."""
    space, begun, done = {}, threading.Event(), threading.Lock()
    call = compile("def barrier(begun, done):\n    begun()\n    done.acquire(timeout=60)\n", _CALL, "exec")
    exec(call, space)

    def train():
        begun.progress = Progress()
        space["barrier"](begun.set, done)

    thread = threading.Thread(target=train)
    with done:
        thread.start()
        assert begun.wait(10)
        yield begun.progress
    thread.join()


_CALL = "/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize("point", ["epoch-end", "checkpoint", "batch-end"])
def test_who_waits_for_others_asks_early_once_a_batch_was_trained(clock, waiting, point):
    _train(waiting, clock, 1)
    mark(waiting, point)
    clock.now += FLOOR + 1
    assert waiting.stall().limit == FLOOR
    facts = waiting.facts()
    assert (facts.state, facts.limit) == ("stalled", FLOOR)
    assert facts.patience > FLOOR


def test_who_waits_before_that_does_not_since_communicators_are_built(clock, waiting):
    begin(waiting)
    mark(waiting, "epoch-end")
    clock.now += FLOOR + 1
    assert waiting.stall() is None


def test_who_waits_for_the_handle_of_a_transfer_asks_early_too(clock, monkeypatch):
    monkeypatch.setattr(room, "awaited_transfer", lambda thread: "recv")
    progress = Progress()
    _train(progress, clock, 1)
    mark(progress, "epoch-end")
    clock.now += FLOOR + 1
    assert progress.stall().limit == FLOOR


def test_who_is_busy_there_does_not(clock):
    progress = Progress()
    _train(progress, clock, 1)
    mark(progress, "epoch-end")
    clock.now += FLOOR + 1
    assert progress.stall() is None


def test_who_has_waited_long_before_asks_later(clock, waiting):
    _train(waiting, clock, 1)
    mark(waiting, "epoch-end")
    clock.now += 5
    _train(waiting, clock, 1)
    mark(waiting, "epoch-end")
    assert_limit(waiting, clock, FACTOR * 5)


@pytest.mark.parametrize("state", ["ended", "failed"])
def test_who_is_done_does_not_stall(clock, state):
    progress = Progress(hang_after=1.0)
    progress.state = state
    clock.now += 100
    assert progress.stall() is None


def test_facts_tell_the_last_points_in_order(clock):
    progress = Progress("r1")
    _train(progress, clock, 40)
    facts = progress.facts()
    assert len(facts.recent) <= RECENT
    assert [moment.point for moment in facts.recent[-3:]] == ["step", "backward", "data"]
    assert facts.recent[-1].batch == 39
    assert list(facts.recent) == sorted(facts.recent, key=lambda moment: moment.at)
    assert (facts.run, facts.stage, facts.point, facts.batch, facts.epoch) == ("r1", "train", "data", 39, 0)


def test_loaders_that_ended_are_kept_and_old_ones_forgotten():
    progress = Progress()
    for epoch in range(1000):
        progress.end_of_loader("train", 0, epoch, 21)
    ended = progress.facts().ended
    assert ended[-1].epoch == 999
    assert len(ended) <= room.KEPT_ENDS + 1


def test_it_does_not_grow():
    progress = Progress()
    for _ in range(100):
        mark(progress, "step")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for batch in range(100_000):
        mark(progress, "step", (batch, 0, batch))
        mark(progress, "data")
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 16_384


def test_a_rank_whose_work_between_steps_is_unknown_is_still_in_one_call(clock, monkeypatch):
    looks = []
    progress = Progress()
    progress.phase_timeouts = {**PHASE_TIMEOUTS, "batch-end": 60.0}
    progress.has_peers = True
    monkeypatch.setattr(progress._stillness, "look", lambda *, in_one_call, naps: looks.append(in_one_call) or 8.0)
    _train(progress, clock, 20)
    clock.now += 9.0
    assert progress.facts().still is None  # in a step, whose limit is known
    mark(progress, "batch-end", ENDED)
    clock.now += 9.0
    assert progress.facts().still == 8.0
    assert set(looks) == {True}

"""Where the time of steps goes, with clocks that tests set: medians, what is no step, the device, and no growth."""

import gc
import sys
import threading
from itertools import pairwise

import pytest

from doctor.monitor.telemetry.event_log import ENDED
from doctor.monitor.telemetry.step_clock import (
    GRADIENTS,
    KEPT,
    PAIRS,
    ROWS,
    WAITED,
    WINDOW,
    DeviceClock,
    StepClock,
)

ONE_STEP = (("forward", 0.01), ("backward", 0.1), ("optimizer", 0.2), ("batch-end", 0.03))


class Run:
    """A training loop on a clock of its own. ``points``: each is reached after the seconds given with it."""

    def __init__(self):
        self.steps = StepClock()
        self.now = 100.0
        self.begun = 0

    def begin(self):
        if self.steps.device is not None:
            self.steps.device.begin(self.begun)
        self.steps.take([(self.now, "step", (self.begun, 0, self.begun))])
        self.begun += 1

    def end(self, point="data"):
        self.steps.take([(self.now, point, ENDED)])
        if self.steps.device is not None:
            self.steps.device.end()

    def batch(self, points=ONE_STEP, rest=0.05, data=0.4):
        self.begin()
        for point, seconds in points:
            self.mark(point, seconds)
        self.now += rest
        self.end()
        self.now += data

    def mark(self, point, seconds):
        self.now += seconds
        self.steps.take([(self.now, point, None)])

    def windows(self):
        self.begin()  # closes the last row
        return self.steps.facts().windows


@pytest.fixture
def run():
    return Run()


def test_a_step_is_split_at_its_points(run):
    for _ in range(WINDOW):
        run.batch()
    (window,) = run.windows()
    assert (window.first_step, window.steps) == (0, WINDOW)
    assert (window.data, window.forward, window.backward, window.optimizer) == (0.4, 0.1, 0.2, 0.03)
    assert window.other == pytest.approx(0.01 + 0.05)
    assert window.total == pytest.approx(0.79)
    assert window.device is None


def test_gradients_are_those_of_the_batches_whose_passes_were_timed(run):
    for batch in range(WINDOW):
        if batch % 3 == 0:
            run.steps.timed.extend([(batch, GRADIENTS, 0.1), (batch, GRADIENTS, 0.05), (batch, WAITED, 0.01)])
        run.batch()
    (window,) = run.windows()
    assert window.gradients == pytest.approx(0.15)
    assert window.backward == 0.2
    assert window.waited == 0.01
    assert not run.steps.timed


def test_a_rare_long_wait_is_in_the_means(run):
    for batch in range(WINDOW):
        if batch == 7:
            run.steps.timed.append((batch, WAITED, 2.0))
        run.batch(rest=2.05 if batch == 7 else 0.05)
    (window,) = run.windows()
    other, waited = window.means[4:]
    assert (other, waited) == (pytest.approx(0.06 + 2.0 / WINDOW), 2.0 / WINDOW)


def test_gradients_that_were_not_timed_are_unknown(run):
    for _ in range(WINDOW):
        run.batch()
    assert run.windows()[0].gradients is None


def test_without_a_forward_point_it_is_what_lies_before_backward(run):
    for _ in range(WINDOW):
        run.batch(points=(("backward", 0.1), ("optimizer", 0.2)), rest=0.03, data=0.0)
    (window,) = run.windows()
    assert (window.forward, window.backward, window.optimizer, window.other) == (0.1, 0.2, 0.03, 0.0)


def test_what_follows_a_backward_pass_that_is_over_is_no_part_of_it(run):
    for _ in range(WINDOW):
        run.batch(points=(("backward", 0.1), ("step", 0.2), ("optimizer", 0.04)), rest=0.03, data=0.0)
    (window,) = run.windows()
    assert (window.forward, window.backward, window.optimizer, window.other) == (0.1, 0.2, 0.03, 0.04)


def test_what_other_callbacks_do_after_a_batch_is_no_waiting_either(run):
    for _ in range(WINDOW):
        run.batch(points=(), rest=0.3, data=0.0)
        run.mark("batch-end", 0.0)
        run.mark("data", 0.2)
        run.now += 0.1
    (window,) = run.windows()
    assert (window.data, window.other) == (0.1, 0.5)


def test_a_loop_that_tells_no_points_has_only_a_total(run):
    for _ in range(WINDOW):
        run.batch(points=(), rest=0.3, data=0.1)
    (window,) = run.windows()
    assert (window.forward, window.backward, window.optimizer) == (None, None, None)
    assert (window.data, window.other) == (0.1, 0.3)
    assert window.total == pytest.approx(0.4)


def test_the_optimizer_of_accumulated_batches_is_that_of_the_batches_that_had_one(run):
    for batch in range(WINDOW):
        steps_now = batch % 4 == 3
        points = (("forward", 0.0), ("backward", 0.1), *((("optimizer", 0.1),) if steps_now else ()))
        run.batch(points=points, rest=0.2 if steps_now else 0.1, data=0.0)
    (window,) = run.windows()
    assert window.optimizer == 0.2
    assert window.total == pytest.approx(0.2), "the median batch has no optimizer step"
    assert window.slowest == pytest.approx(0.4)


@pytest.mark.parametrize("after", [(), ("data",)], ids=["silence", "a data point"])
@pytest.mark.parametrize("point", ["validate", "checkpoint", "epoch-end"])
def test_what_happens_between_two_batches_is_no_waiting(run, point, after):
    for batch in range(WINDOW):
        run.batch(data=0.1)
        if batch % 2:
            run.mark(point, 0.0)
            for one in after:
                run.mark(one, 30.0)
            run.now += 30.0 if not after else 0.1
    (window,) = run.windows()
    assert window.data == (0.15 if after else 0.1), "half of the batches waited again after the point"
    assert window.total < 1.0
    assert window.slowest < 1.0


def test_validation_after_every_batch_leaves_no_certain_row_and_still_no_waiting(run):
    for _ in range(WINDOW):
        run.batch(data=0.1)
        run.mark("validate", 0.0)
        run.now += 5.0
    (window,) = run.windows()
    assert window.data == 0.1
    assert window.total == pytest.approx(0.49)


def test_a_checkpoint_within_a_batch_is_no_part_of_it(run):
    for _ in range(WINDOW):
        run.batch(points=(*ONE_STEP, ("checkpoint", 0.02)), rest=60.0)
    (window,) = run.windows()
    assert window.other == pytest.approx(0.01 + 0.02)
    assert window.total < 1.0


def test_points_before_the_first_batch_are_no_step(run):
    run.mark("epoch-start", 50.0)
    for _ in range(WINDOW):
        run.batch()
    assert run.windows()[0].slowest < 1.0


def test_a_window_appears_when_it_is_full(run):
    for _ in range(WINDOW - 1):
        run.batch()
    assert run.windows() == ()
    assert run.steps.facts().seen == WINDOW - 1


def test_windows_are_numbered_by_batches_and_the_oldest_are_forgotten(run):
    for _ in range(WINDOW * (KEPT + 7) + 3):
        run.batch()
    facts = run.steps.facts()
    assert [window.first_step for window in facts.windows] == list(range(7 * WINDOW, (KEPT + 7) * WINDOW, WINDOW))
    assert {window.backward for window in facts.windows} == {0.2}
    assert facts.seen == WINDOW * (KEPT + 7) + 3


def test_100_000_steps_take_no_more_memory(run):
    for _ in range(ROWS + 1):
        run.batch()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(100_000):
        run.batch()
    assert sys.getallocatedblocks() - before < 100


def test_facts_may_be_asked_for_while_the_training_thread_goes_on(run):
    stop = threading.Event()

    def train():
        while not stop.is_set():
            run.batch()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(100):
            windows = run.steps.facts().windows
            assert {(window.backward, window.data) for window in windows} <= {(0.2, 0.4)}
            assert all(one.first_step + WINDOW == two.first_step for one, two in pairwise(windows))
    finally:
        stop.set()
        thread.join()


class Device:
    """A device that does its work when told, and its events."""

    def __init__(self):
        self.now = 0.0
        self.done = True
        self.captures = False
        self.recorded = 0

    def make(self):
        return Event(self)

    def record(self, event):
        assert not self.captures
        event.at, self.recorded = self.now, self.recorded + 1

    def capturing(self):
        return self.captures


class Event:
    def __init__(self, device):
        self.device = device

    def query(self):
        assert not self.device.captures
        return self.device.done

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def device(run):
    device = Device()
    run.steps.device = DeviceClock(device)
    return device


def test_the_devices_own_time_is_in_seconds(run, device):
    for _ in range(WINDOW + 3):
        run.begin()
        device.now += 250.0
        run.end()
        device.now += 1000.0
        run.now += 0.3
    assert run.windows()[0].device == 0.25


def test_a_device_that_is_behind_is_read_later_and_never_waited_for(run, device):
    device.done = False
    for _ in range(PAIRS * 2):
        run.batch()
    assert device.recorded == 2 * PAIRS, "no event is used again before it was read"
    device.done = True
    for _ in range(PAIRS + 1):
        run.batch()
    assert device.recorded > 2 * PAIRS
    assert len(run.steps.device._under_way) == 1, "all that is done is read"


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(run, device):
    run.batch()
    device.captures = True
    run.batch()
    run.batch()
    device.captures = False
    run.batch()
    assert device.recorded == 4


def test_a_capture_within_a_batch_costs_one_reading_and_no_events(run, device):
    for _ in range(PAIRS * 2):
        run.begin()
        device.captures = True
        run.end()
        device.captures = False
    run.batch()
    run.batch()
    assert len(run.steps.device._free) == PAIRS - 1


def test_only_a_cuda_device_is_timed():
    torch = pytest.importorskip("torch")
    steps = StepClock()
    for device in (None, torch.device("cpu"), torch.device("meta"), torch.device("mps")):
        steps.use_device(device)
        assert steps.device is None


def test_a_window_that_was_read_shows_what_is_known_of_it_later():
    run = Run()
    for _ in range(WINDOW):
        run.batch()
    (before,) = run.windows()
    assert before.gradients is None
    run.steps.timed.extend((batch, GRADIENTS, 0.05) for batch in range(WINDOW))
    run.mark("forward", 0.01)
    assert run.steps.facts().windows[0].gradients == 0.05

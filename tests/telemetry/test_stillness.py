"""For how long a thread stands: a lock is still, a loop that computes is not."""

import subprocess
import sys
import threading
import time

import pytest

from doctor.monitor.telemetry.stacks.stillness import SHORT, Stillness

pytestmark = pytest.mark.real_time


def test_a_thread_in_a_lock_is_still():
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lock.acquire, daemon=True)
    thread.start()
    time.sleep(0.05)
    stillness = Stillness(thread.ident, thread.native_id)
    first, in_one_call = stillness.look(), Stillness(thread.ident, thread.native_id)
    in_one_call.look(in_one_call=True)
    time.sleep(0.3)
    assert first < 0.05
    assert stillness.look() >= 0.3
    assert in_one_call.look(in_one_call=True) >= 0.3
    lock.release()
    thread.join()


def test_a_thread_that_looks_for_something_again_and_again_is_not_in_one_call():
    stop = threading.Event()

    def work():
        while not stop.is_set():
            time.sleep(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    stillness = Stillness(thread.ident, thread.native_id)
    for _ in range(3):
        time.sleep(0.2)
        assert stillness.look(in_one_call=True) == 0.0
    stop.set()
    thread.join()


@pytest.mark.parametrize(("pause", "stands"), [(0.5, True), (0.02, False)])
def test_a_loop_of_naps_at_one_place_stands_and_one_that_is_woken_often_does_not(pause, stands):
    stop = threading.Event()

    def work():
        while not stop.is_set():
            time.sleep(pause)

    thread = threading.Thread(target=work)
    thread.start()
    stillness, found = Stillness(thread.ident, thread.native_id), 0.0
    for _ in range(8):
        time.sleep(0.2)
        found = max(found, stillness.look(in_one_call=True, naps=True))
    stop.set()
    thread.join()
    assert (found > 0.7) is stands


@pytest.mark.skipif(sys.version_info < (3, 11), reason="time.sleep() tells the kernel no end")
@pytest.mark.parametrize(("seconds", "stands"), [(20.0, False), (3600.0, True)])
def test_one_sleep_stands_if_it_takes_long(seconds, stands):
    thread = threading.Thread(target=time.sleep, args=(seconds,), daemon=True)
    thread.start()
    time.sleep(0.05)
    stillness = Stillness(thread.ident, thread.native_id)
    stillness.look(in_one_call=True, naps=True)
    time.sleep(SHORT + 0.3)
    assert (stillness.look(in_one_call=True, naps=True) > SHORT) is stands


def test_a_thread_that_polls_stands_and_one_that_computes_when_it_is_woken_does_not():
    stop = threading.Event()

    def work(numbers):
        while not stop.is_set():
            time.sleep(0.1)
            sum(range(numbers))

    threads = [threading.Thread(target=work, args=(numbers,)) for numbers in (1, 100_000)]
    for one in threads:
        one.start()
    both = [Stillness(one.ident, one.native_id) for one in threads]
    found = [0.0, 0.0]
    for _ in range(16):
        time.sleep(0.2)
        found = [max(most, one.look(in_one_call=True, naps=True)) for most, one in zip(found, both, strict=True)]
    stop.set()
    for one in threads:
        one.join()
    assert found[0] > 2.0 > found[1]


def test_a_thread_that_waits_for_a_process_until_a_timeout_stands():
    with subprocess.Popen(["sleep", "99"]) as child:
        thread = threading.Thread(target=child.wait, args=(60,), daemon=True)
        thread.start()
        time.sleep(0.5)  # until it looks in even intervals
        stillness, found = Stillness(thread.ident, thread.native_id), 0.0
        for _ in range(12):
            time.sleep(0.2)
            found = max(found, stillness.look(in_one_call=True, naps=True))
        child.kill()
        thread.join()
    assert found > 1.5


def test_a_loader_that_looks_at_its_workers_now_and_then_stands():
    """It waits for the first batch of a worker that sleeps; another thread that is woken as often prepares the run."""
    data = pytest.importorskip("torch.utils.data")
    rows = iter(data.DataLoader([0], num_workers=1, collate_fn=lambda rows: time.sleep(9)))

    def first_batch():
        while not rows._try_get_data(1.0)[0]:
            pass

    def naps():
        for _ in range(9):
            time.sleep(1)

    found = []
    threads = [threading.Thread(target=one, daemon=True) for one in (first_batch, naps)]
    for one in threads:
        one.start()
    time.sleep(1.5)
    both = [Stillness(one.ident, one.native_id) for one in threads]
    for _ in range(8):
        found = [one.look(in_one_call=True) for one in both]
        time.sleep(0.5)
    for one in threads:
        one.join()
    assert found[0] > 3.0
    assert found[1] < 2.0


def test_a_thread_of_which_nothing_is_known_is_not_in_one_call():
    stillness = Stillness(threading.get_ident(), 2**30)
    assert stillness.look(in_one_call=True) == stillness.look(in_one_call=True) == 0.0


def test_a_thread_that_computes_is_not():
    stop = threading.Event()

    def work():
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    stillness = Stillness(thread.ident, thread.native_id)
    stillness.look()
    began, until = time.monotonic(), time.process_time() + 1.0
    while time.process_time() < until:
        time.sleep(0.02)
    found, took = stillness.look(), time.monotonic() - began
    stop.set()
    thread.join()
    assert found < took

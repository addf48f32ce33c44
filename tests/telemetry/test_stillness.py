"""For how long a thread stands: a lock is still, a loop that computes is not."""

import threading
import time

from doctor.monitor.telemetry.stacks.stillness import Stillness


def test_a_thread_in_a_lock_is_still():
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lock.acquire, daemon=True)
    thread.start()
    time.sleep(0.05)
    stillness = Stillness(thread.ident)
    first = stillness.look()
    time.sleep(0.3)
    assert first < 0.05
    assert stillness.look() >= 0.3
    lock.release()
    thread.join()


def test_a_thread_that_computes_is_not():
    stop = threading.Event()

    def work():
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    stillness = Stillness(thread.ident)
    stillness.look()
    began, until = time.monotonic(), time.process_time() + 1.0
    while time.process_time() < until:
        time.sleep(0.02)
    found, took = stillness.look(), time.monotonic() - began
    stop.set()
    thread.join()
    assert found < took

"""Daemon threads: a start that can't succeed is an error, not a wait without end."""

from __future__ import annotations

import threading
import time

import pytest

from doctor.core import background


def test_a_thread_that_never_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the new thread has no memory to begin with: it ends before it can say that it has started."""
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    with monkeypatch.context() as patched:
        patched.setattr(threading, name, lambda *_, **__: None)
        patched.setattr(background, "START_SECONDS", 0.01)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            background.start_thread("doctor-test", print)
    for thread in [thread for thread in threading.enumerate() if thread.name == "doctor-test"]:
        del threading._limbo[thread]  # type: ignore[attr-defined]
    assert background.BackgroundCall(lambda: 7).result(30.0) == 7


def test_a_wake_up_ends_one_wait_and_is_not_lost() -> None:
    wake = background.WakeUp()
    assert not wake.wait(0.0)
    wake.set()
    wake.set()
    assert wake.wait(30.0)
    assert not wake.wait(0.01)
    began = time.monotonic()
    threading.Timer(0.05, wake.set).start()
    assert wake.wait(30.0)
    assert time.monotonic() - began < 20.0


def test_a_pending_call_has_one_result_for_all_that_wait() -> None:
    call, results = background.PendingCall(lambda: 7), []
    waiting = [threading.Thread(target=lambda: results.append(call.result(30.0))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    with pytest.raises(TimeoutError):
        call.result()
    with pytest.raises(TimeoutError):
        call.result(-1.0)
    assert not call.is_done
    call.run()
    for thread in waiting:
        thread.join(30.0)
    assert (results, call.result(), call.is_done) == ([7, 7, 7], 7, True)

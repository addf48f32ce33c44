"""Daemon threads: a start that can't succeed is an error, not a wait without end."""

from __future__ import annotations

import threading

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

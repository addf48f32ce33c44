"""What the tests of the adapters share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.integrations.recorded import RecordedSession


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedSession]]:
    """Runs are recorded instead of evaluated."""
    monkeypatch.setattr("doctor.monitor.integrations.adapter.WatchSession", RecordedSession)
    RecordedSession.made.clear()
    yield RecordedSession.made
    for session in RecordedSession.made:  # one that a test leaves open would trace the loaders of all later tests
        session.telemetry.close()
    RecordedSession.made.clear()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for a busy processor cost more than these models."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

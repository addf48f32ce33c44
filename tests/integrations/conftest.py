"""What the tests of the adapters share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.integrations.taped import Taped


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Taped]]:
    """Runs are put on tape in place of being judged."""
    monkeypatch.setattr("doctor.monitor.integrations.adapter.WatchSession", Taped)
    Taped.made.clear()
    yield Taped.made
    Taped.made.clear()


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

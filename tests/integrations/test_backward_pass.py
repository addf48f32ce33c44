"""Which part of backward passes counts as this rank's own: with a real wrapper, whose reduction is slow."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from doctor.monitor.integrations.backward_pass import LONG_WAIT, TIME_EVERY, GradientTimer, observe_backward
from doctor.monitor.telemetry.rank_telemetry import RankTelemetry

OWN, REDUCTION = 0.05, 0.1


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def telemetry() -> RankTelemetry:
    made = RankTelemetry()
    made.progress.has_peers = True
    return made


@pytest.fixture
def timed(telemetry: RankTelemetry, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, float]]]:
    """Batches and seconds of the passes that were timed."""
    noted: list[tuple[int, float]] = []
    monkeypatch.setattr(telemetry, "add_gradients", lambda *timed: noted.append(timed))
    timer = GradientTimer(telemetry)
    end = observe_backward(lambda root: time.monotonic() >= timer.due and timer.begin(root))
    yield noted
    end()


def _reduces_slowly(_: object, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    future: Any = torch.futures.Future()

    def reduce() -> None:
        time.sleep(REDUCTION)
        future.set_result(bucket.buffer())

    threading.Thread(target=reduce).start()
    return future


def _batches(telemetry: RankTelemetry, model: Any, count: int, passes: int = 1) -> Iterator[torch.Tensor]:
    for number in range(count):
        telemetry.train_batch_start(number, 0)
        for _ in range(passes):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            yield loss


@pytest.mark.usefixtures("group")
def test_the_reduction_of_a_wrapper_is_not_a_rank_s_own(
    telemetry: RankTelemetry, timed: list[tuple[int, float]]
) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model.register_comm_hook(None, _reduces_slowly)
    next(model.parameters()).register_hook(lambda _: time.sleep(OWN))
    began = time.monotonic()
    losses = list(_batches(telemetry, model, 6))
    lasted = time.monotonic() - began
    assert timed
    assert lasted >= 6 * (OWN + REDUCTION)
    assert not any(loss._backward_hooks for loss in losses)
    assert all(OWN <= seconds < OWN + REDUCTION for _, seconds in timed)


def test_every_pass_of_a_batch_is_timed_or_none(telemetry: RankTelemetry, timed: list[tuple[int, float]]) -> None:
    model, began = torch.nn.Linear(4, 1), time.monotonic()
    list(_batches(telemetry, model, 400, passes=3))
    lasted = time.monotonic() - began
    batches = [batch for batch, _ in timed]
    assert batches
    assert all(batches.count(one) == 3 for one in batches)
    assert len(set(batches)) <= lasted / TIME_EVERY + 2


def test_nothing_is_timed_in_a_run_of_one_rank(telemetry: RankTelemetry, timed: list[tuple[int, float]]) -> None:
    telemetry.progress.has_peers = False
    list(_batches(telemetry, torch.nn.Linear(4, 1), 4))
    assert not timed


def test_a_pass_within_another_one_is_part_of_it(telemetry: RankTelemetry) -> None:
    begun: list[object] = []
    end = observe_backward(begun.append)
    layer = torch.nn.Linear(4, 4)
    loss = checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=True).sum()
    loss.backward()
    end()
    assert begun == [loss]


def test_gradients_are_the_same_when_they_are_timed(telemetry: RankTelemetry, timed: list[tuple[int, float]]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    found = []
    for _ in _batches(telemetry, model, 2):
        found.append([one.grad for one in model.parameters() if one.grad is not None])
        model.zero_grad()
    assert [batch for batch, _ in timed] == [1]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_wait_for_others_is_timed_after_the_batches_that_are(
    telemetry: RankTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[int, float]] = []
    monkeypatch.setattr(telemetry, "add_wait", lambda *timed: waited.append(timed))
    timer = GradientTimer(telemetry)
    end = observe_backward(timer.begin)
    results = [
        timer.time_wait(lambda: time.sleep(0.02) or "the flag") for _ in _batches(telemetry, torch.nn.Linear(4, 1), 3)
    ]
    end()
    assert results == ["the flag"] * 3
    assert [batch for batch, seconds in waited if seconds >= 0.02] == [1]


def test_a_long_wait_for_others_is_timed_after_any_batch(
    telemetry: RankTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[int, float]] = []
    monkeypatch.setattr(telemetry, "add_wait", lambda *timed: waited.append(timed))
    timer = GradientTimer(telemetry)
    for number, _ in enumerate(_batches(telemetry, torch.nn.Linear(4, 1), 3)):
        timer.time_wait(functools.partial(time.sleep, 1.2 * LONG_WAIT if number == 2 else 0.0))
    assert [batch for batch, _ in waited] == [2]

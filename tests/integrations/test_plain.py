"""A loop without a framework: what ``doctor.watch`` tells the monitor."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, DistributedSampler

import doctor
from doctor.monitor.integrations.backward_pass import loss_of
from doctor.monitor.integrations.torch_state import torch_rank
from tests.integrations.recorded import RecordedSession

pytestmark = pytest.mark.usefixtures("recorded")


def _rows(batches: int) -> Any:
    return DataLoader(torch.arange(batches * 2), batch_size=2)


def test_training_with_a_validation_in_each_epoch() -> None:
    model = torch.nn.Linear(1, 1)
    train, validation = _rows(2), _rows(1)
    with doctor.watch() as w:
        w.model(model)
        for _ in range(2):
            for _ in w.loader(train):
                w.mark("backward")
                w.step(loss=torch.tensor(1.0))
                for _ in w.loader(validation, stage="validate"):
                    pass
    (run,) = RecordedSession.made

    def validated(passes: int) -> list[tuple[Any, ...]]:
        begin = [("stage_start", "validate"), ("epoch_start", "validate", passes)]
        batch = [("batch_start", "validate", 0, 0), ("batch_end", "validate")]
        end = [("loader_end", "validate", 0, True), ("epoch_end", "validate"), ("stage_end", "validate", "train")]
        return begin + batch + end

    def batch(number: int, passes: int) -> list[tuple[Any, ...]]:
        start = [("batch_start", "train", number, 0), ("mark", "backward")]
        return [*start, *validated(passes), ("batch_end", "train")]

    def epoch(number: int) -> list[tuple[Any, ...]]:
        batches = batch(0, number * 2) + batch(1, number * 2 + 1)
        return [("epoch_start", "train", number), *batches, ("loader_end", "train", 0, True), ("epoch_end", "train")]

    first, begin = [("open",), ("stage_start", "train"), ("check_start",)], ("stage_start", "train")
    assert run.calls == [*first, *epoch(0), begin, *epoch(1), ("close",)]
    assert run.telemetry.progress.step == 4
    facts = run.telemetry.training
    assert (facts.framework, facts.device, facts.strategy) == ("plain", "cpu", "Linear")
    assert [(one.stage, one.length, len(one.epochs)) for one in run.telemetry.loaders.facts().loaders] == [
        ("train", 2, 2),
        ("validate", 1, 4),
    ]
    run.telemetry.ended()
    assert run.telemetry.replica.facts().losses == 4


def test_a_loop_that_is_left_has_not_ended_its_loader() -> None:
    with doctor.watch() as w:
        for _ in w.loader(_rows(3)):
            for _ in w.loader(_rows(3), "validate"):
                break
            break
        assert RecordedSession.made[0].telemetry.progress.point == "epoch-end"
    ends = RecordedSession.made[0].said("loader_end", "stage_end")
    assert ends == [
        ("loader_end", "validate", 0, False),
        ("stage_end", "validate", "train"),
        ("loader_end", "train", 0, False),
    ]


def test_an_exception_passes_through() -> None:
    def divide() -> None:
        with doctor.watch() as w:
            for number in w.loader([1, 0]):
                1 / number

    with pytest.raises(ZeroDivisionError):
        divide()
    (run,) = RecordedSession.made
    assert run.calls[-1] == ("fail", "ZeroDivisionError")
    assert (run.telemetry.progress.stage, run.telemetry.progress.batch) == ("train", 1)
    assert run.telemetry.progress.failure is not None
    assert run.telemetry.progress.failure.frames[0].function == "divide"


def test_a_loader_that_raises_is_the_users_own() -> None:
    def broken() -> Any:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"), doctor.watch() as w:
        list(w.loader(broken()))
    assert RecordedSession.made[0].calls[-1] == ("fail", "OSError")


def test_a_watched_loader_is_like_the_loader() -> None:
    sampler: Any = DistributedSampler(range(8), num_replicas=2, rank=1)
    loader = DataLoader(torch.arange(8), batch_size=2, sampler=sampler)
    with doctor.watch() as w:
        watched = w.loader(loader)
        assert len(watched) == 2
        assert watched.sampler is sampler
        watched.sampler.set_epoch(3)
        assert [batch.tolist() for batch in watched] == [batch.tolist() for batch in loader]
        with pytest.raises(ValueError, match="training"):
            w.loader(loader, stage="training")
    (known,) = RecordedSession.made[0].telemetry.loaders.facts().loaders
    assert known.sampler is not None
    assert (known.sampler.replicas, known.sampler.rank, known.sampler.epoch) == (2, 1, 3)


def test_loaders_that_accelerate_prepared() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, train = accelerator.prepare(torch.nn.Linear(1, 1), _rows(2))
    with doctor.watch() as w:
        w.model(model)
        assert sum(1 for _ in w.loader(train)) == 2
    (known,) = RecordedSession.made[0].telemetry.loaders.facts().of("train")
    assert (known.kind, known.length, known.batch_size, known.epochs[0].samples) == ("map", 2, 2, 4)


def test_outside_of_with_loops_run_as_they_are() -> None:
    w = doctor.watch()
    w.model(None)
    assert list(w.loader([1, 2])) == [1, 2]
    w.step()
    assert RecordedSession.made == []


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, (0, 1)),
        ({"RANK": "1"}, (0, 1)),
        ({"WORLD_SIZE": "two", "RANK": "0"}, (0, 1)),
        ({}, (0, 1)),
    ],
)
def test_without_a_process_group_the_variables_tell(environ: dict[str, str], who: tuple[int, int]) -> None:
    found = torch_rank(environ)
    assert (found.rank, found.world_size) == who


def test_where_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with doctor.watch():
        pass
    with doctor.watch(dirpath=tmp_path / "elsewhere"):
        pass
    assert [run.directory for run in RecordedSession.made] == [tmp_path / "rankdoctor", tmp_path / "elsewhere"]


def test_each_backward_pass_is_marked_until_the_run_ends() -> None:
    original = torch.autograd.backward
    model, train = torch.nn.Linear(1, 1), _rows(2)
    with doctor.watch() as w:
        w.model(model)
        for rows in w.loader(train):
            model(rows[:, None].float()).sum().backward()
            thread = threading.Thread(target=model(rows[:, None].float()).sum().backward)
            thread.start()
            thread.join()
        if os.fork() == 0:
            model(torch.ones(1, 1)).sum().backward()
            os._exit(len(RecordedSession.made[0].said("mark")))
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 2  # not that of the child
    model(torch.ones(1, 1)).sum().backward()
    assert RecordedSession.made[0].said("mark") == [("mark", "backward")] * 2
    assert torch.autograd.backward is original


def test_a_wrapper_around_ours_stays_when_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    model = torch.nn.Linear(1, 1)
    with doctor.watch() as w:
        w.model(model)
        ours, calls = torch.autograd.backward, []
        torch.autograd.backward = lambda *given, **named: calls.append(ours(*given, **named))
    model(torch.ones(1, 1)).sum().backward()
    assert calls == [None]
    assert RecordedSession.made[0].said("mark") == []


def test_the_loss_of_a_backward_pass_is_that_of_its_batch() -> None:
    model = torch.nn.Linear(1, 1)
    with doctor.watch() as w:
        w.model(model)
        for number, rows in enumerate(w.loader(_rows(3))):
            loss = model(rows[:, None].float()).sum()
            (loss * float("nan") if number == 1 else loss).backward()
            w.step()
    telemetry = RecordedSession.made[0].telemetry
    telemetry.ended()
    found = telemetry.replica.facts()
    assert ([(one.step, one.what) for one in found.non_finite], found.losses) == (
        [(2, "loss")],
        3,
    )  # batches count from 1


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (torch.tensor(2.0), 2.0),
        ((torch.tensor([2.0]),), 2.0),
        (torch.ones(3), None),
        ((torch.tensor(2.0), torch.tensor(3.0)), None),
        (torch.tensor(2.0, dtype=torch.float16), None),
        (None, None),
    ],
    ids=["a number", "in a tuple", "three numbers", "two losses", "half precision", "nothing"],
)
def test_what_counts_as_the_loss(root: Any, expected: float | None) -> None:
    loss = loss_of(root)
    assert (None if loss is None else loss.item()) == expected

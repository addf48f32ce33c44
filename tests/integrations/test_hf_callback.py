"""What a Trainer of transformers tells the monitor. On two ranks: ``test_harmless.py``."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from doctor import HFDoctorCallback
from doctor.monitor.findings_error import Findings
from tests.integrations.recorded import RecordedSession, found

METRICS = {"doctor/step_seconds": 0.5}
pytestmark = pytest.mark.usefixtures("recorded")

BATCH = [("batch_start", "train"), ("mark", "backward"), ("batch_end", "train")]
STEP = [("batch_start", "train"), ("mark", "backward"), ("mark", "optimizer"), ("batch_end", "train")]
EVALUATED = [("batch_start", "validate"), ("batch_end", "validate")]


class Rows(Dataset[Any]):
    """Ten rows."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(4), "labels": torch.ones(1)}


class Net(torch.nn.Module):
    """As the Trainer wants a model to be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    def make(*callbacks: Any, **options: Any) -> Any:
        quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 5, "num_train_epochs": 1}
        arguments = TrainingArguments(str(tmp_path), **{**quiet, **sizes, **options})
        return Trainer(Net(), arguments, None, Rows(), Rows(), callbacks=[HFDoctorCallback(), *callbacks])

    return make


def _compact(run: RecordedSession) -> list[tuple[Any, ...]]:
    return [entry[:2] if entry[0] == "batch_start" else entry for entry in run.calls]


def test_epochs_with_evaluation_and_checkpoint(trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer(gradient_accumulation_steps=2, num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch").train()
    (run,) = RecordedSession.made

    def epoch(number: int) -> list[tuple[Any, ...]]:
        batches = [("epoch_start", "train", number), *[*BATCH, *STEP] * 2, *STEP, ("loader_end", "train", 0, True)]
        evaluation = [("stage_start", "validate"), ("epoch_start", "validate", number + 1), *EVALUATED * 2]
        end = [("loader_end", "validate", 0, True), ("epoch_end", "validate"), ("stage_end", "validate", "train")]
        saved = [("mark", "checkpoint"), ("mark", "batch-end")]
        return [*batches, ("epoch_end", "train"), *evaluation, *end, *saved]

    first, last = [("open",), ("stage_start", "train"), ("check_start",)], [("stage_end", "train"), ("close",)]
    assert _compact(run) == [*first, *epoch(0), *epoch(1), *last]
    assert run.telemetry.progress.step == 6
    assert run.directory == tmp_path / "rankdoctor"
    train, validation = run.telemetry.loaders.facts().loaders
    assert [epoch.batches for epoch in train.epochs] == [5, 5]
    assert train.epochs[0].drawn != train.epochs[1].drawn
    assert (validation.length, validation.batch_size) == (2, 5)


def test_evaluation_and_saving_within_an_epoch(trainer: Callable[..., Any]) -> None:
    trainer(max_steps=3, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3).train()
    (run,) = RecordedSession.made
    numbers = [entry[2] for entry in run.said("batch_start") if entry[1] == "train"]
    assert numbers == [0, 1, 2]
    assert run.said("loader_end")[-1] == ("loader_end", "train", 0, False)
    assert run.calls.count(("mark", "checkpoint")) == 1
    facts = run.telemetry.training
    assert (facts.framework, facts.max_steps, facts.world_size, facts.strategy) == ("transformers", 3, 1, None)
    assert facts.argument("max_steps") == "3"


class OwnReporter(TrainerCallback):
    """Keeps the doctor's metrics; a kind of callback that the doctor does not know."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Called with the Trainer's values, too."""
        if "doctor/step_seconds" in logs:
            self.kept.append((state.global_step, logs))


class Reporter(OwnReporter, TensorBoardCallback):
    """One of a known kind, which needs no TensorBoard."""

    def on_train_begin(self, *args: Any, **given: Any) -> None:
        """Open nothing."""

    on_train_end = on_train_begin


@pytest.mark.parametrize(("rank", "kept"), [(0, [(2, {"doctor/step_seconds": 0.5})]), (1, [])])
def test_rank_0_reports_the_metrics_of_a_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, kept: list[Any]
) -> None:
    monkeypatch.setattr(TrainingArguments, "process_index", rank)
    monkeypatch.setattr(RecordedSession, "metrics", lambda self: METRICS if self.telemetry.progress.step >= 2 else {})
    arguments = TrainingArguments(str(tmp_path), max_steps=4, report_to=[], use_cpu=True, per_device_train_batch_size=2)
    reporter, other = Reporter(), OwnReporter()
    Trainer(Net(), arguments, None, Rows(), callbacks=[HFDoctorCallback(every_n_steps=1), reporter, other]).train()
    assert (reporter.kept, other.kept) == (kept, [])


def test_an_evaluation_by_itself_is_a_run(trainer: Callable[..., Any]) -> None:
    trainer().evaluate()
    (run,) = RecordedSession.made
    assert run.calls[0] == ("open",)
    assert run.said("batch_start") == [("batch_start", "validate", 0, 0), ("batch_start", "validate", 1, 0)]
    assert run.calls[-1] == ("close",)


def test_an_exception_is_seen_where_it_leaves_the_program(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    before = sys.excepthook

    class Raising(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        trainer(Raising()).train()
    (run,) = RecordedSession.made
    assert run.calls[-1] == ("batch_end", "train")
    sys.excepthook(ValueError, caught.value, None)
    assert run.calls[-1] == ("fail", "ValueError")
    assert shown == [caught.value]
    assert sys.excepthook is before


def test_a_run_whose_exception_is_caught_is_over_when_the_interpreter_ends(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)

    class Raising(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ValueError("mine")

    before = sys.excepthook
    with pytest.raises(ValueError, match="mine"):
        trainer(Raising()).train()
    (told,) = at_exit
    told()
    assert RecordedSession.made[0].calls[-1] == ("close",)
    assert (at_exit, sys.excepthook) == ([], before)
    trainer(max_steps=1).train()
    assert at_exit == []


def test_findings_end_the_training(trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    monkeypatch.setattr(RecordedSession, "check_start", found)
    with pytest.raises(Findings, match="uneven"):
        trainer().train()
    (run,) = RecordedSession.made
    assert run.calls[-1] == ("close",)
    assert run.said("batch_start") == []
    assert sys.excepthook is before


def test_a_second_training_is_a_second_run(trainer: Callable[..., Any]) -> None:
    before, one = sys.excepthook, trainer(max_steps=1)
    one.train()
    one.train()
    assert [run.calls[-1] for run in RecordedSession.made] == [("close",), ("close",)]
    assert sys.excepthook is before

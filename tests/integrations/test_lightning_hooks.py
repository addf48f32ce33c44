"""What a Trainer tells the monitor, in every way to run one; judged by nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from doctor import DoctorCallback
from doctor.monitor.findings_error import Findings
from tests.integrations.recorded import RecordedSession, found

TRAIN_BATCH = [("mark", "data"), ("batch_start", "train"), ("mark", "backward")]
STEP = ("mark", "optimizer")
DONE = [("batch_end", "train")]

pytestmark = [
    pytest.mark.usefixtures("recorded"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    def make(kind: Any = Trainer, every_n_steps: int = 50, **options: Any) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        options = {"enable_checkpointing": False, "max_epochs": 1, **quiet, **options}
        callback = DoctorCallback(every_n_steps=every_n_steps)
        return kind(default_root_dir=tmp_path, accelerator="cpu", devices=1, callbacks=callback, **options)

    return make


def _rows(batches: int) -> Any:
    return DataLoader(RandomDataset(32, batches))


class Stream(IterableDataset[torch.Tensor]):
    """A stream of rows; ``said``: the length that it claims."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(self.rows, 32))


class Boasting(DataLoader[Any]):
    """Says that it has more batches than it gives."""

    def __len__(self) -> int:
        return 9


class Two(BoringModel):
    """Takes the first of what several loaders give, whatever way they are put together."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(next(part for part in _parts(batch) if part is not None), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(next(part for part in _parts(batch) if part is not None), batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().test_step(batch, batch_idx)


def _parts(batch: Any) -> list[Any]:
    if batch is None or isinstance(batch, torch.Tensor):
        return [batch]
    return [leaf for part in (batch.values() if isinstance(batch, dict) else batch) for leaf in _parts(part)]


def _compact(run: RecordedSession) -> list[tuple[Any, ...]]:
    return [entry[:2] if entry[0] == "batch_start" else entry for entry in run.calls]


def test_a_fit_with_validation_within_its_epoch(trainer: Callable[..., Any]) -> None:
    options = {"limit_train_batches": 4, "limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer(accumulate_grad_batches=2, enable_checkpointing=True, **options).fit(BoringModel())
    (run,) = RecordedSession.made

    def evaluation(stage: str, back_to: str | None) -> list[tuple[Any, ...]]:
        """One batch of it."""
        batches = [("epoch_start", stage, 0), ("batch_start", stage), ("batch_end", stage)]
        return [*batches, ("loader_end", stage, 0, False), ("epoch_end", stage), ("stage_end", stage, back_to)]

    validation = [("stage_start", "validate"), *evaluation("validate", "train"), ("mark", "checkpoint")]
    two_batches = [*TRAIN_BATCH, *DONE, *TRAIN_BATCH, STEP, *DONE]
    assert _compact(run) == [
        ("open",),
        ("stage_start", "sanity"),
        ("check_start",),
        *evaluation("sanity", None),
        ("stage_start", "train"),
        ("stage_start", "train"),
        ("check_start",),
        ("epoch_start", "train", 0),
        *two_batches,
        *validation,
        *two_batches,
        ("loader_end", "train", 0, False),
        *validation,
        ("epoch_end", "train"),
        ("stage_end", "train"),
        ("close",),
    ]
    progress = run.telemetry.progress
    assert (progress.facts().step, progress.epoch, progress.state) == (2, 0, "running")
    run.telemetry.replica.finish()
    assert run.telemetry.replica.facts().losses == 4


def test_optimisation_by_hand(trainer: Callable[..., Any]) -> None:
    trainer(limit_train_batches=2, limit_val_batches=0).fit(ManualOptimBoringModel())
    (run,) = RecordedSession.made
    assert _compact(run)[3:-4] == [("epoch_start", "train", 0), *[*TRAIN_BATCH, STEP, *DONE] * 2]
    assert run.telemetry.progress.facts().step == 2


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_by_itself(trainer: Callable[..., Any], stage: str) -> None:
    getattr(trainer(), stage)(Two(), [_rows(2), _rows(3)])
    (run,) = RecordedSession.made
    assert run.calls[:4] == [("open",), ("stage_start", stage), ("check_start",), ("epoch_start", stage, 0)]
    batches = [*[(0, 0), (1, 0)], *[(0, 1), (1, 1), (2, 1)]]
    assert [entry[2:] for entry in run.said("batch_start")] == batches
    assert run.calls.index(("loader_end", stage, 0, True)) < run.calls.index(("batch_start", stage, 0, 1))
    assert run.calls[-4:] == [
        ("loader_end", stage, 1, True),
        ("epoch_end", stage),
        ("stage_end", stage, None),
        ("close",),
    ]


@pytest.mark.parametrize(
    ("loader", "options", "ended"),
    [
        (lambda: _rows(4), {}, True),
        (lambda: _rows(4), {"limit_train_batches": 9}, True),
        (lambda: _rows(4), {"limit_train_batches": 3}, False),
        (lambda: _rows(4), {"limit_train_batches": 0.5}, False),
        (lambda: _rows(4), {"max_steps": 2, "max_epochs": -1}, False),
        (lambda: DataLoader(Stream(3)), {}, True),
        (lambda: DataLoader(Stream(3)), {"limit_train_batches": 5}, True),
        (lambda: DataLoader(Stream(3)), {"limit_train_batches": 2}, False),
        (lambda: Boasting(Stream(3)), {}, True),
    ],
)
def test_a_loader_that_ended_is_told_from_a_limit(
    trainer: Callable[..., Any], loader: Any, options: dict[str, Any], ended: bool
) -> None:
    trainer(limit_val_batches=0, **options).fit(BoringModel(), loader())
    (run,) = RecordedSession.made
    assert run.said("loader_end") == [("loader_end", "train", 0, ended)]
    (known,) = run.telemetry.loaders.facts().of("train")
    assert [epoch.ended for epoch in known.epochs] == [ended]
    assert known.limit == (2 if options.get("limit_train_batches") == 0.5 else _limit(options, known.length))


def _limit(options: dict[str, Any], length: int | None) -> int | None:
    limit = options.get("limit_train_batches")
    return None if limit is None or (length is not None and limit >= length) else limit


@pytest.mark.parametrize(
    ("mode", "seen", "ended"),
    [
        ("min_size", [2, 2], [True, False]),
        ("max_size_cycle", [3, 3], [True, True]),
        ("max_size", [2, 3], [True, True]),
    ],
)
def test_loaders_drawn_from_together(
    trainer: Callable[..., Any], mode: Any, seen: list[int], ended: list[bool]
) -> None:
    trainer(limit_val_batches=0).fit(Two(), CombinedLoader({"a": _rows(2), "b": [_rows(3)]}, mode))
    (run,) = RecordedSession.made
    known = run.telemetry.loaders.facts().of("train")
    assert [loader.combined for loader in known] == [mode, mode]
    assert [loader.epochs[0].batches for loader in known] == seen
    assert [loader.epochs[0].ended for loader in known] == ended


def test_parts_that_a_hook_has_put_together(trainer: Callable[..., Any]) -> None:
    class Joining(Two):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return torch.cat(_parts(batch))

    trainer(limit_val_batches=0).fit(Joining(), {"a": _rows(2), "b": _rows(2)})
    (run,) = RecordedSession.made
    assert [loader.epochs[0].batches for loader in run.telemetry.loaders.facts().of("train")] == [2, 2]


def test_a_late_validation_is_evaluated_before_it(trainer: Callable[..., Any]) -> None:
    late = trainer(max_epochs=2, check_val_every_n_epoch=2, limit_train_batches=1, limit_val_batches=1)
    late.num_sanity_val_steps = 0
    late.fit(BoringModel())
    (run,) = RecordedSession.made
    assert run.said("stage_start", "check_start") == [
        ("stage_start", "train"),
        ("check_start",),
        ("stage_start", "validate"),
        ("check_start",),
    ]


def test_loaders_that_are_made_anew(trainer: Callable[..., Any]) -> None:
    class Reloading(BoringModel):
        def train_dataloader(self) -> Any:
            return _rows(2 + self.current_epoch)

    trainer(max_epochs=2, limit_val_batches=0, reload_dataloaders_every_n_epochs=1).fit(Reloading())
    (run,) = RecordedSession.made
    (known,) = run.telemetry.loaders.facts().of("train")
    assert [(one.epoch, one.batches, one.ended) for one in known.epochs] == [(0, 2, True), (1, 3, True)]
    assert run.said("epoch_start") == [("epoch_start", "train", 0), ("epoch_start", "train", 1)]


def test_a_step_that_draws_by_itself(trainer: Callable[..., Any]) -> None:
    class Drawing(BoringModel):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, number, _ = next(dataloader_iter)
            return super().training_step(batch, number)

    trainer(limit_val_batches=0).fit(Drawing(), _rows(2))
    (run,) = RecordedSession.made
    batch = [("batch_start", "train"), ("mark", "backward"), STEP, *DONE]
    assert [entry for entry in _compact(run) if entry[0] in ("batch_start", "mark", "batch_end")][: len(batch)] == batch
    assert run.said("loader_end") == [("loader_end", "train", 0, True)]


def test_one_of_several_watches(trainer: Callable[..., Any]) -> None:
    one = trainer(limit_train_batches=1, limit_val_batches=0)
    one.callbacks.insert(0, DoctorCallback())
    one.fit(BoringModel())
    (run,) = RecordedSession.made
    assert run.calls.count(("batch_end", "train")) == 1


def test_a_run_resumed_within_an_epoch_knows_its_place(trainer: Callable[..., Any], tmp_path: Path) -> None:
    first = trainer(limit_val_batches=0, enable_checkpointing=True)
    first.callbacks.append(ModelCheckpoint(tmp_path, "three", every_n_train_steps=3))
    first.fit(BoringModel(), _rows(5))
    trainer(limit_val_batches=0).fit(BoringModel(), _rows(5), ckpt_path=tmp_path / "three.ckpt")
    run = RecordedSession.made[-1]
    assert run.said("epoch_start") == [("epoch_start", "train", 0)]
    assert [entry[2] for entry in run.said("batch_start")] == [3, 4]
    assert run.telemetry.progress.facts().step == 5


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_goes_where_it_was_going(trainer: Callable[..., Any], error: BaseException) -> None:
    class Raising(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise error

    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else type(error)):
        trainer(limit_val_batches=0).fit(Raising())
    (run,) = RecordedSession.made
    assert run.calls[-1] == ("fail", type(error).__name__)
    assert run.telemetry.progress.failure is not None
    assert (run.telemetry.progress.stage, run.telemetry.progress.point) == ("train", "step")


def test_findings_end_the_run(trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedSession, "check_start", found)
    with pytest.raises(Findings, match="uneven"):
        trainer(limit_val_batches=0).fit(BoringModel())
    (run,) = RecordedSession.made
    assert run.calls[-1] == ("close",)
    assert run.said("batch_start", "fail") == []


def test_every_call_of_the_trainer_is_a_run_of_its_own(trainer: Callable[..., Any]) -> None:
    one, model = trainer(limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=0), BoringModel()
    one.fit(model)
    one.fit_loop.max_epochs = 2
    one.fit(model)
    one.test(model, _rows(1))
    assert [run.calls[0] for run in RecordedSession.made] == [("open",)] * 3
    assert [run.calls[-1] for run in RecordedSession.made] == [("close",)] * 3
    assert [run.said("epoch_start")[0] for run in RecordedSession.made] == [
        ("epoch_start", "train", 0),
        ("epoch_start", "train", 1),
        ("epoch_start", "test", 2),
    ]
    assert "_on_before_fetch" not in vars(one.fit_loop.epoch_loop)


def test_our_numbers_stand_beside_the_runs_own(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedSession, "metrics", lambda _: {"doctor/findings": 2.0})

    class Logging(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", float(batch_idx))
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path)
    one = trainer(logger=logger, limit_train_batches=4, limit_val_batches=0, log_every_n_steps=2, every_n_steps=2)
    one.fit(Logging())
    rows = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert rows[0] == "doctor/findings,epoch,loss,step"
    assert rows[1:] == ["2.0,,,1", ",0,1.0,1", "2.0,,,3", ",0,3.0,3"]
    assert set(one.callback_metrics) == {"loss"}


def test_the_trainer_tells_what_it_is(trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer(limit_train_batches=1, limit_val_batches=0.5, max_epochs=2).fit(BoringModel())
    (run,) = RecordedSession.made
    facts = run.telemetry.training
    assert (facts.framework, facts.strategy, facts.device, facts.mixed) == ("lightning", "single_device", "cpu", None)
    assert (facts.world_size, facts.data_parallel_rank, facts.data_parallel_size) == (1, 0, 1)
    told = {"max_epochs": "2", "limit_train_batches": "1", "limit_val_batches": "0.5"}
    assert {one.name: one.value for one in facts.arguments} == told
    assert run.directory == tmp_path / "rankdoctor"


def test_the_other_lightning_and_a_callback_of_this_one(trainer: Callable[..., Any], tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    boring = pytest.importorskip("pytorch_lightning.demos.boring_classes")
    one = trainer(other.Trainer, limit_train_batches=1, limit_val_batches=0, enable_checkpointing=True)
    one.callbacks.append(Timer())
    one.fit(boring.BoringModel())
    (run,) = RecordedSession.made
    facts = run.telemetry.training
    assert (facts.framework, facts.release) == ("pytorch_lightning", other.__version__)
    assert facts.mixed == "Timer of lightning with the Trainer of pytorch_lightning"
    assert facts.checkpoints == str(tmp_path / "checkpoints")
    assert run.calls[-1] == ("close",)

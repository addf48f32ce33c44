"""No thread of ours outlives a run, and one that is blocked is left behind within a bound."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doctor import watch
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.store import KeyValueStore
from doctor.core.background import join_threads, start_thread
from tests.lab.sample import long_only


@pytest.fixture(autouse=True)
def _earlier() -> Iterator[None]:
    """Threads that tests before this one left, as those that play ranks within one process do, are not of this one."""
    EARLIER.update(threading.enumerate())
    yield
    EARLIER.clear()


LIKE_PREDICT = long_only("predict, which runs no training either, is run")
EARLIER: set[threading.Thread] = set()


def ours() -> set[str]:
    """Names of the doctor's threads that are alive."""
    return {thread.name for thread in {*threading.enumerate()} - EARLIER if thread.name.startswith("doctor-")}


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from doctor import DoctorCallback

    def run(door: str = "fit", model: Any = None) -> None:
        trainer = Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            callbacks=DoctorCallback(),
            fast_dev_run=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        getattr(trainer, door)(model or BoringModel())

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "door", ["fit", *(pytest.param(door, marks=LIKE_PREDICT) for door in ("validate", "test")), "predict"]
)
def test_none_is_left_when_the_trainer_returns(fit: Callable[..., Any], door: str) -> None:
    for _ in range(4):
        fit(door)
        assert ours() == set()


@pytest.mark.filterwarnings("ignore")
def test_none_is_left_after_an_exception(fit: Callable[..., Any]) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Breaks(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fit(model=Breaks())
    assert ours() == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("search", ["LearningRateFinder", "BatchSizeFinder"])
def test_a_search_that_fails_ends_the_run_with_its_exception(search: str, tmp_path: Path) -> None:
    """The search replaces the callbacks of the Trainer, which then calls ``on_exception`` of none of ours."""
    from lightning.pytorch import Trainer, callbacks
    from lightning.pytorch.demos.boring_classes import BoringModel
    from torch.utils.data import DataLoader

    from doctor import DoctorCallback

    class Breaks(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.learning_rate, self.batch_size, self.steps = 1e-3, 2, 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            if self.steps > 2:
                raise ValueError("planted")
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return DataLoader(super().train_dataloader().dataset, batch_size=self.batch_size)

    trainer = Trainer(
        accelerator="cpu",
        callbacks=[getattr(callbacks, search)(), DoctorCallback(dirpath=tmp_path / "of the doctor")],
        default_root_dir=tmp_path,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=1,
    )
    before = trainer.strategy
    with pytest.raises(ValueError, match="planted"):
        trainer.fit(Breaks())
    assert ours() == set()
    assert "on_exception" not in vars(before)
    report = json.loads((tmp_path / "of the doctor" / "report.json").read_text())
    assert [one["id"] for one in report["results"] if one["findings"] and one["id"] == "RUN004"] == ["RUN004"]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_none_is_left_by_a_plain_loop(tmp_path: Path, error: type[BaseException] | None) -> None:
    def loop() -> None:
        with watch(dirpath=tmp_path) as w:
            for _ in w.loader([1, 2, 3]):
                w.step()
                if error is not None:
                    raise error

    for _ in range(5):
        if error is None:
            loop()
        else:
            with pytest.raises(error):
                loop()
        assert ours() == set()


def test_none_is_left_while_another_run_goes_on(tmp_path: Path) -> None:
    with watch(dirpath=tmp_path / "outer") as outer:
        for _ in outer.loader([1]):
            during = ours()
            with watch(dirpath=tmp_path / "inner") as inner:
                assert [*inner.loader([1])] == [1]
            assert "doctor-watchdog" in during
    assert ours() == set()


def test_a_board_joins_its_thread(tmp_path: Path) -> None:
    board = KeyValueStore(FileStoreBackend(tmp_path, "key"))
    board.set("name", b"data")
    before = threading.active_count()
    board.close()
    assert threading.active_count() == before - 1


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    """A thread that ends once this is set."""
    restore = threading.Event()
    thread = start_thread(f"doctor-blocked-{id(restore)}", restore.wait)
    yield restore
    restore.set()
    thread.join()


def test_a_blocked_thread_is_left_behind_and_named_once(blocked: threading.Event) -> None:
    said: list[str] = []
    join_threads(0.05, said.append)
    join_threads(0.05, said.append)
    [line] = said
    assert f"doctor-blocked-{id(blocked)} is blocked at " in line
    assert "threading.py" in line


def test_none_is_left_by_a_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from doctor import HFDoctorCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return {"loss": self.layer(x).square().mean()}

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    rows = [{"x": torch.ones(4)}] * 32
    for _ in range(3):
        transformers.Trainer(
            model=Net(), args=arguments, train_dataset=rows, callbacks=[HFDoctorCallback(tmp_path)]
        ).train()
        assert ours() == set()

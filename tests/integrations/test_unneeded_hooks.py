"""Hooks that the Trainer does not call for the callback, and what the run learns without them."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call

from doctor import DoctorCallback
from tests.integrations.recorded import RecordedSession

pytestmark = [
    pytest.mark.usefixtures("recorded"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
EACH_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
STEP = ["data", "backward", "optimizer"]
FIRST_COUNTED, COUNTED, MOST_CALLS = 20, 40, 19
"""The batch from which calls are counted, batches, and functions of ours that are called in each of them, besides those
that trace the first samples of a pass."""


def _fit(folder: Path, *callbacks: Callback, model: Any = None, **options: Any) -> Any:
    options = {"limit_train_batches": 3, "limit_val_batches": 0, "num_sanity_val_steps": 0, **options}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_checkpointing=False,
        callbacks=[*callbacks],
        **quiet,
        **options,
    )
    trainer.fit(model or BoringModel())
    return trainer


def _marks() -> list[str]:
    (run,) = RecordedSession.made
    return [entry[1] for entry in run.said("mark")]


@pytest.mark.parametrize("model", [BoringModel, ManualOptimBoringModel])
def test_a_trainer_calls_only_the_hooks_of_a_batch(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doctor.monitor.integrations.lightning.callback import LightningHooks

    called: list[str] = []
    for name in (*EACH_STEP, "on_train_batch_start", "on_train_batch_end"):
        hook = vars(LightningHooks)[name]
        monkeypatch.setattr(hook, "_hook", _noting(called, hook._hook))
    trainer = _fit(tmp_path, DoctorCallback(), model=model())
    assert called == ["on_train_batch_start"]  # the first one shows that nothing is lost without it
    assert _marks() == STEP * 3
    assert _numbers() == [0, 1, 2]
    assert _ends() == 3
    replaced = {"pre_backward", "_after_closure", "on_batch_start", "_on_before_fetch", "run"}
    loop = trainer.fit_loop.epoch_loop
    loops = (loop, loop.automatic_optimization, loop.manual_optimization)
    for owner in (trainer.strategy.precision_plugin, trainer._logger_connector, *loops):
        assert not replaced & {*vars(owner)}


def test_a_step_calls_few_functions_of_ours(tmp_path: Path) -> None:
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("doctor.") and not module.endswith(".sample_trace"):
            called.append(f"{module}.{frame.f_code.co_name}")

    class Counting(BoringModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == FIRST_COUNTED:
                sys.setprofile(note)

        def on_train_end(self) -> None:
            sys.setprofile(None)

    _fit(tmp_path, DoctorCallback(), model=Counting(), limit_train_batches=FIRST_COUNTED + COUNTED)
    each_step = {name: calls for name in {*called} if (calls := called.count(name)) >= COUNTED - 1}
    assert sum(each_step.values()) <= MOST_CALLS * COUNTED, each_step


def test_another_number_of_the_batch_keeps_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_TrainingEpochLoop, "batch_idx", property(lambda loop: loop.batch_progress.current.completed))
    _fit(tmp_path, DoctorCallback())
    assert _numbers() == [1, 2, 3]  # as the hook is told by this loop


def test_validation_within_an_epoch_is_no_batch_of_it(tmp_path: Path) -> None:
    _fit(tmp_path, DoctorCallback(), limit_train_batches=4, limit_val_batches=2, val_check_interval=2)
    assert _numbers() == [0, 1, 2, 3]
    assert _numbers("validate") == [0, 1] * 2


def _noting(called: list[str], hook: Any) -> Any:
    def noted(*args: Any) -> None:
        called.append(hook.__name__)
        hook(*args)

    return noted


def _ends() -> int:
    (run,) = RecordedSession.made
    return len(run.said("batch_end"))


def _numbers(stage: str = "train") -> list[int]:
    (run,) = RecordedSession.made
    return [entry[2] for entry in run.said("batch_start") if entry[1] == stage]


def test_a_program_that_calls_the_hooks_of_all_callbacks_finds_them(tmp_path: Path) -> None:
    class Calling(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            for callback in self.trainer.callbacks:
                callback.on_before_backward(self.trainer, self, outputs["loss"])
                callback.on_after_backward(self.trainer, self)
                callback.on_before_optimizer_step(self.trainer, self, None)
                callback.on_before_zero_grad(self.trainer, self, None)
            return outputs

    _fit(tmp_path, DoctorCallback(), model=Calling())
    assert _marks() == ["data", "backward", "optimizer", "backward", "optimizer"] * 3


def test_a_plugin_that_calls_no_method_of_lightnings_keeps_the_hooks(tmp_path: Path) -> None:
    class Own(Precision):
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            def stepping() -> Any:
                result = closure()
                call._call_callback_hooks(model.trainer, "on_before_optimizer_step", optimizer)
                return result

            return optimizer.step(closure=stepping, **kwargs)

    _fit(tmp_path, DoctorCallback(), plugins=[Own()])
    assert _marks() == STEP * 3


def test_a_trainer_that_does_not_look_gets_the_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlooking(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        for callback in trainer.callbacks:
            getattr(callback, hook_name)(trainer, trainer.lightning_module, *args, **kwargs)

    monkeypatch.setattr(call, "_call_callback_hooks", unlooking)
    _fit(tmp_path, DoctorCallback())
    assert _marks() == STEP * 3


def test_a_subclass_has_its_own_hooks_called(tmp_path: Path) -> None:
    class Mine(DoctorCallback):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[str] = []

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            super().on_after_backward(trainer, pl_module)
            self.called.append("after")

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            self.called.append("before")

    callback = Mine()
    _fit(tmp_path, callback)
    assert callback.called == ["before", "after"] * 3
    assert _marks() == STEP * 3


def test_a_batch_counts_once_if_a_subclass_calls_our_hooks(tmp_path: Path) -> None:
    class Mine(DoctorCallback):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Any] = []

        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *batch: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, *batch)
            self.losses.append(outputs["loss"])

    callback = Mine()
    _fit(tmp_path, callback)
    assert len(callback.losses) == 3
    assert _numbers() == [0, 1, 2]
    assert _ends() == 3


def test_a_loop_that_calls_another_method_keeps_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doctor.monitor.integrations.lightning.lightning_run.RUN_BATCH", "absent")
    _fit(tmp_path, DoctorCallback())
    assert _ends() == 3


def test_the_batch_ends_before_other_callbacks_work(tmp_path: Path) -> None:
    ends: list[int] = []

    class Other(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            ends.append(_ends())

    _fit(tmp_path, Other(), DoctorCallback())
    assert ends == [1, 2, 3]


def test_it_travels_after_a_run(tmp_path: Path) -> None:
    callback = DoctorCallback()
    _fit(tmp_path, callback)
    for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert "_unneeded" not in vars(twin)
        assert callable(twin.on_after_backward)

"""Hooks that the Trainer does not call for the callback, and what the run learns without them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
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


def _fit(folder: Path, *callbacks: Callback, model: Any = None, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=0,
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
    for name in EACH_STEP:
        hook = vars(LightningHooks)[name]
        monkeypatch.setattr(hook, "_hook", lambda *_, name=name: called.append(name))
    trainer = _fit(tmp_path, DoctorCallback(), model=model())
    assert called == []
    assert _marks() == STEP * 3
    plugin = trainer.strategy.precision_plugin
    assert not {"pre_backward", "_after_closure"} & {*vars(plugin)}


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


def test_it_travels_after_a_run(tmp_path: Path) -> None:
    callback = DoctorCallback()
    _fit(tmp_path, callback)
    for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert "_unneeded" not in vars(twin)
        assert callable(twin.on_after_backward)

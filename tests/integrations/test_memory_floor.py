"""Trainers tell the floor of their memory before the first step; where they can't, nothing is claimed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DeepSpeedStrategy

from doctor import DoctorCallback
from doctor.monitor.integrations.lightning.trainer_facts import trainer_memory_lower_bound
from tests.integrations.recorded import RecordedSession

PARAMETERS = (32 * 2 + 2) * 4
"""Bytes of the parameters of Lightning's BoringModel."""

pytestmark = [
    pytest.mark.usefixtures("recorded"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Adamant(BoringModel):
    """Trains with AdamW."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _trainer(tmp_path: Path) -> Any:
    return Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
        callbacks=DoctorCallback(),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def test_a_fit(tmp_path: Path) -> None:
    _trainer(tmp_path).fit(Adamant())
    (run,) = RecordedSession.made
    assert run.telemetry.memory.facts().estimated_floor == 4 * PARAMETERS
    assert run.telemetry.memory.facts().estimate_error is None, "there is no peak of a CPU"


def test_an_evaluation_holds_no_gradients(tmp_path: Path) -> None:
    _trainer(tmp_path).validate(Adamant())
    (run,) = RecordedSession.made
    assert run.telemetry.memory.facts().estimated_floor is None


def test_buckets_of_ddp_count_unless_gradients_lie_in_them() -> None:
    module = Adamant()

    class DistributedDataParallel:
        """As torch's is called."""

        gradient_as_bucket_view = False

    wrapper = DistributedDataParallel()
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=wrapper), optimizers=[module.configure_optimizers()])
    assert trainer_memory_lower_bound(trainer, module) == 5 * PARAMETERS
    wrapper.gradient_as_bucket_view = True
    assert trainer_memory_lower_bound(trainer, module) == 4 * PARAMETERS


def test_deepspeed_keeps_the_numbers_in_buffers_of_its_own() -> None:
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    assert trainer_memory_lower_bound(SimpleNamespace(strategy=strategy, optimizers=[]), Adamant()) is None


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from doctor import HFDoctorCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": (logits - labels).square().mean(), "logits": logits}

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        max_steps=2,
        optim="adamw_torch",
    )
    rows = [{"x": torch.ones(4), "labels": torch.ones(1)}] * 8
    transformers.Trainer(Net(), arguments, None, rows, callbacks=[HFDoctorCallback()]).train()
    (run,) = RecordedSession.made
    assert run.telemetry.memory.facts().estimated_floor == 4 * 5 * 4

"""Trainings that leave a trace of everything a doctor might disturb; as a program, on two ranks of this machine.

``python twins.py FOLDER``: each kind of run once with the doctor and once without, ranks forked after one import;
writes ``FOLDER/<kind>-<watched>-<rank>.json``.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from tests.lab.forked_ranks import play_ranks
from tests.lab.ports import free_port

ROWS, BATCH = 24, 2


class Noisy(Dataset[torch.Tensor]):
    """Rows that depend on every source of random numbers that there is."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(8) + random.random() + np.random.rand() + index


class Net(LightningModule):
    """Small, with dropout, statistics of batches, and metrics that are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean() + random.random() + float(np.random.rand())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("score", self.layers(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(folder: Path, callbacks: list[Any], *, workers: int = 0, **options: Any) -> dict[str, Any]:
    """What a training leaves behind. Both twins use one folder, the second after the first: checkpoints name it."""
    seed_everything(7, verbose=False)
    checkpoints = ModelCheckpoint(folder / "checkpoints", save_top_k=-1, every_n_train_steps=3)
    trainer = Trainer(
        accelerator="cpu",
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        default_root_dir=folder,
        logger=CSVLogger(folder, version=0),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints, *callbacks],
        **{"max_epochs": 2, "val_check_interval": 0.5, **options},
    )
    model = Net()
    trainer.fit(model, *[DataLoader(Noisy(), BATCH, shuffle=shuffle, num_workers=workers) for shuffle in (True, False)])
    traces = {
        **random_state(),
        "parameters": digest(*[tensor.numpy().tobytes() for tensor in model.state_dict().values()]),
        "step": trainer.global_step,
        "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "threads": threads(),
    }
    if trainer.global_rank == 0:
        saved = sorted((folder / "checkpoints").iterdir())
        traces["checkpoints"] = {path.name: digest(path.read_bytes()) for path in saved}
        traces["logged"] = logged(Path(trainer.logger.log_dir, "metrics.csv"))
    return traces


def random_state() -> dict[str, str]:
    """Of all generators of this process."""
    return {
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
        "numpy": digest(repr(np.random.get_state()).encode()),
        "python": digest(repr(random.getstate()).encode()),
    }


def threads() -> list[str]:
    """Those of the doctor that outlive the training."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("doctor-")]


def digest(*parts: bytes) -> str:
    """Of all parts."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def logged(path: Path) -> list[dict[str, str]]:
    """What the run itself has logged: rows and columns without the doctor's."""
    with path.open() as file:
        rows = [
            {name: text for name, text in row.items() if "doctor/" not in name and text} for row in csv.DictReader(file)
        ]
    return [row for row in rows if set(row) - {"step"}]


def train_transformer(folder: Path, callbacks: list[Any]) -> dict[str, Any]:
    """The same of a Trainer of transformers."""
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    transformers.utils.logging.set_verbosity_error()
    transformers.set_seed(7)
    special = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8, **special))
    arguments = TrainingArguments(
        str(folder / "trained"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks
    )
    trainer.train()
    clocks = ("runtime", "per_second")
    history = [
        {name: value for name, value in entry.items() if not name.endswith(clocks)}
        for entry in trainer.state.log_history
    ]
    return {
        **random_state(),
        "parameters": digest(*[tensor.numpy().tobytes() for tensor in model.state_dict().values()]),
        "step": trainer.state.global_step,
        "logged": history,
        "threads": threads(),
    }


class Tokens(Dataset[Any]):
    """Rows of tokens that are drawn anew each time."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 16, (4,))
        return {"input_ids": tokens, "labels": tokens}


def _fit_ddp(folder: Path, watched: bool) -> dict[str, Any]:
    from doctor import DoctorCallback

    callbacks = [DoctorCallback(folder / "doctor", every_n_steps=2)] if watched else []
    return fit(folder, callbacks, workers=1, max_epochs=1, devices=2, strategy="ddp")


def _train_transformer_ddp(folder: Path, watched: bool) -> dict[str, Any]:
    from doctor import HFDoctorCallback

    return train_transformer(folder, [HFDoctorCallback(folder / "doctor", every_n_steps=2)] if watched else [])


KINDS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "lightning": _fit_ddp,
    "transformers": _train_transformer_ddp,
}


def _rank(kind: str, watched: bool, rank: int, port: int, folder: Path) -> None:
    """What a forked process does."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_PORT": f"{port}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    traces = KINDS[kind](folder / kind, watched)
    (folder / f"{kind}-{watched}-{rank}.json").write_text(json.dumps(traces))


def _pair(kind: str, watched: bool, folder: Path) -> None:
    """Two ranks. The folder that they share is moved away afterwards: its name must be the same for both twins."""
    port = free_port()
    if not play_ranks(2, lambda rank: _rank(kind, watched, rank, port, folder)):
        raise SystemExit(f"{kind}, watched: {watched}: a rank failed")
    (folder / kind).rename(folder / f"{kind}-{watched}")


def main() -> None:
    """All kinds, each once with the doctor and once without."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for kind in sys.argv[2:]:
        for watched in (False, True):
            _pair(kind, watched, folder)


if __name__ == "__main__":
    main()

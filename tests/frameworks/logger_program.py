"""A training with a logger of Lightning or Transformers, and what the logger kept of the doctor's metrics.

``python -m tests.frameworks.logger_program FOLDER LOGGER SECONDS`` trains for so long. It prints as JSON what was
handed to the logger (by Lightning: what a CSVLogger kept) and what it kept: pairs of step and value for each metric. A
logger is read back with its own package.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NEEDS = {"csv": "lightning", "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
NEEDS |= {f"transformers-{name}": NEEDS[name] for name in ("tensorboard", "mlflow", "wandb")}
"""The package that each logger needs besides the framework."""
PREFIXES = ("doctor/", "train/doctor/")
"""Transformers puts ``train/`` before the names of TensorBoard and W&B (``rewrite_logs``)."""
STEP = 0.05
"""Seconds of a step."""

Kept = dict[str, list[tuple[int, float]]]


def make_csv(folder: Path) -> Any:
    """Return Lightning's own logger, which writes a table."""
    from lightning.pytorch.loggers import CSVLogger

    return CSVLogger(folder)


def read_csv(logger: Any) -> Iterator[tuple[str, int, float]]:
    """Yield metric, step and value."""
    with Path(logger.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield from ((name, int(row["step"]), float(value)) for name, value in row.items() if value)


def make_tensorboard(folder: Path) -> Any:
    """Return a logger that writes event files."""
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(folder)


def read_tensorboard(logger: Any) -> Iterator[tuple[str, int, float]]:
    """Read the event files."""
    yield from read_event_files(logger.log_dir)


def read_event_files(folder: str) -> Iterator[tuple[str, int, float]]:
    """Read them with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in events.Scalars(name))


def make_mlflow(folder: Path) -> Any:
    """Return a logger that writes to MLflow's database in the folder."""
    from lightning.pytorch.loggers import MLFlowLogger

    return MLFlowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=str(folder / "artifacts"))


def read_mlflow(logger: Any) -> Iterator[tuple[str, int, float]]:
    """Ask the store of the run."""
    yield from read_mlflow_run(logger.experiment, logger.run_id)


def read_mlflow_run(client: Any, run: str) -> Iterator[tuple[str, int, float]]:
    """Ask the store with MLflow's own client."""
    for name in client.get_run(run).data.metrics:
        yield from ((name, one.step, one.value) for one in client.get_metric_history(run, name))


def make_wandb(folder: Path) -> Any:
    """Return a logger that writes what ``wandb sync`` would send."""
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(save_dir=folder, offline=True)


def read_wandb(logger: Any) -> Iterator[tuple[str, int, float]]:
    """Read the transaction log of the run."""
    yield from read_wandb_log(Path(logger.experiment.dir).parent)


def read_wandb_log(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Read the transaction log in the folder of a run with the package's own messages."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service may write the end of the log after ``finish``
    (log,) = folder.glob("*.wandb")
    for data in _records(log.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            pairs = [("/".join(one.nested_key) or one.key, one.value_json) for one in record.history.item]
            row = {name: json.loads(value) for name, value in pairs}
            step = row.get("trainer/global_step", row.get("train/global_step"))
            yield from ((name, step, value) for name, value in row.items() if isinstance(value, (int, float)))


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md),
    after the header of 7 bytes that wandb writes. Of a record in several parts, all but the last say so."""
    at, parts = _HEADER, []
    while len(log) - at >= _HEADER:
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # filled with zeros
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        parts.append(log[at + _HEADER : at + _HEADER + length])
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts = []


_HEADER, _BLOCK, _WHOLE, _LAST = 7, 32_768, 1, 4

LOGGERS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Iterator[tuple[str, int, float]]]]] = {
    "csv": (make_csv, read_csv),
    "tensorboard": (make_tensorboard, read_tensorboard),
    "mlflow": (make_mlflow, read_mlflow),
    "wandb": (make_wandb, read_wandb),
}


def train(folder: Path, seconds: float, loggers: list[Any]) -> None:
    """Train a tiny model for so many seconds with the doctor's callback."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from doctor import DoctorCallback

    class Paced(BoringModel):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(STEP)
            return super().training_step(batch, batch_idx)

    model: LightningModule = Paced()
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_time={"seconds": seconds},
        logger=loggers,
        default_root_dir=folder,
        callbacks=[DoctorCallback()],
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model)


def train_transformers(folder: Path, seconds: float, name: str) -> Kept:
    """Train a tiny model with a Trainer that reports to ``name``; return what was handed to the reporter."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    from doctor import HFDoctorCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            time.sleep(STEP)
            return {"loss": (self.layer(x) - labels).square().mean()}

    handed: list[tuple[str, int, float]] = []
    reporter = INTEGRATION_TO_CALLBACK[name]
    on_log = reporter.on_log

    def recorded(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        handed.extend((metric, state.global_step, value) for metric, value in logs.items())
        on_log(self, args, state, control, logs=logs, **given)

    class Deadline(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = time.monotonic() > end

    reporter.on_log = recorded
    rows = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]
    arguments = TrainingArguments(
        str(folder), report_to=[name], use_cpu=True, disable_tqdm=True, save_strategy="no", num_train_epochs=10_000
    )
    end = time.monotonic() + seconds
    Trainer(Net(), arguments, None, rows, callbacks=[HFDoctorCallback(), Deadline()]).train()
    return kept_by(iter(handed))


def kept_by_transformers(folder: Path, name: str) -> Iterator[tuple[str, int, float]]:
    """Return what the reporter wrote below the folder."""
    if name == "tensorboard":
        (events,) = folder.rglob("events.out.tfevents.*")
        return read_event_files(str(events))
    if name == "wandb":
        (log,) = folder.glob("wandb/offline-run-*/*.wandb")
        return read_wandb_log(log.parent)
    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments()
    (run,) = client.search_runs([experiment.experiment_id])
    return read_mlflow_run(client, run.info.run_id)


def kept_by(rows: Iterator[tuple[str, int, float]]) -> Kept:
    """Return the doctor's metrics by name, in the order of the steps."""
    kept: Kept = {}
    for name, step, value in rows:
        if name.startswith(PREFIXES):
            kept.setdefault(name.removeprefix("train/"), []).append((step, value))
    return {name: sorted(kept[name]) for name in sorted(kept)}


def main(folder: str, name: str, seconds: str) -> None:
    """Train and print what the table and the logger kept."""
    os.environ |= {"WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    framework, _, reporter = name.rpartition("-")
    if framework:
        os.environ |= {
            "WANDB_MODE": "offline",
            "WANDB_DIR": folder,
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        }
        os.environ |= {"TENSORBOARD_LOGGING_DIR": f"{folder}/runs"}
        handed = train_transformers(Path(folder), float(seconds), reporter)
        print(json.dumps({"handed": handed, "kept": kept_by(kept_by_transformers(Path(folder), reporter))}))
        return
    make, read = LOGGERS[name]
    table, logger = make_csv(Path(folder, "table")), make(Path(folder))
    train(Path(folder), float(seconds), [table, logger])
    print(json.dumps({"handed": kept_by(read_csv(table)), "kept": kept_by(read(logger))}))


if __name__ == "__main__":
    main(*sys.argv[1:])

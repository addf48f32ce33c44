"""Where a run writes its checkpoints: made by the Trainer itself, or not on this host's file systems at all."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doctor.collectors.storage.mounts import local_path

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/runs", "/data/runs"),
        ("runs", "runs"),
        ("file:///data/runs", "/data/runs"),
        ("local:///data/runs", "/data/runs"),
        ("memory://bucket/run1", None),
        ("s3://bucket/run1", None),
        ("gs://bucket/run1", None),
        ("simplecache::s3://bucket/run1", None),
        ("hdfs://host:8020/run1", None),
    ],
)
def test_which_urls_are_local(url: str, path: str | None) -> None:
    assert local_path(url) == path


def test_fsspec_agrees() -> None:
    fsspec = pytest.importorskip("fsspec")
    for url in ("/data/runs", "runs", "file:///data/runs", "s3://bucket/runs", "simplecache::s3://bucket/runs"):
        is_local = fsspec.utils.get_protocol(url) in ("file", "local")
        assert (local_path(url) is not None) == is_local


def _fit(folder: Path, root: str, **options: Any) -> dict[str, Any]:
    """The result of HOST004 after a healthy run that an error would have ended."""
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from doctor import DoctorCallback

    callback = DoctorCallback(folder / "doctor", on_error="raise")
    options["callbacks"] = [callback, *options.get("callbacks", ())]
    trainer = Trainer(
        default_root_dir=root,
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, **options},
    )
    trainer.fit(BoringModel())
    assert trainer.checkpoint_callback.best_model_path
    report = json.loads((folder / "doctor" / "report.json").read_text())
    return next(result for result in report["results"] if result["id"] == "HOST004")


def _elsewhere(folder: Path) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    return CSVLogger(folder / "logs")


@pytest.mark.parametrize("root", ["{new}/a/b", "file://{new}", "memory://{unique}/run1"])
@pytest.mark.parametrize("logger", [None, _elsewhere])
def test_a_root_that_is_not_there_yet_or_not_local(
    tmp_path: Path, root: str, logger: Callable[[Path], Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = root.format(new=tmp_path / "new", unique=uuid.uuid4().hex)
    result = _fit(tmp_path, place, logger=logger(tmp_path) if logger else False)
    assert (result["status"], result["findings"]) == ("pass", [])


@pytest.mark.parametrize("path", ["{new}/checkpoints", "memory://{unique}/checkpoints"])
def test_a_directory_of_the_checkpoint_callback(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    monkeypatch.chdir(tmp_path)
    place = path.format(new=tmp_path / "new", unique=uuid.uuid4().hex)
    result = _fit(tmp_path, str(tmp_path), callbacks=[callbacks.ModelCheckpoint(place)])
    assert (result["status"], result["findings"]) == ("pass", [])


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, in which nobody may make a directory")
def test_a_root_that_cannot_be_made_is_still_found(tmp_path: Path) -> None:
    findings = pytest.importorskip("doctor.monitor.findings_error")
    pytest.importorskip("lightning.pytorch")
    with pytest.raises(findings.Findings, match="HOST004"):
        _fit(tmp_path, "/proc/self/runs")

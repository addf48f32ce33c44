"""A run with the doctor is the run without it: the same numbers, whatever is broken in the doctor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from doctor import DoctorCallback
from doctor.monitor.integrations.hook_guard import SWITCH
from tests.integrations.recorded import RECORDED, RecordedSession
from tests.integrations.twins import fit
from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twins") / "run"


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What is left of the run without the doctor."""
    return _fit(folder)


def _fit(folder: Path, *callbacks: Any, workers: int = 0) -> dict[str, Any]:
    try:
        return fit(folder, list(callbacks), workers=workers, devices=1)
    finally:
        shutil.rmtree(folder)


def test_a_run_on_one_device_with_data_workers(folder: Path, tmp_path: Path) -> None:
    alone = _fit(folder, workers=2)
    assert alone["step"] == 12
    assert len(alone["checkpoints"]) == 4
    assert _fit(folder, DoctorCallback(tmp_path, every_n_steps=2), workers=2) == alone
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["job"]["world_size"] == 1
    assert [result for result in report["results"] if result["status"] == "crash"] == []


def test_a_clock_that_tests_replace_is_not_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a monitor of the user's own have ``time.perf_counter`` return a list of times, one for each call."""
    readers: list[str] = []

    def replaced(clock: Any) -> Any:
        def read(*arguments: Any) -> Any:
            readers.append(sys._getframe(1).f_globals["__name__"])
            return clock(*arguments)

        return read

    for name in ("monotonic", "perf_counter", "time", "sleep", "process_time", "thread_time", "time_ns"):
        monkeypatch.setattr(time, name, replaced(getattr(time, name)))
    _fit(folder, DoctorCallback(tmp_path, every_n_steps=2))
    assert [one for one in readers if one.startswith("doctor")] == []


def test_switched_off_it_does_nothing(
    folder: Path, alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    assert _fit(folder, DoctorCallback(tmp_path / "doctor")) == alone
    assert not (tmp_path / "doctor").exists()


@pytest.mark.parametrize(
    "part", [*RECORDED, "open", "check_start", "close", "metrics", "loaders.record_batch", "replica.attach"]
)
def test_whatever_breaks_in_it_the_run_goes_on(
    folder: Path,
    alone: dict[str, Any],
    part: str,
    recorded: list[RecordedSession],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _break(part, monkeypatch)
    assert _fit(folder, DoctorCallback(every_n_steps=2)) == alone
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rankdoctor: ")]
    assert len(said) <= 1
    once_a_run = (
        "check_start",
        "close",
        "replica.attach",
        "stage_start",
        "stage_end",
        "epoch_start",
        "epoch_end",
        "loader_end",
    )
    assert said or part in once_a_run


def _break(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{part} is broken")

    if part in ("open", "check_start", "close", "metrics"):
        monkeypatch.setattr(RecordedSession, part, broken)
        return
    made = RecordedSession.__init__

    def make(self: RecordedSession, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        *path, name = ("telemetry", *part.split("."))
        owner: Any = self
        for step in path:
            owner = getattr(owner, step)
        setattr(owner, name, broken)

    monkeypatch.setattr(RecordedSession, "__init__", make)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of two ranks have left their traces."""
    folder = tmp_path_factory.mktemp("pairs")
    kinds = ["lightning", *(["transformers"] if find_spec("transformers") else [])]
    program = [sys.executable, str(ROOT / "tests" / "integrations" / "twins.py"), str(folder), *kinds]
    environ = {**clean_environ(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=patience(110), env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "disabled" not in done.stderr
    return folder


@pytest.mark.parametrize("kind", ["lightning", "transformers"])
def test_two_ranks(kind: str, pairs: Path) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    for rank in range(2):
        watched, alone = (json.loads((pairs / f"{kind}-{one}-{rank}.json").read_text()) for one in (True, False))
        assert watched == alone
        assert (pairs / f"{kind}-True" / "doctor" / f"rank-{rank}.json").is_file()
    report = json.loads((pairs / f"{kind}-True" / "doctor" / "report.json").read_text())
    assert report["coverage"]["ranks_seen"] == 2
    loud = [
        finding["summary"]
        for result in report["results"]
        for finding in result["findings"]
        if finding["severity"] != "info"
    ]
    assert loud == []


@pytest.fixture(scope="module")
def plain_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where loops of the user's own have left their traces, on two ranks."""
    import torch.distributed.fsdp

    folder = tmp_path_factory.mktemp("plain-pairs")
    kinds = ["plain_ddp"]
    kinds += ["fsdp2"] if hasattr(torch.distributed.fsdp, "fully_shard") else []
    kinds += ["accelerated"] if find_spec("accelerate") else []
    program = [sys.executable, str(ROOT / "tests" / "integrations" / "plain_twins.py"), str(folder), *kinds]
    environ = {**clean_environ(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=patience(300), env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "disabled" not in done.stderr
    return folder


@pytest.mark.parametrize("kind", ["plain_ddp", "fsdp2", "accelerated"])
def test_two_ranks_of_a_loop_of_the_users_own(kind: str, plain_pairs: Path) -> None:
    """The random state of Python too: nothing that the doctor imports was loaded before."""
    if not (plain_pairs / f"{kind}-True-0.json").is_file():
        pytest.skip(f"{kind} needs a newer torch, or accelerate")
    for rank in range(2):
        watched, alone = (json.loads((plain_pairs / f"{kind}-{one}-{rank}.json").read_text()) for one in (True, False))
        assert watched == alone
    report = json.loads((plain_pairs / f"{kind}-doctor" / "report.json").read_text())
    assert report["coverage"]["ranks_seen"] == 2
    loud = [one["summary"] for result in report["results"] for one in result["findings"] if one["severity"] != "info"]
    assert loud == []

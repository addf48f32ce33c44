"""The examples of uneven batches do what their words say, on two ranks of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lab.needs import ROOT, clean_environ
from tests.lab.sample import long_only
from tests.lab.speed import patience

pytest.importorskip("lightning.pytorch")

EXAMPLES = ROOT / "examples"
STARTED = "All distributed processes registered"


@contextmanager
def _started(name: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example in a session of its own, of which nothing is left."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environ = {**clean_environ(folder), "OMP_NUM_THREADS": "1"}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, **pipe) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "name",
    [
        "uneven_batches.py",
        pytest.param("uneven_batches_without_log.py", marks=long_only("the example with a log is run")),
    ],
)
def test_the_doctor_says_so_before_the_first_batch(name: str, tmp_path: Path) -> None:
    with _started(name, tmp_path) as process:
        said, _ = process.communicate(timeout=patience(100))
    assert process.returncode == 1, said
    assert "training loader has 21 batches on rank 1, but 20 on rank 0" in said
    assert "has trained" not in said
    report = json.loads((tmp_path / "rankdoctor" / "report.json").read_text())
    assert report["primary"] == "DATA001"
    assert report["job"]["world_size"] == 2


def test_without_the_doctor_they_hang(tmp_path: Path) -> None:
    with _started("uneven_batches.py", tmp_path, "--without-doctor") as process:
        assert process.stdout is not None
        assert any(STARTED in line for line in process.stdout)
        ranks = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        assert len(ranks) == 2
        while _seconds_of_work(ranks, within=2.0) > 0.1:
            assert process.poll() is None


def _seconds_of_work(processes: list[psutil.Process], within: float) -> float:
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(within)
    return float(sum(sum(process.cpu_times()[:2]) for process in processes) - before)

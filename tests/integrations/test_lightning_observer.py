"""Lightning's launcher, which ends rank 0 where a process that it started has failed: the doctor has its word first."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from doctor.monitor.integrations.lightning.lightning_run import ENDS_ALL, LightningRun


class Observed(_ChildProcessObserver):
    """Looks at once, and ends nobody."""

    def __init__(self, children: list[Any], told: list[str]) -> None:
        super().__init__(os.getpid(), children, sleep_period=0)
        self.told = told

    def _terminate_all(self) -> None:
        self.told.append("ends all")


def run() -> LightningRun:
    """One whose Trainer and loops are not asked for anything."""
    epoch_loop = SimpleNamespace(batch_progress=None)
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), fit_loop=SimpleNamespace(epoch_loop=epoch_loop), global_rank=0
    )
    telemetry = SimpleNamespace(note=None)
    return LightningRun(SimpleNamespace(telemetry=telemetry), trainer, None)  # type: ignore[arg-type]


def test_the_doctor_hears_before_all_are_ended() -> None:
    told: list[str] = []
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
    child.wait(30)
    observer = Observed([child], told)
    own = run()
    names = [observer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("threading.enumerate", lambda: names)
        own.watch_children(lambda: told.append("judged"))
        observer._run()
        assert told == ["judged", "ends all"]
        own.restore_after_close()
    assert ENDS_ALL not in vars(observer)
    observer._run()
    assert told == ["judged", "ends all", "ends all"]

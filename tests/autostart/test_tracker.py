"""Jobs of two ranks with a loop that Accelerate prepared: our tracker has them watched, once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

from tests.autostart.test_jobs import PROGRAMS, TORCHRUN, findings, job, report_in
from tests.lab.sample import long_only


def tracked(folder: Path, kind: str, *, options: tuple[str, ...] | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    return job(folder, *TORCHRUN, str(PROGRAMS / "tracked.py"), str(folder), kind, options=options)


def test_the_numbers_are_those_of_the_job_without_it(tmp_path: Path) -> None:
    """Accelerate calls trackers on the main process only; the other rank is watched all the same."""
    traces = []
    for kind in ("bare", "plain"):
        folder = tmp_path / kind
        done = tracked(folder, kind)
        assert done.returncode == 0, done.stderr[-3000:]
        traces.append([json.loads((folder / f"trace-{rank}.json").read_text()) for rank in range(2)])
    assert traces[0] == traces[1]
    report = report_in(tmp_path / "plain/own")
    assert findings(report) == {}
    record = json.loads((tmp_path / "plain/own/rank-1.json").read_text())
    assert "steps" in json.dumps(record)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("hang", "RUN001"),
        ("slow", "RUN003"),
        pytest.param("crash", "RUN004", marks=long_only("doctor run has it, too")),
    ],
)
def test_a_fault_of_one_rank_is_named(kind: str, check: str, tmp_path: Path) -> None:
    done = tracked(tmp_path, kind)
    assert (done.returncode == 0) == (kind == "slow"), done.stderr[-3000:]
    assert findings(report_in(tmp_path / "own"))[check]["ranks"] == [1]
    assert check in done.stderr


def test_below_doctor_run_it_is_watched_once(tmp_path: Path) -> None:
    done = tracked(tmp_path, "plain", options=("--folder", "run", "--"))
    assert done.returncode == 0, done.stderr[-3000:]
    report_in(tmp_path / "run")
    assert not (tmp_path / "own").exists()


def test_a_program_that_watches_itself_is_watched_once(tmp_path: Path) -> None:
    done = tracked(tmp_path, "edited")
    assert done.returncode == 0, done.stderr[-3000:]
    report_in(tmp_path / "edited")
    assert not (tmp_path / "own/report.json").exists()


def test_without_a_right_option_it_is_not_made() -> None:
    from doctor import DoctorTracker

    with pytest.raises(ValueError, match="on_hang"):
        DoctorTracker(on_hang="stop")


def test_switched_off_it_changes_nothing(tmp_path: Path) -> None:
    code = """
import torch, sys
save, init = torch.save, torch.nn.parallel.DistributedDataParallel.__init__
from doctor import DoctorTracker
assert DoctorTracker().tracker is None
assert (torch.save, torch.nn.parallel.DistributedDataParallel.__init__) == (save, init)
"""
    done = job(tmp_path, "env", "DOCTOR_DISABLE=1", sys.executable, "-c", code, options=None)
    assert done.returncode == 0, done.stderr

"""Captures that were recorded once are judged by this release as they were by the one that recorded them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.faults.record import TARGET
from tests.faults.stage import DOCTOR, diagnose, run_shell


def test_eight_h100_are_healthy() -> None:
    outcome = diagnose(TARGET)
    assert outcome.alarms() == {}
    assert outcome.crashed() == []
    assert outcome.code == 0
    assert outcome.report["verdict"] == "pass"
    assert outcome.report["coverage"]["checks"]["pass"] > 60
    assert outcome.report["coverage"]["ranks_seen"] == 8
    assert outcome.report["job"]["launcher"] == "torchrun"


def test_the_recording_is_small_and_names_nobody() -> None:
    text = TARGET.read_text()
    assert len(text) < 300_000
    here = (str(Path.home()), str(Path(__file__).parents[2]), os.uname().nodename + '"')
    assert [word for word in here if word in text] == []


def test_one_changed_rank_is_found(tmp_path: Path) -> None:
    document = json.loads(TARGET.read_text())
    document["ranks"][5]["facts"]["environment"]["variables"].append({"name": "CUDA_VISIBLE_DEVICES", "value": "0,0"})
    (changed := tmp_path / "changed.json").write_text(json.dumps(document))
    outcome = diagnose(changed)
    assert outcome.code == 1
    assert [finding["ranks"] for finding in outcome.findings("GPU003")] == [[5]]


def test_a_recording_differs_from_itself_in_nothing(tmp_path: Path) -> None:
    done = run_shell(f"{DOCTOR} diff {TARGET} {TARGET} --format json", tmp_path)
    assert done.returncode == 0, done.stdout

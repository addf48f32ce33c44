"""Replicas in loops of the user's own: compared at equal steps of the optimizer, however many batches a rank takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.lab.needs import ROOT
from tests.lab.speed import patience

PROGRAM = Path(__file__).with_name("replica_loops.py")
HEALTHY = {
    "micro_batches_by_rank": "pass",
    "early_break": "pass",
    "token_budget": "pass",
    "uncounted": "pass",
    "uncounted_micro_batches": "unknown",
    "counted_on_rank_0": "pass",
    "long_micro_batches": "pass",
}
SLOW = ("slow_rank", "slow_rank_accumulating")
LOCAL = ("averages",)
APART = {"skipped": [0, 1], "skipped_once_uncounted": [0, 1], "never_steps": [1], "other_checkpoint": [0, 1]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *HEALTHY, *SLOW, *LOCAL, *APART],
        cwd=ROOT,
        env=environ,
        timeout=patience(300),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def _result(runs: Path, name: str, check: str = "RUN007") -> dict[str, Any]:
    report = json.loads((runs / name / "report.json").read_text())
    return next(result for result in report["results"] if result["id"] == check)


def _truth(runs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((runs / name / f"truth-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("name", "status"), HEALTHY.items())
def test_equal_replicas_are_never_called_different(runs: Path, name: str, status: str) -> None:
    one, two = _truth(runs, name)
    assert one["truth"] == two["truth"]
    result = _result(runs, name)
    assert (result["status"], result["findings"]) == (status, [])
    assert _result(runs, name, "RUN003")["findings"] == []


@pytest.mark.parametrize(("name", "ranks"), APART.items())
def test_different_replicas_are_found(runs: Path, name: str, ranks: list[int]) -> None:
    one, two = _truth(runs, name)
    assert one["truth"] != two["truth"]
    [finding] = _result(runs, name)["findings"]
    assert (finding["severity"], finding["ranks"]) == ("error", ranks)


@pytest.mark.parametrize("name", LOCAL)
def test_ranks_that_step_by_themselves_are_not_said_to_diverge(runs: Path, name: str) -> None:
    one, two = _truth(runs, name)
    assert one["truth"] != two["truth"]
    result = _result(runs, name)
    assert (result["status"], result["findings"]) == ("unknown", [])


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_rank_is_found_by_what_the_others_wait(runs: Path, name: str) -> None:
    assert _result(runs, name)["findings"] == []
    [finding] = _result(runs, name, "RUN003")["findings"]
    assert finding["ranks"] == [1]
    parts = finding["evidence"]["seconds_a_step_by_rank"]["1"]
    assert parts["own"] <= parts["step"]
    assert parts["others_wait"] >= 0.5 * parts["excess"]


def test_nothing_is_left_behind_on_two_ranks(runs: Path) -> None:
    for name in (*HEALTHY, *LOCAL, *APART):
        for left in _truth(runs, name):
            assert (left["threads"], left["random"]) == ([], Random(1).random())

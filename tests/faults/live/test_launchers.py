"""What scenes of one job do not show: how long a verdict takes, jobs side by side, rounds, labelled lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.live.launcher_scenes import BEHIND_CGROUPS
from tests.faults.live.launchers import JOB_NAME, TWO_ROUNDS, TWO_STEPS, TWO_TORCHRUNS
from tests.faults.live.rank_scenes import BY_FOLDER, BY_STORE, BY_TORCHRUN
from tests.faults.live.scenes import LiveScene
from tests.faults.live.stage import Outcome, Play, Ranks, at_this_speed, perform, ranks
from tests.lab.sample import ALL, long_only
from tests.lab.slurm import SlurmCluster
from tests.lab.speed import patience

OVERTIME = 2.0
"""Seconds that a verdict may take beyond ``--timeout``, on a machine that has nothing else to do."""
NOISE = 5.0
"""Seconds more, on one that has."""


SAMPLE = (
    "a rank killed and one stopped, after their hello",
    "rank 0 stopped: the next one reports",
)
"""Ways of ranks to be lost: one that is not rank 0, and rank 0. tests/cluster/test_lost_processes.py stops and kills
the host of a store."""
LEFT_OUT = pytest.mark.skip(reason=f"10 s: {len(SAMPLE)} such scenes are played; DOCTOR_LONG_TESTS=1 plays all")


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(scene, id=scene.name, marks=() if ALL or scene.name in SAMPLE else LEFT_OUT)
        for scene in (*BY_FOLDER, *BY_STORE, *BY_TORCHRUN)
    ],
)
def test_verdict_in_time(scene: LiveScene) -> None:
    report = perform(scene.faulty).report
    assert (report is None) == (not scene.is_judged)
    if report is not None:
        assert report.report["seconds"] <= at_this_speed(scene.faulty).timeout + patience(OVERTIME + NOISE)


def started_on(port: str, **odd: str) -> tuple[Ranks, Ranks]:
    """A job of one rank on each of two hosts, started directly; ``odd`` for the second one."""
    common = {"WORLD_SIZE": "2", "MASTER_PORT": port}
    return ranks(0, RANK="0", **common), ranks(1, RANK="1", **common, **odd)


ODD = {"NCCL_SOCKET_IFNAME": "eth9"}
PAIRS = (ranks(0), ranks(1), ranks(0), ranks(1, **ODD))
SIDE_BY_SIDE = {
    "started directly": Play(2, (*started_on("29500"), *started_on("29501", **ODD)), way="store"),
    "torchrun": Play(2, PAIRS, launcher=TWO_TORCHRUNS),
    "steps of one SLURM job": Play(2, PAIRS, launcher=TWO_STEPS, way="store"),
}
"""Two jobs at once on two hosts; the second rank of the second one has a wrong setting."""


def reports(outcome: Outcome) -> list[dict[str, Any]]:
    """All that were printed, the healthy ones first."""
    printed = [json.loads(one.stdout) for one in outcome.said if one.stdout]
    return sorted(printed, key=lambda report: report["exit_code"])


def blamed(report: dict[str, Any], check: str) -> list[list[int]]:
    """The ranks of each finding of a check."""
    [result] = [result for result in report["results"] if result["id"] == check]
    return [finding["ranks"] for finding in result["findings"]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=long_only("jobs started otherwise are run") if name == "torchrun" else ())
        for name in SIDE_BY_SIDE
    ],
)
def test_jobs_side_by_side_keep_apart(name: str) -> None:
    outcome = perform(SIDE_BY_SIDE[name])
    assert sorted(code for _, code in outcome.codes) == [0, 0, 1, 1], str(outcome)
    healthy, faulty = reports(outcome)
    for report in (healthy, faulty):
        assert report["coverage"]["ranks_seen"] == report["coverage"]["ranks_expected"] == 2
        assert [host["ranks"] for host in report["job"]["hosts"]] == [[0], [1]]
    assert (healthy["verdict"], blamed(healthy, "NET007")) == ("pass", [])
    assert (faulty["primary"], blamed(faulty, "NET007")) == ("NET007", [[1]])


def test_every_round_of_torchrun_gathers_anew() -> None:
    outcome = perform(Play(2, (ranks(0), ranks(1, **ODD)), launcher=TWO_ROUNDS))
    assert sorted(outcome.codes) == [(0, 1), (0, 1), (1, 1), (1, 1)], str(outcome)
    assert [blamed(report, "NET007") for report in reports(outcome)] == [[[1]], [[1]]]


def test_gpus_behind_device_cgroups_are_told_apart() -> None:
    report = perform(BEHIND_CGROUPS).report
    assert report is not None
    assert report.result("GPU001")["status"] == "pass"
    assert report.result("GPU002")["status"] == "pass"


def test_srun_with_labels_can_be_read(slurm_cluster: Callable[..., SlurmCluster]) -> None:
    cluster = slurm_cluster(2)
    options = ["--label", "-J", JOB_NAME, "-N", "2", f"--chdir={cluster.folder}"]
    doctor = [sys.executable, "-m", "doctor", "check", "--select", "NET007", "--share", "share"]
    done = cluster.srun(options, doctor, ODD)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert {line.partition(":")[0] for line in lines} == {"0"}
    assert "0: ✗ error   NET007 interface-unmatched" in lines
    assert any(line.startswith("0: checks: 1 applied") for line in lines)

"""Live scenes on hosts of the lab: found and rightly blamed; twins and healthy jobs are left alone.

Of the scenes of one fault the first is played, none if it is among those in CAUSED_IN_ONE_PROCESS; all are with
DOCTOR_LONG_TESTS=1 and by ``benchmarks/live_faults.py``.
"""

from __future__ import annotations

import pytest

from benchmarks.live_faults import main
from tests.faults.live.healthy_jobs import HEALTHY
from tests.faults.live.program import SCENES
from tests.faults.live.scenes import LiveScene, noise, score
from tests.faults.live.stage import perform
from tests.lab.sample import long_only, sampled

CAUSED_IN_ONE_PROCESS = frozenset(
    [f"ENV0{number}" for number in ("06", "10", "11")]
    + ["GPU002", "GPU005", "NCCL007", "NCCL008"]
    + [f"NET0{number}" for number in ("02", "04", "05", "07", "08", "09", "11", "16")]
)
"""Checks whose faults tests/checks/test_*_real.py cause, and read with the same collectors: what gathering adds shows
in the scenes that are played."""


@pytest.mark.parametrize(
    "scene", sampled(SCENES, lambda scene: scene.fault, "benchmarks/live_faults.py", CAUSED_IN_ONE_PROCESS)
)
def test_scene(scene: LiveScene) -> None:
    result = score(scene)
    assert not result.complaints, "\n".join(result.complaints)


def test_the_benchmark_prints_its_table_for_a_scene(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one that is played above: the same process plays a scene once."""
    titles = [one.title for one in SCENES]
    scene = next(
        one
        for one in SCENES
        if one.fault not in CAUSED_IN_ONE_PROCESS and sum(title.startswith(one.title) for title in titles) == 1
    )
    code = main([scene.title])
    row, sums = (line for line in capsys.readouterr().out.splitlines() if scene.name in line or " live faults " in line)
    if "skipped" in row:
        pytest.skip("the machine can't cause this fault")
    assert row.startswith(f"| {scene.name} | {scene.id} | yes | yes | yes | ")
    assert sums.startswith("1 live faults of 1 ids: 1 detected, 1 with the right culprit; 0 false alarms")
    assert code == 0


PLAYED = (
    "three hosts",
    "two hosts, over the store",
    "full names as host names",
    "a storage network besides",
    "Docker on one host, left out by NCCL's list",
    "two subnets and a router",
)
BY_TORCHRUN = "two hosts by torchrun, two ranks each, over its store"
LEFT_OUT = {BY_TORCHRUN: long_only("tests/examples/test_recipes.py has torchrun start healthy hosts")}
SIMILAR = long_only("a healthy job that differs less from the twins of the scenes above is run")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PLAYED else LEFT_OUT.get(name, SIMILAR)) for name in HEALTHY]
)
def test_healthy(name: str) -> None:
    outcome = perform(HEALTHY[name])
    assert not noise(HEALTHY[name], outcome), f"{noise(HEALTHY[name], outcome)}\n{outcome}"
    report = outcome.report
    assert report is not None
    assert report.report["coverage"]["ranks_seen"] == HEALTHY[name].world_size
    assert report.result("NET013")["status"] == "pass"
    assert report.result("HOST003")["status"] == "pass"

"""Live scenes on hosts of the lab: found and rightly blamed; twins and healthy jobs are left alone.

Of the scenes of one fault the first is played, all with DOCTOR_LONG_TESTS=1; ``benchmarks/live_faults.py`` plays all.
"""

from __future__ import annotations

import pytest

from tests.faults.live.healthy_jobs import HEALTHY
from tests.faults.live.program import SCENES
from tests.faults.live.scenes import LiveScene, noise, score
from tests.faults.live.stage import perform
from tests.lab.sample import long_only, sampled


@pytest.mark.parametrize("scene", sampled(SCENES, lambda scene: scene.fault, "benchmarks/live_faults.py"))
def test_scene(scene: LiveScene) -> None:
    result = score(scene)
    assert not result.complaints, "\n".join(result.complaints)


SIZES = long_only("a job of another size or way to gather is run")
LARGER = (
    "eight hosts",
    "four hosts, two ranks each",
    "two hosts, two ranks each, over the store",
    "two hosts by torchrun, in a folder",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SIZES if name in LARGER else ()) for name in HEALTHY])
def test_healthy(name: str) -> None:
    outcome = perform(HEALTHY[name])
    assert not noise(HEALTHY[name], outcome), f"{noise(HEALTHY[name], outcome)}\n{outcome}"
    report = outcome.report
    assert report is not None
    assert report.report["coverage"]["ranks_seen"] == HEALTHY[name].world_size
    assert report.result("NET013")["status"] == "pass"
    assert report.result("HOST003")["status"] == "pass"

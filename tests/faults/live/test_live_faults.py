"""Live scenes on hosts of the lab: found and rightly blamed; twins and healthy jobs are left alone.

Of the scenes of one fault the first is played, all with DOCTOR_LONG_TESTS=1; ``benchmarks/live_faults.py`` plays all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from tests.faults.live.healthy_jobs import HEALTHY
from tests.faults.live.program import SCENES
from tests.faults.live.scenes import LiveScene, noise, score
from tests.faults.live.stage import perform


def _sampled() -> Iterator[ParameterSet]:
    played: set[str] = set()
    reason = "another scene of this fault is played; DOCTOR_LONG_TESTS=1 plays all, and benchmarks/live_faults.py does"
    for scene in SCENES:
        left_out = scene.fault in played and "DOCTOR_LONG_TESTS" not in os.environ
        played.add(scene.fault)
        yield pytest.param(scene, id=scene.title, marks=pytest.mark.skip(reason=reason) if left_out else ())


@pytest.mark.parametrize("scene", [*_sampled()])
def test_scene(scene: LiveScene) -> None:
    result = score(scene)
    assert not result.complaints, "\n".join(result.complaints)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name: str) -> None:
    outcome = perform(HEALTHY[name])
    assert not noise(HEALTHY[name], outcome), f"{noise(HEALTHY[name], outcome)}\n{outcome}"
    report = outcome.report
    assert report is not None
    assert report.report["coverage"]["ranks_seen"] == HEALTHY[name].world_size
    assert report.result("NET013")["status"] == "pass"
    assert report.result("HOST003")["status"] == "pass"

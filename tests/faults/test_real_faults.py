"""Scenes through the real command: the fault is found and rightly blamed, and its healthy variant passes.

Of the scenes of one check the first is run, none if test_live_faults.py runs one on several hosts; DOCTOR_LONG_TESTS=1
and ``benchmarks/real_faults.py`` run all.
"""

from __future__ import annotations

import pytest

from tests.faults.live.program import SCENES as LIVE
from tests.faults.live.stage import DIRECT
from tests.faults.program import SCENES
from tests.faults.scenes import Scene, score
from tests.faults.stage import CannotPlay
from tests.lab.needs import require_namespaces
from tests.lab.sample import sampled


def _ids_of_live_scenes() -> set[str]:
    """Checks whose fault live scenes show here, without a launcher that may not be installed."""
    try:
        require_namespaces()
    except CannotPlay:
        return set()
    first = {scene.fault: scene for scene in reversed(LIVE)}
    return {fault for fault, scene in first.items() if scene.faulty.launcher is DIRECT}


@pytest.mark.parametrize(
    "scene", sampled(SCENES, lambda scene: scene.id, "benchmarks/real_faults.py", _ids_of_live_scenes())
)
def test_scene(scene: Scene) -> None:
    try:
        result = score(scene)
    except CannotPlay as why:
        pytest.skip(str(why))
    assert not result.complaints, "\n".join(result.complaints)

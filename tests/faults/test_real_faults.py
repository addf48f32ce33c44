"""Scenes through the real command: the fault is found and rightly blamed, and its healthy variant passes.

Of the scenes of one family the first is run: tests/checks/test_*_real.py cause the fault of each check, and read it
with the same collectors. DOCTOR_LONG_TESTS=1 and ``benchmarks/real_faults.py`` run all.
"""

from __future__ import annotations

import pytest

from tests.faults.program import SCENES
from tests.faults.scenes import Scene, score
from tests.faults.stage import CannotPlay
from tests.lab.sample import sampled


@pytest.mark.parametrize("scene", sampled(SCENES, lambda scene: scene.id[:-3], "benchmarks/real_faults.py"))
def test_scene(scene: Scene) -> None:
    try:
        result = score(scene)
    except CannotPlay as why:
        pytest.skip(str(why))
    assert not result.complaints, "\n".join(result.complaints)

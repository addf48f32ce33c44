"""Scenes through the real command: the fault is found and rightly blamed, and its healthy variant passes.

Of the scenes of one family the first is run: tests/checks/test_*_real.py cause the fault of each check, and read it
with the same collectors. DOCTOR_LONG_TESTS=1 and ``benchmarks/real_faults.py`` run all.
"""

from __future__ import annotations

import pytest

from benchmarks.real_faults import main
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


def test_the_benchmark_prints_its_table_for_a_scene(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the first scene, which is played above: the same process plays a scene once."""
    scene = SCENES[0]
    code = main([scene.title])
    row, sums = (line for line in capsys.readouterr().out.splitlines() if scene.name in line or " faults of " in line)
    if "skipped" in row:
        pytest.skip("the machine can't cause this fault")
    assert row == f"| {scene.name} | {scene.id} | yes | yes | yes |"
    assert sums.startswith(
        "1 faults of 1 ids: 1 found, 1 with the correct culprit, 1 healthy variants without finding;"
    )
    assert code == 0

"""Every scene through the real command: the fault is found and rightly blamed, and its healthy twin is left alone."""

from __future__ import annotations

import pytest

from tests.faults.program import SCENES
from tests.faults.scenes import Scene, score
from tests.faults.stage import CannotPlay


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.title)
def test_scene(scene: Scene) -> None:
    try:
        result = score(scene)
    except CannotPlay as why:
        pytest.skip(str(why))
    assert not result.complaints, "\n".join(result.complaints)

"""All scenes, in the order in which they are shown."""

from __future__ import annotations

from tests.faults import gpu_scenes, job_scenes, launcher_scenes, newcomer_scenes, settings_scenes
from tests.faults.scenes import Scene

SCENES: tuple[Scene, ...] = (
    *newcomer_scenes.SCENES,
    *settings_scenes.SCENES,
    *gpu_scenes.SCENES,
    *job_scenes.SCENES,
    *launcher_scenes.SCENES,
)

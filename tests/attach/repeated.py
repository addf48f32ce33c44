"""Whether a training run ends with the same numbers if ``doctor attach`` reads it meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.attach.jobs import TrainingJob
from tests.attach.plays import AttachScene, job_of
from tests.lab.speed import patience

REPEATS = AttachScene("repeats", world=2)


def differences(
    folder: Path, attaches: Sequence[Sequence[str]], pace: float = 0.0, scene: AttachScene = REPEATS
) -> list[str]:
    """Train and attach with each of these arguments, train as many steps alone, and return what differs.

    ``pace``: seconds that each step of ``REPEATS`` takes longer while the doctor is attached, so that there are
    fewer."""
    attached, alone = folder / "attached", folder / "alone"
    for part in (attached, alone):
        part.mkdir()
    (attached / "pace").write_text(str(pace))
    with job_of(scene, attached) as job:
        results = [job.attach(*arguments) for arguments in attaches]
        assert all(process.is_running() for process in job.processes), (attached / "log").read_text()
        (attached / "enough").touch()
        first = _digests(job, scene.world)
    (alone / "steps").write_text(str(first[0]["steps"]))
    (alone / "enough").touch()
    with job_of(scene, alone) as job:
        second = _digests(job, scene.world)
    wrong = [
        f"rank {rank}: {name} differ after {one['steps']} steps"
        for rank, (one, other) in enumerate(zip(first, second, strict=True))
        for name in one
        if one[name] != other[name]
    ]
    return wrong + [
        f"exit code {one.code}: {one.report.get('outcome')} {one.findings} {one.stderr}"
        for one in results
        if one.code != 0
    ]


def _digests(job: TrainingJob, world: int) -> list[dict[str, Any]]:
    files = [job.folder / f"digests-{rank}" for rank in range(world)]
    until = time.monotonic() + patience(120)
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, (job.folder / "log").read_text()
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]

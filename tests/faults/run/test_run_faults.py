"""A sample of the runs: the ways between ranks (rank 0's store, torchrun's, the folder), and every kind of fault once.

``python benchmarks/run_faults.py`` plays all of them, each with its healthy twin and at the callback's defaults.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.run_faults import main
from tests.faults.run.program import HEALTHY, SCENES
from tests.faults.run.scenes import RunScene, judged, noise
from tests.faults.run.stage import perform
from tests.lab.needs import CannotPlay
from tests.lab.sample import ALL

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")

SAMPLE = (
    "one more batch on rank 1, of two",
    "streams, one of which ends early, and an epoch-end log with sync",
    "no epoch in the shuffling",
    "an all_gather only on rank 0",
    "rank 0 stopped",
    "a row that never completes on rank 1",
    "rank 3 of a mesh asleep, tensor parallel",
    "rank 0 of a mesh asleep, pipelines",
    "rank 1 killed, by torchrun",
    "the loss of rank 1 turns NaN",
    *(("the GIL held on rank 1", "an exception on rank 1") if ALL else ()),
)
HEALTHY_SAMPLE = ("DDP and validation", "uneven but joined", "the other Lightning")
SOON = ("hang_after", 3.0)
"""In place of the default, which gives a hang eight seconds: a sample must not take long."""

by_name = {scene.name: scene for scene in SCENES}


def soon(scene: RunScene) -> RunScene:
    """The same with a verdict after three seconds."""
    return replace(scene, run=replace(scene.run, options=(*scene.run.options, SOON)))


@pytest.mark.parametrize("name", SAMPLE)
def test_fault(name: str) -> None:
    scene = by_name[name]
    try:
        found, blamed = judged(soon(scene) if scene.does == "hangs" else scene)[1:]
    except CannotPlay as why:
        pytest.skip(str(why))
    assert not [*found, *blamed], "\n".join([*found, *blamed])


@pytest.mark.parametrize("name", HEALTHY_SAMPLE)
def test_healthy(name: str) -> None:
    wrong = noise(perform(HEALTHY[name]))
    assert not wrong, "\n".join(wrong)


BY_BENCHMARK = ("no epoch in the shuffling", "DDP and validation")
"""Of those above, which the same process plays once: a fault, whose healthy variant is played for it, and a healthy
run."""


def test_the_benchmark_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    fault, healthy = BY_BENCHMARK
    code = main(["--only", f"{fault},healthy {healthy}"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"| {fault} | 2, ") and line.endswith("| yes | yes |  | yes |") for line in lines)
    assert any(line.startswith(f"| {healthy} | ") and line.endswith("|  |  |  | yes |") for line in lines)
    assert lines[-1].startswith(
        "1 faults of 1 ids in real runs: 1 found, 1 with the right culprit (100%); 0 false alarms"
    )
    assert code == 0


def test_scenes_have_programs_and_names_of_their_own() -> None:
    runs = [*(scene.run for scene in SCENES), *HEALTHY.values()]
    missing = [
        run.program for run in runs if run.program.partition(".")[2] not in defined(run.program.partition(".")[0])
    ]
    assert not missing
    assert len(by_name) == len(SCENES)
    assert all({*scene.run.culprits} <= {*range(scene.run.world)} for scene in SCENES)
    assert all(scene.run.culprits for scene in SCENES), "a fault that is planted nowhere"


def defined(module: str) -> set[str]:
    """The functions of a module of programs, which need not be imported for it."""
    tree = ast.parse((Path(__file__).parent / "programs" / f"{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_rest_is_left_to_the_benchmark() -> None:
    rest = [scene.name for scene in SCENES if scene.name not in SAMPLE]
    rest += [name for name in HEALTHY if name not in HEALTHY_SAMPLE]
    pytest.skip(f"left to benchmarks/run_faults.py: {'; '.join(rest)}")

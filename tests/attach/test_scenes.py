"""Real jobs that hang, and jobs that take their time: ``doctor attach`` tells the rank and the kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.attach.plays import SCENES, AttachScene, play
from tests.attach.repeated import differences
from tests.lab.needs import ROOT, CannotPlay
from tests.lab.sample import long_only

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240)]
ELSEWHERE = {
    "pool-deadlocks": "pool-loses-a-child stands in the same call",
    "killed-at-start": "killed loses its rank as well",
    "accelerate-sleeps": "gathers waits in the same call of torch",
    "accelerate-moves": "moves calls the same",
    "lightning-sleeps under Lightning": "test_launched_jobs.py finds these ranks",
    "lightning-moves under Lightning": "test_launched_jobs.py finds these ranks",
    "sleeps under torchrun": "test_launched_jobs.py finds these ranks",
    "sleeps under mpirun": "test_launched_jobs.py finds these ranks",
    "sleeps under torch.multiprocessing": "test_launched_jobs.py finds these ranks",
    "sleeps (own PID namespaces)": "test_sampler.py reads a process of another PID namespace",
    "sleeps (hosts over --share)": "test_gathered.py gathers hosts in a folder",
    "gathers (srun --overlap)": "test_gathered.py attaches to the same job",
    "sleeps (Ray Train)": "test_gathered.py attaches to the same job",
    "sleeps (seccomp filter)": "test_refusals.py reads a process under the same filter",
    "is-stopped (another user)": "test_attached_job.py has the same states without stacks",
    "is-stopped (PR_SET_DUMPABLE 0)": "test_attached_job.py has the same states without stacks",
    "is-stopped (no CAP_SYS_PTRACE)": "test_attached_job.py has the same states without stacks",
    "sleeps (another user)": "test_sampler.py is refused likewise, and test_targets.py joins such ranks",
    "sleeps (PR_SET_DUMPABLE 0)": "test_sampler.py is refused likewise, and test_targets.py joins such ranks",
    "sleeps (no CAP_SYS_PTRACE)": "test_sampler.py is refused likewise",
    "sleeps (seccomp filter, PR_SET_DUMPABLE 0)": "test_refusals.py reads a process under the same filter",
    "moves (own PID namespaces)": "moves calls the same",
    "moves (hosts over --share)": "moves calls the same",
    "moves (srun --overlap)": "moves calls the same",
    "fsdp-moves": "ddp-moves takes the same path",
    "fsdp-uneven": "ddp-uneven parts at the same loop",
    "fsdp-even": "ddp-moves takes the same path",
    "passes-breakpoints": "moves calls the same",
    "receives": "gathers waits for the last rank as well",
    "loads-first": "computes takes its time as well",
    "tokenizes-in-threads": "computes takes its time as well",
    "downloads": "test_attached_job.py has the same stacks and counts",
    "packs": "test_attached_job.py has the same stacks and counts",
    "exchanges-much": "test_attached_job.py has the same stacks and counts",
    "slow-steps": "computes takes its time as well",
    "tokenizes-in-pool": "tokenizes takes its time as well, and pool-loses-a-child has such a pool",
    "validates": "computes takes its time as well",
}
"""Scenes that benchmarks/attach.py plays, by what shows their claim by default."""
PARAMETERS = [
    pytest.param(scene, id=scene.title, marks=long_only(ELSEWHERE[scene.title]) if scene.title in ELSEWHERE else ())
    for scene in SCENES
]


@pytest.mark.parametrize("scene", PARAMETERS)
def test_a_scene_is_told_and_left_as_it_was(tmp_path: Path, scene: AttachScene) -> None:
    for module in scene.needs:
        pytest.importorskip(module)
    try:
        assert play(scene, tmp_path) == []
    except CannotPlay as reason:
        pytest.skip(str(reason))


def test_training_ends_with_the_same_numbers(tmp_path: Path) -> None:
    assert differences(tmp_path, [("--locals", "--rounds", "2")], pace=0.03) == []


def test_the_figures_that_are_kept_are_of_these_scenes() -> None:
    kept = json.loads((ROOT / "benchmarks" / "attach_results.json").read_text())
    found = [(row["title"], row["finding"]) for row in kept["rows"]]
    assert found == [(scene.title, scene.finding) for scene in SCENES]
    assert all(row["right"] >= 0.95 * row["played"] > 0 for row in kept["rows"])

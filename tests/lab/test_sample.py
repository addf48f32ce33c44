"""Whole jobs of the slow step are sampled by turns: in some of them each is run, and in each some of every kind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lab.sample import SUBJECTS, TURN, TURNS, of_this_turn, turn
from tests.suite import JOBS, TESTS

RECIPES = "examples/test_recipes.py::"
NAMES = (
    "attach/test_gathered.py::test_srun_overlap_attaches",
    *(
        f"{RECIPES}test_{name}"
        for name in ("slurm_job", "lightning_by_slurm", "mpirun[0]", "mpirun[1]", "array_of_jobs")
    ),
    *(f"frameworks/test_frameworks.py::test_numbers[{name}]" for name in ("fsdp1", "lightning", "ray", "transformers")),
    "test_documented_commands.py::test_commands",
)
NUMBERS = (0, 1, 2, 0x1751801F, 0x67D6AD7E, 0xB0425A34)


def folders(names: set[str]) -> set[str]:
    return {name.partition("/")[0].partition("::")[0] for name in names}


@pytest.mark.parametrize("first", NUMBERS)
def test_every_job_is_run_in_some_turn(first: int) -> None:
    assert set().union(*(of_this_turn(NAMES, (), first + more) for more in range(TURNS))) == {*NAMES}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_turn_has_a_job_of_each_folder_launcher_and_framework(number: int) -> None:
    picked = of_this_turn(NAMES, (), number)
    assert picked < {*NAMES}
    assert folders(picked) == folders({*NAMES})
    for word in ("lightning", "mpirun", "fsdp1", "[ray]", "transformers"):
        assert any(word in name for name in picked), word
    assert any("slurm" in name or "srun" in name for name in picked)


def test_what_runs_always_stands_for_its_folder_but_for_no_job() -> None:
    always = ("cluster/test_ray.py::test_addresses",)
    jobs = [f"cluster/test_{name}.py::cluster" for name in ("mpi", "ray")]
    turns = [of_this_turn(jobs[:1], always, number) for number in range(TURNS)]
    assert sorted(map(len, turns)) == [0, 0, 1]
    assert all(of_this_turn(jobs[:1], (), number) == {jobs[0]} for number in range(TURNS))
    assert all(jobs[1] in of_this_turn(jobs, always, number) for number in range(TURNS))


def test_a_name_that_only_contains_a_word_is_of_no_framework() -> None:
    jobs = [f"examples/test_recipes.py::test_array_{number}" for number in range(TURNS)]
    assert [len(of_this_turn(jobs, (), number)) for number in NUMBERS] == [1] * len(NUMBERS)


def test_the_turn_is_that_of_the_commit_or_of_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TURN, "5")
    assert turn() == 5
    monkeypatch.delenv(TURN)
    monkeypatch.setattr("tests.lab.sample.time.time", lambda: 20_000 * 86_400 + 5.0)
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TESTS, capture_output=True, text=True, check=False)
    assert turn() == (int(asked.stdout[:8], 16) if asked.returncode == 0 else 20_000)
    monkeypatch.setenv("PATH", "/nowhere")
    assert turn() == 20_000


@pytest.mark.parametrize("job", JOBS)
def test_sampled_jobs_exist(job: str) -> None:
    path, _, name = job.partition("::")
    module = TESTS / path
    assert module.exists()
    assert not name or f"def {name.partition('[')[0]}" in Path(module).read_text(encoding="utf-8")


def test_subjects_share_no_word() -> None:
    words = [word for ours in SUBJECTS.values() for word in ours]
    assert len(words) == len({*words})

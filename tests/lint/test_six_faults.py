"""A whole script with six faults, and its mended twin, through the command."""

import json
from pathlib import Path

import pytest

from tests.lab.command import run_doctor

SCRIPTS = Path(__file__).parent / "scripts"
FAULTS = {
    "CODE001": "map_location is not set",
    "CODE003": "GPU 0",
    "CODE005": "all_reduce",
    "CODE011": "every epoch",
    "CODE020": "losses",
    "CODE029": "All ranks write",
}


def lint(name: str) -> tuple[int, list[tuple[str, dict]]]:
    done = run_doctor("lint", "--preview", "--format", "json", SCRIPTS / name, cwd=SCRIPTS)
    results = json.loads(done.stdout)["results"]
    return done.returncode, [(one["id"], finding) for one in results for finding in one["findings"]]


def test_six_faults_are_found_and_nothing_else():
    code, found = lint("six_faults.py")
    assert code == 1
    assert [name for name, _ in found] == sorted(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_the_words_name_what_is_at_stake(name):
    _, found = lint("six_faults.py")
    [finding] = [one for id_, one in found if id_ == name]
    assert FAULTS[name] in finding["summary"]


def test_the_mended_twin_is_silent():
    assert lint("six_faults_mended.py") == (0, [])
